"""Starts a whole job again after a rank has failed: ``shoal run --max-restarts``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from ..ranks.environment import Job


@dataclass(frozen=True)
class JobOutcome:
    """The end of one start of a job.

    Attributes:
        code: the exit code.
        failed: whether a rank failed and nobody has stopped the job.
    """

    code: int
    failed: bool = False


def run_with_restarts(job: Job, most: int, run: Callable[[Job, str], JobOutcome]) -> int:
    """Run a job, and start it again while it fails; returns the exit code of the last start.

    Args:
        job: the first start; ``epoch`` counts the later ones.
        most: number of restarts.
        run: runs one start to its end.  The text is for the user, at the end of a start that failed.
    """
    for restart in range(1, most + 1):
        ended = run(job, f"starting all ranks again: restart {restart} of {most}")
        if not ended.failed:
            return ended.code
        job = dataclasses.replace(job, epoch=job.epoch + 1)
    return run(job, "").code
