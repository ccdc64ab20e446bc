"""The outcome of a rank or worker, and the error that combines the outcomes of all."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..common.formatting import counted, signal_name
from ..errors import RemoteError


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a rank or an RPC worker.

    At most one of ``error``, ``exitcode`` and ``stacks`` is set, and then there is no ``value``.

    Attributes:
        rank: the rank; -1 for a worker.
        value: return value of the function.
        error: the exception that it raised, or a RemoteError with its text if it cannot be pickled.
        traceback: the exception's traceback as text.
        exitcode: exit code, or minus the signal, of a process that ended without a report.
        stacks: stacks of a rank or worker that did not end before the deadline.
        at: time of the report on the monotonic clock; the smallest is the first failure.
        worker: name of the worker; "" for a rank.
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
        """Describe the outcome."""
        if self.stacks is not None:
            return f"{self.who} was still running at the deadline:\n{self.stacks}"
        if self.error is not None:
            return f"{self.who} raised:\n{self.traceback}"
        if self.exitcode is not None:
            if self.exitcode < 0:
                return f"{self.who} was ended by {signal_name(-self.exitcode)}"
            return f"{self.who} exited with code {self.exitcode} before the function returned"
        return f"{self.who} returned"


def failed(rank: int, error: BaseException, at: float, worker: str = "") -> Outcome:
    """Create the outcome of a rank or worker whose function raised ``error``."""
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    return Outcome(rank, error=error, traceback=text, at=at, worker=worker)


def reported(rank: int, kind: str, raw: bytes, text: str, at: float) -> Outcome:
    """Create the outcome that another process reports.

    Args:
        kind: "value", or any other string for an exception.
        raw: the pickled value or exception; empty for an exception that cannot be pickled.
        text: traceback of the exception.
    """
    if kind == "value":
        return Outcome(rank, pickle.loads(raw), at=at)
    error = pickle.loads(raw) if raw else RemoteError(text.strip().splitlines()[-1])
    return Outcome(rank, error=error, traceback=text, at=at)


def values(outcomes: Sequence[Outcome]) -> list[Any]:
    """Return the values of all ranks.

    Raises:
        RemoteError: a rank failed. The message describes all failures in their order; the cause is the first
            exception.
    """
    bad = sorted((outcome for outcome in outcomes if not outcome.ok), key=lambda outcome: outcome.at)
    if not bad:
        return [outcome.value for outcome in outcomes]
    kind = "worker" if bad[0].worker else "rank"
    head = f"{len(bad)} of {counted(len(outcomes), kind)} failed, {bad[0].who} first\n"
    text = "\n".join(f"{'-' * 80}\n{outcome.describe().rstrip()}" for outcome in bad)
    raise RemoteError(f"{head}{text}") from bad[0].error
