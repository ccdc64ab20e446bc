"""A barrier that reports the missing ranks, like ``torch.distributed.monitored_barrier``.

Every rank sends a message to rank 0, which answers when all have arrived.  If some have not arrived in time,
the answer contains their ranks.  The other ranks confirm it before rank 0 aborts the group, so that the list
reaches all of them.

Messages are submitted in the caller's thread, so that successive barriers match in order; only the waiting
happens in another thread.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch

from ..common.arguments import explain_unknown_keywords
from ..common.formatting import format_seconds, ranks_named
from ..errors import GroupError, OperationTimeout, WaitTimeout
from ..future import Future
from ..spec import OpKind
from .submission import Submitter, called, in_background
from .validation.arguments import MAX_TAG

_ARRIVED = MAX_TAG + 1
_ANSWER = MAX_TAG + 2
_CONFIRMED = MAX_TAG + 3
_Received: TypeAlias = Future[tuple[torch.Tensor, int, int]]
#: Seconds to wait for confirmations of the list of missing ranks, and for the abort that follows.
_LAST_WORDS = 2.0


class MonitoredBarrier(Submitter):
    """The operation ``monitored_barrier`` of a group."""

    @explain_unknown_keywords(called)
    def monitored_barrier(self, *, timeout: float | None = None) -> Future[None]:
        """A barrier that reports, on every rank, the ranks that did not arrive in time.

        It costs more than :meth:`barrier`: two messages per rank, all with rank 0.

        Raises:
            OperationTimeout: through the future; ``ranks`` has all ranks that did not arrive within
                ``timeout``.  The group is then aborted with this reason.
        """
        seconds = self._timeout if timeout is None else self._checked_timeout(timeout)
        # A rank may arrive a whole timeout before rank 0, which then waits for another timeout.
        patience = 2 * seconds + _LAST_WORDS
        if self._rank == 0:
            arrivals = self._receive(range(1, self._size), _ARRIVED, patience)
            return in_background(lambda: self._collect(arrivals, seconds, patience))
        sent = self._send([], [0], _ARRIVED, patience)[0]
        answer = self._receive([0], _ANSWER, patience)[0]
        return in_background(lambda: self._report(sent, answer, seconds, patience))

    def _collect(self, arrivals: list[_Received], seconds: float, patience: float) -> None:
        """Find the missing ranks, and send them to the other ranks; runs on rank 0."""
        deadline = time.monotonic() + seconds
        came: list[int] = []
        missing: list[int] = []
        for rank, arrival in enumerate(arrivals, start=1):
            (came if _completes(arrival, deadline) else missing).append(rank)
        _give_time(self._send(missing, came, _ANSWER, patience), patience)
        if missing:
            _give_time(self._receive(came, _CONFIRMED, patience), _LAST_WORDS)
            error = self._timed_out(missing, seconds)
            self.abort(str(error))
            raise error

    def _report(self, sent: Future[None], answered: _Received, seconds: float, patience: float) -> None:
        """Wait for rank 0's answer, with the missing ranks; runs on the other ranks."""
        sent.wait()
        try:
            answer, _, _ = answered.wait()
        except OperationTimeout:
            raise self._timed_out([0], seconds) from None
        missing = answer.tolist()
        if missing:
            self._send([], [0], _CONFIRMED, patience)[0].wait()
            # Rank 0 sends only the abort now: wait for it, so that the group has ended when this raises.
            with contextlib.suppress(GroupError):
                _give_time(self._receive([0], _CONFIRMED, patience), _LAST_WORDS)
            raise self._timed_out(missing, seconds)

    def _timed_out(self, missing: list[int], seconds: float) -> OperationTimeout:
        return OperationTimeout(
            f"monitored_barrier of group {self._spec.name!r}: {ranks_named(missing)} did not come "
            f"within {format_seconds(seconds)}",
            missing,
        )

    def _send(self, content: list[int], to: list[int], tag: int, timeout: float) -> list[Future[None]]:
        x = torch.tensor(content, dtype=torch.int64, device=self._scratch_device)
        return self._submit_messages([self._message(OpKind.SEND, (x,), (), timeout, r, tag) for r in to])

    def _receive(self, ranks: range | list[int], tag: int, timeout: float) -> list[_Received]:
        return self._submit_messages([self._message(OpKind.RECV, (), (), timeout, r, tag) for r in ranks])


def _completes(future: Future[Any], deadline: float) -> bool:
    try:
        future.wait(max(deadline - time.monotonic(), 0.0))
    except WaitTimeout:
        return False
    return True


def _give_time(futures: Sequence[Future[Any]], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    for future in futures:
        _completes(future, deadline)
