"""Restarts of a whole job after a rank has failed: ``shoal run --max-restarts``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from ..ranks.environment import Job


@dataclass(frozen=True)
class JobOutcome:
    """Exit code of one start of a job, and whether a rank failed without a signal to stop the job."""

    code: int
    failed: bool = False


def run_with_restarts(job: Job, max_restarts: int, run: Callable[[Job, str], JobOutcome]) -> int:
    """Run a job, and restart it while it fails; return the exit code of the last start.

    Args:
        job: the first start; each restart increments ``epoch``.
        most: maximum number of restarts.
        run: runs one start.  The text is a message to print if the start fails.
    """
    for restart in range(1, max_restarts + 1):
        ended = run(job, f"starting all ranks again: restart {restart} of {max_restarts}")
        if not ended.failed:
            return ended.code
        job = dataclasses.replace(job, epoch=job.epoch + 1)
    return run(job, "").code
