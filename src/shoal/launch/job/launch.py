"""The options of a job, and its starts: ``--max-restarts`` restarts the whole job after a failure."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path

from ..metrics.counters import JobCounters
from ..metrics.endpoint import MetricsEndpoint
from ..output.line_format import LineFormat
from ..output.output import Logs
from ..ranks.environment import Job
from .signals import Signals

#: default seconds for ranks to save their work after SIGINT or SIGTERM
STOP_GRACE_S = 30.0


@dataclass(frozen=True)
class LaunchOptions:
    """The options of a job, on this machine or on other hosts: those of ``shoal run`` with the same names.

    ``restarts`` is ``--max-restarts``.  Without ``min_ranks`` the first failure ends the job, and without
    ``max_ranks`` it cannot be scaled.  ``metrics`` is a host and a port.
    """

    min_ranks: int | None = None
    max_ranks: int | None = None
    respawn: bool = False
    restarts: int = 0
    grace: float = STOP_GRACE_S
    line_format: LineFormat = field(default_factory=LineFormat)
    log_dir: Path | None = None
    store: str | None = None
    summary: bool = False
    metrics: tuple[str, int] | None = None


@dataclass(frozen=True)
class JobStart:
    """One start of a job.

    Attributes:
        job: its values; each restart increments ``epoch``.
        counters: counters of the job, of all of its starts.
        metrics: serves the metrics; the supervisor starts it after the initial ranks.
        restart: a message to print if this start fails and the job is restarted; "": it is not restarted.
    """

    job: Job
    options: LaunchOptions
    signals: Signals
    logs: Logs | None
    counters: JobCounters
    metrics: MetricsEndpoint | None
    restart: str = ""


@dataclass(frozen=True)
class JobOutcome:
    """Exit code of one start of a job, and whether a rank failed without a signal to stop the job."""

    code: int
    failed: bool = False


def run_with_restarts(
    job: Job, options: LaunchOptions, run: Callable[[JobStart], JobOutcome], *, settle: float = 0.0
) -> int:
    """Run a job, and restart it while it fails; return the exit code of the last start.

    ``run`` runs one start; ``settle`` is the delay of :class:`Signals`.  Raises LaunchError if the log files
    cannot be written, and the errors of :class:`MetricsEndpoint`.
    """
    with Signals(settle) as signals, ExitStack() as steps:
        directory = options.log_dir
        logs = None if directory is None else steps.enter_context(closing(Logs(directory, job.size)))
        counters, metrics = JobCounters(), None
        if options.metrics is not None:
            metrics = steps.enter_context(closing(MetricsEndpoint(*options.metrics)))
            metrics.add_job(job.ident, counters)
        for restart in range(1, options.restarts + 1):
            message = f"starting all ranks again: restart {restart} of {options.restarts}"
            outcome = run(JobStart(job, options, signals, logs, counters, metrics, message))
            if not outcome.failed:
                return outcome.code
            job = dataclasses.replace(job, epoch=job.epoch + 1)
            counters.restarts += 1
        return run(JobStart(job, options, signals, logs, counters, metrics)).code
