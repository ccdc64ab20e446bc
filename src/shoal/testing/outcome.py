"""The outcome of one rank or worker, and the error that shows those of all."""

from __future__ import annotations

import pickle
import signal
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..common.wording import counted
from ..errors import RemoteError


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one rank, or one worker of RPC, ended.

    ``value`` counts if ``error``, ``exitcode`` and ``stacks`` are all None; otherwise that one which is set
    says why there is no value.

    Attributes:
        rank: which one; -1 for a worker.
        value: what the function returned.
        error: the exception that it raised, or a RemoteError with its text if it cannot be pickled.
        traceback: the exception's traceback as text.
        exitcode: of a process that ended without reporting: its exit code, or minus the signal.
        stacks: the stacks of a rank or worker that did not end before the deadline.
        at: moment of the report on the monotonic clock: the failure with the smallest came first.
        worker: its name; "" for a rank.
    """

    rank: int
    value: Any = None
    error: BaseException | None = None
    traceback: str = ""
    exitcode: int | None = None
    stacks: str | None = None
    at: float = 0.0
    worker: str = ""

    @property
    def who(self) -> str:
        """``rank 1``, or ``worker 'ps'``."""
        return f"worker {self.worker!r}" if self.worker else f"rank {self.rank}"

    @property
    def ok(self) -> bool:
        """Whether the function returned."""
        return self.error is None and self.exitcode is None and self.stacks is None

    def describe(self) -> str:
        """The outcome in words."""
        if self.stacks is not None:
            return f"{self.who} was still running at the deadline:\n{self.stacks}"
        if self.error is not None:
            return f"{self.who} raised:\n{self.traceback}"
        if self.exitcode is not None:
            return f"{self.who} {_ending(self.exitcode)}"
        return f"{self.who} returned"


def _ending(exitcode: int) -> str:
    if exitcode >= 0:
        return f"exited with code {exitcode} before the function returned"
    try:
        name = signal.Signals(-exitcode).name
    except ValueError:
        name = f"signal {-exitcode}"
    return f"was ended by {name}"


def failed(rank: int, error: BaseException, at: float, worker: str = "") -> Outcome:
    """The outcome of a rank or worker whose function raised ``error``."""
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    return Outcome(rank, error=error, traceback=text, at=at, worker=worker)


def reported(rank: int, kind: str, raw: bytes, text: str, at: float) -> Outcome:
    """The outcome that a rank in another process reports.

    Args:
        kind: "value", or anything else for an exception.
        raw: the value or the exception, pickled; empty for an exception that cannot be.
        text: the exception's traceback.
    """
    if kind == "value":
        return Outcome(rank, pickle.loads(raw), at=at)
    error = pickle.loads(raw) if raw else RemoteError(text.strip().splitlines()[-1])
    return Outcome(rank, error=error, traceback=text, at=at)


def values(outcomes: Sequence[Outcome]) -> list[Any]:
    """The values that the ranks returned.

    Raises:
        RemoteError: some did not; the message shows all that failed, the first one first, and its cause
            is the first one's exception.
    """
    bad = sorted((outcome for outcome in outcomes if not outcome.ok), key=lambda outcome: outcome.at)
    if not bad:
        return [outcome.value for outcome in outcomes]
    kind = "worker" if bad[0].worker else "rank"
    head = f"{len(bad)} of {counted(len(outcomes), kind)} failed, {bad[0].who} first\n"
    text = "\n".join(f"{'-' * 80}\n{outcome.describe().rstrip()}" for outcome in bad)
    raise RemoteError(f"{head}{text}") from bad[0].error
