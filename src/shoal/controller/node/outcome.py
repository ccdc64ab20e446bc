"""The reply of a batch: values that were fetched or asked, and failures."""

from __future__ import annotations

from collections.abc import Iterator
from types import CodeType
from typing import Any

from ..protocol.commands import OperationFailure
from .history import Recent
from .trace import Timing


class Poison:
    """In the place of a tensor that an operation that failed should have made.

    Attributes:
        failure: which one.
    """

    __slots__ = ("failure",)

    def __init__(self, failure: OperationFailure) -> None:
        self.failure = failure


class BatchReply:
    """The results of a batch, beside tensors.

    Attributes:
        values: what was fetched or asked.
        failures: of its operations.
        stream: that it is of.
        batch: its number.
        segment: the one that runs.
        poisons: numbers of failures.
        recent: the last commands.
        timing: of all commands, while there is a trace.
    """

    def __init__(self, stream: int, poisons: Iterator[int], code: CodeType) -> None:
        self.stream = stream
        self.poisons = poisons
        self.recent = Recent(code)
        self.timing: Timing | None = None
        self.begin(0)

    def spoilt(self, poison: Poison) -> None:
        """Reply that a value which was fetched or asked could not be computed."""
        self.values.append(("poison", tuple(poison.failure)))

    def begin(self, batch: int) -> None:
        """Forget the reply of the batch before."""
        self.batch = batch
        self.values: list[Any] = []
        self.failures: list[OperationFailure] = []
        self.segment = 0
