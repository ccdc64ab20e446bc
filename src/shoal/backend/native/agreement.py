"""Agreements of the native backend, which the core runs (``cpp/engine/agreements.h``)."""

from __future__ import annotations

from typing import Any

from ... import _core
from ...errors import GroupError
from ..agreements import AgreementOutcome, News, Op, WitnessRequest
from ..base import GroupSpec


class NativeAgreement:
    """One agreement of ``core``, a group of the core; raises GroupError if too many are pending."""

    def __init__(self, core: Any, spec: GroupSpec, op: Op, value: bytes, timeout: float) -> None:
        number = core.agree(_core.AgreementOp[op.name], value, timeout)
        if number is None:
            raise GroupError(
                f"agree on rank {spec.rank} of group {spec.name!r}: 64 agreements are under way; wait for "
                "the first of them"
            )
        self._core = core
        self.number = number

    def wait(self, timeout: float) -> News:
        news = self._core.agreed(self.number, timeout)
        return News(
            AgreementOutcome[news.outcome.name],
            None if news.op is None else Op[news.op.name],
            news.value,
            tuple(Op[op.name] for op in news.called),
            tuple(news.ranks),
            None if news.ballot is None else WitnessRequest(news.ballot, news.proposal),
        )

    def ask_witness(self, request: WitnessRequest, kept: bytes) -> bytes | None:
        wanted: bytes | None = self._core.ask_witness(*request, kept)
        return wanted

    def tell_witness(self, request: WitnessRequest, kept: bytes) -> None:
        self._core.tell_witness(self.number, *request, kept)

    def losses(self) -> tuple[list[int], list[int]]:
        losses: tuple[list[int], list[int]] = self._core.losses()
        return losses
