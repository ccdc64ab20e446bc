"""The reply to a batch: values for the master, and failures."""

from __future__ import annotations

from collections.abc import Iterator
from types import CodeType
from typing import Any

from ..protocol.commands import OperationFailure
from .history import Recent
from .trace import Timing


class Poison:
    """The replacement of a tensor that could not be computed because of `failure`."""

    __slots__ = ("failure",)

    def __init__(self, failure: OperationFailure) -> None:
        self.failure = failure


class BatchReply:
    """The reply to the batch that a stream executes.

    Attributes:
        values: the values that the master requested.
        failures: the failed operations.
        stream, batch, segment: numbers of the stream and the batch, index of the running segment.
        poisons: numbers for failures.
        recent: the last commands.
        timing: the times of commands while a trace is running, else None.
    """

    def __init__(self, stream: int, poisons: Iterator[int], code: CodeType) -> None:
        self.stream = stream
        self.poisons = poisons
        self.recent = Recent(code)
        self.timing: Timing | None = None
        self.begin(0)

    def spoilt(self, poison: Poison) -> None:
        """Add a requested value that could not be computed."""
        self.values.append(("poison", tuple(poison.failure)))

    def begin(self, batch: int) -> None:
        """Start the reply to a batch."""
        self.batch = batch
        self.values: list[Any] = []
        self.failures: list[OperationFailure] = []
        self.segment = 0
