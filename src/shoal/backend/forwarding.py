"""A channel over another one, for classes that change only some of its methods."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..errors import GroupError
from ..spec import Operation, OpKind, ReduceOp
from ..statistics import GroupStatistics
from .agreement import AgreementOp, PendingAgreement
from .base import DataChannel


class ForwardingChannel(DataChannel):
    """Passes to ``inner`` what does not move data: checks, memory, failures, agreements and the end."""

    def __init__(self, inner: DataChannel) -> None:
        self._inner = inner
        inner.on_failure = self._on_inner_failure

    def _on_inner_failure(self) -> None:
        if self.on_failure is not None:
            self.on_failure()

    @property
    def reported(self) -> bool:
        return self._inner.reported

    @reported.setter
    def reported(self, value: bool) -> None:
        self._inner.reported = value

    def supports(self, kind: OpKind, dtype: torch.dtype | None, op: ReduceOp | None) -> bool:
        return self._inner.supports(kind, dtype, op)

    def check(self, operation: Operation) -> None:
        self._inner.check(operation)

    def captured(self, tensors: Sequence[torch.Tensor]) -> bool:
        return self._inner.captured(tensors)

    def empty(self, nbytes: int, device: torch.device) -> torch.Tensor:
        return self._inner.empty(nbytes, device)

    def failure(self) -> GroupError | None:
        return self._inner.failure()

    def report(self, failure: GroupError) -> None:
        self._inner.report(failure)

    def last_completed(self) -> int:
        return self._inner.last_completed()

    def statistics(self) -> GroupStatistics:
        return self._inner.statistics()

    def fence(self, ranks: Sequence[int], timeout: float) -> list[int]:
        return self._inner.fence(ranks, timeout)

    def vote_limit(self) -> int:
        return self._inner.vote_limit()

    def agree(self, op: AgreementOp, value: bytes, timeout: float) -> PendingAgreement:
        return self._inner.agree(op, value, timeout)

    def abort(self, reason: str) -> None:
        self._inner.abort(reason)

    def begin_close(self) -> None:
        self._inner.begin_close()
