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

from ..common.formatting import format_seconds, ranks_named
from ..errors import GroupError, OperationTimeout, WaitTimeout
from ..future import Future
from ..spec import MAX_TAG, OpKind
from .operations import TensorOperations
from .submission import run_in_callback_thread

_ARRIVED = MAX_TAG + 1
_ANSWER = MAX_TAG + 2
_CONFIRMED = MAX_TAG + 3
_Received: TypeAlias = Future[tuple[torch.Tensor, int, int]]
#: Seconds to wait for confirmations of the list of missing ranks, and for the abort that follows.
_CONFIRM_TIMEOUT_S = 2.0


def monitored_barrier(group: TensorOperations, timeout: float | None) -> Future[None]:
    """See :meth:`shoal.ProcessGroup.monitored_barrier`."""
    barrier = _MonitoredBarrier(group, group._submitter.checked_timeout(timeout))
    if group._rank == 0:
        arrivals = barrier.receive(range(1, group._size), _ARRIVED)
        return run_in_callback_thread(lambda: barrier.collect(arrivals))
    sent = barrier.send([], [0], _ARRIVED)[0]
    answer = barrier.receive([0], _ANSWER)[0]
    return run_in_callback_thread(lambda: barrier.report(sent, answer))


class _MonitoredBarrier:
    def __init__(self, group: TensorOperations, seconds: float) -> None:
        self._group = group
        self._submitter = group._submitter
        self._seconds = seconds
        # A rank may arrive a whole timeout before rank 0, which then waits for another timeout.
        self._message_timeout = 2 * seconds + _CONFIRM_TIMEOUT_S

    def collect(self, arrivals: list[_Received]) -> None:
        """Find the missing ranks, and send them to the other ranks; runs on rank 0."""
        deadline = time.monotonic() + self._seconds
        came: list[int] = []
        missing: list[int] = []
        for rank, arrival in enumerate(arrivals, start=1):
            (came if _completes(arrival, deadline) else missing).append(rank)
        _give_time(self.send(missing, came, _ANSWER), self._message_timeout)
        if missing:
            _give_time(self.receive(came, _CONFIRMED), _CONFIRM_TIMEOUT_S)
            error = self._timed_out(missing)
            self._submitter.abort(str(error))
            raise error

    def report(self, sent: Future[None], answered: _Received) -> None:
        """Wait for rank 0's answer, with the missing ranks; runs on the other ranks."""
        sent.wait()
        try:
            answer, _, _ = answered.wait()
        except OperationTimeout:
            raise self._timed_out([0]) from None
        missing = answer.tolist()
        if missing:
            self.send([], [0], _CONFIRMED)[0].wait()
            # Rank 0 sends only the abort now: wait for it, so that the group has ended when this raises.
            with contextlib.suppress(GroupError):
                _give_time(self.receive([0], _CONFIRMED), _CONFIRM_TIMEOUT_S)
            raise self._timed_out(missing)

    def _timed_out(self, missing: list[int]) -> OperationTimeout:
        return OperationTimeout(
            f"monitored_barrier of group {self._submitter.spec.name!r}: {ranks_named(missing)} did not come "
            f"within {format_seconds(self._seconds)}",
            missing,
        )

    def send(self, content: list[int], to: list[int], tag: int) -> list[Future[None]]:
        x = torch.tensor(content, dtype=torch.int64, device=self._group._scratch_device)
        futures: list[Future[None]] = self._submit(OpKind.SEND, (x,), to, tag)
        return futures

    def receive(self, ranks: range | list[int], tag: int) -> list[_Received]:
        futures: list[_Received] = self._submit(OpKind.RECV, (), ranks, tag)
        return futures

    def _submit(self, kind: OpKind, inputs: Sequence[torch.Tensor], ranks: Sequence[int], tag: int) -> Any:
        timeout = self._message_timeout
        messages = [self._submitter.message(kind, inputs, (), timeout, rank, tag) for rank in ranks]
        return self._submitter.submit_messages(messages)


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
