"""The barrier that names who is missing.

Every rank reports to rank 0, which answers when all have come.  When some have not in time, the answer
holds their ranks; those that hear it say so, and only then rank 0 aborts the group, so that the list
reaches everybody who can still listen.  The idea is that of ``torch.distributed.monitored_barrier``.

The messages are submitted in the caller's thread, so that barriers issued one after another match in that
order; only the waiting happens elsewhere.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from ..errors import GroupError, OperationTimeout, WaitTimeout
from ..future import Future
from ..spec import OpKind
from ..wording import ranks_named
from .validation import MAX_TAG

if TYPE_CHECKING:
    from .process_group import ProcessGroup

_ARRIVED = MAX_TAG + 1
_VERDICT = MAX_TAG + 2
_HEARD = MAX_TAG + 3
_Received: TypeAlias = Future[tuple[torch.Tensor, int, int]]
#: Seconds that rank 0 gives those who came to hear who did not.
_LAST_WORDS = 2.0


def monitored_barrier(group: ProcessGroup, seconds: float) -> Future[None]:
    """Start the barrier; see ``ProcessGroup.monitored_barrier``."""
    # One rank may be early by the whole timeout and then wait as long again for rank 0's verdict.
    patience = 2 * seconds + _LAST_WORDS
    if group.rank == 0:
        arrivals = _receive(group, range(1, group.size), _ARRIVED, patience)
        return _in_background(lambda: _conduct(group, arrivals, seconds, patience))
    sent = _send(group, [], [0], _ARRIVED, patience)
    verdict = _receive(group, [0], _VERDICT, patience)
    return _in_background(lambda: _attend(group, sent, verdict, seconds, patience))


def _conduct(group: ProcessGroup, arrivals: list[_Received], seconds: float, patience: float) -> None:
    deadline = time.monotonic() + seconds
    came: list[int] = []
    missing: list[int] = []
    for rank, arrival in enumerate(arrivals, start=1):
        (came if _completes(arrival, deadline) else missing).append(rank)
    _give_time(_send(group, missing, came, _VERDICT, patience), patience)
    if missing:
        _give_time(_receive(group, came, _HEARD, patience), _LAST_WORDS)
        error = _error(group, missing, seconds)
        group.abort(str(error))
        raise error


def _attend(
    group: ProcessGroup,
    sent: list[Future[None]],
    verdict: list[_Received],
    seconds: float,
    patience: float,
) -> None:
    sent[0].wait()
    try:
        answer, _, _ = verdict[0].wait()
    except OperationTimeout:
        raise _error(group, [0], seconds) from None
    missing = answer.tolist()
    if missing:
        _send(group, [], [0], _HEARD, patience)[0].wait()
        # Nothing more comes from rank 0 but the abort: who sees the error finds the group ended.
        with contextlib.suppress(GroupError):
            _give_time(_receive(group, [0], _HEARD, patience), _LAST_WORDS)
        raise _error(group, missing, seconds)


def _error(group: ProcessGroup, missing: list[int], seconds: float) -> OperationTimeout:
    return OperationTimeout(
        f"monitored_barrier of group {group.name!r}: {ranks_named(missing)} did not come "
        f"within {seconds:g} s",
        missing,
    )


def _send(
    group: ProcessGroup, content: list[int], to: list[int], tag: int, timeout: float
) -> list[Future[None]]:
    x = torch.tensor(content, dtype=torch.int64, device=group._scratch_device)
    return group._submit_messages([group._message(OpKind.SEND, (x,), (), timeout, r, tag) for r in to])


def _receive(group: ProcessGroup, ranks: range | list[int], tag: int, timeout: float) -> list[_Received]:
    return group._submit_messages([group._message(OpKind.RECV, (), (), timeout, r, tag) for r in ranks])


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


def _in_background(body: Callable[[], None]) -> Future[None]:
    start: Future[None] = Future()
    start.set_result(None)
    return start.then(lambda _: body())
