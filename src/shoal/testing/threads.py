"""Ranks as threads of this process: a group of any size in milliseconds.

The ranks use the real rendezvous protocol with a store in memory, and each has its own backend.
"""

from __future__ import annotations

import faulthandler
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar
from urllib.parse import urlsplit

from ..backend.identity import Tuning
from ..backend.registry import backend_factory
from ..common.formatting import counted, format_seconds
from ..group import ProcessGroup
from ..initialize import world_group
from ..net import Deadline
from ..rendezvous.membership import rendezvous_at
from ..rendezvous.point import RendezvousPoint
from ..rendezvous.venue import Request, Venue
from ..store import MemoryStore
from .outcome import Outcome, failed, values

T = TypeVar("T")
_Meet: TypeAlias = Callable[[int], ProcessGroup]

#: seconds that ranks get to end after their groups were aborted
ABORT_TIMEOUT_S = 5.0


def run_threads(
    fn: Callable[..., T],
    size: int,
    *args: Any,
    backend: str = "native",
    timeout: float = 60.0,
    hosts: Sequence[str] | None = None,
    concurrency: int = 1,
    algorithm: str | None = None,
    op_timeout: float | None = None,
    secret: bytes = b"",
    **options: Any,
) -> list[T]:
    """Run ``fn(group, *args)`` on ``size`` ranks as threads and return the results in rank order.

    A rank that raises aborts its group, so that the others end too. The groups are closed at the end.

    Args:
        fn: called with each rank's world group.
        size: number of ranks.
        args: further arguments of ``fn``.
        backend: name of a registered backend.
        timeout: seconds until all must have returned. After that all stacks are written to stderr and into
            the exception, and the groups are aborted.
        hosts: host identity of each rank, to treat this machine as several; None means one host.
        concurrency: number of lanes of the groups.
        algorithm: of their collectives between hosts; None: ``SHOAL_ALGORITHM``.
        op_timeout: default timeout of operations in seconds; None means ``timeout``.
        secret: secret of the job.
        options: options of the backend.

    Raises:
        RemoteError: at least one rank raised or did not return in time. The message has each such rank's
            traceback, in the order of failure.
    """
    if hosts is not None and len(hosts) != size:
        raise ValueError(f"hosts={list(hosts)!r}: expected one for each of {counted(size, 'rank')}")
    deadline = Deadline(timeout)
    factory = backend_factory(backend)
    seconds = timeout if op_timeout is None else op_timeout
    tuning = Tuning.chosen(concurrency, algorithm)

    with MemoryStore(timeout) as store:

        def meet(rank: int) -> ProcessGroup:
            host = None if hosts is None else hosts[rank]
            left = Deadline(deadline.remaining())
            request = Request(urlsplit("memory://"), rank, size, secret, left, environ={}, host=host)
            venue = Venue(store.clone(), rank, size, job="threads", epoch=0, private=True)
            membership = rendezvous_at(RendezvousPoint.at(venue, request))
            return world_group(
                membership, factory, name="world", timeout=seconds, tuning=tuning, options=options
            )

        ranks = [_Rank(rank, meet, fn, args) for rank in range(size)]
        for rank in ranks:
            rank.thread.join(deadline.remaining())
        if any(rank.outcome is None for rank in ranks):
            _give_up(ranks, timeout)
    return values([rank.outcome for rank in ranks if rank.outcome is not None])


class _Rank:
    def __init__(self, rank: int, meet: _Meet, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self.rank = rank
        self.group: ProcessGroup | None = None
        self.outcome: Outcome | None = None
        # A daemon thread, so that a hanging rank cannot keep the test run from exiting.
        self.thread = threading.Thread(
            target=self._run, args=(meet, fn, args), name=f"rank {rank}", daemon=True
        )
        self.thread.start()

    def _run(self, meet: _Meet, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
        raised = None
        try:
            self.group = meet(self.rank)
            with self.group:
                try:
                    value = fn(self.group, *args)
                except BaseException:
                    # Taken before the group is aborted, so that the failures of the others are later.
                    raised = time.monotonic()
                    raise
                # The test decides what is a failure, so close here without raising.
                self.group.world.close(self.group.timeout)
        except BaseException as error:
            outcome = failed(self.rank, error, time.monotonic() if raised is None else raised)
        else:
            outcome = Outcome(self.rank, value, at=time.monotonic())
        # _give_up may have set the outcome already.
        if self.outcome is None:
            self.outcome = outcome


def stack_of(thread: threading.Thread) -> str:
    """Return the stack of a thread as text."""
    frame = sys._current_frames().get(thread.ident or 0)
    return "".join(traceback.format_stack(frame)) if frame is not None else "(the thread is ending)"


def _give_up(ranks: Sequence[_Rank], timeout: float) -> None:
    """Print all stacks, then abort the groups."""
    print(
        f"run_threads: not all ranks returned within {format_seconds(timeout)}; all stacks:", file=sys.stderr
    )
    faulthandler.dump_traceback(file=sys.__stderr__ or sys.stderr)
    late = [rank for rank in ranks if rank.outcome is None]
    for rank in late:
        rank.outcome = Outcome(rank.rank, stacks=stack_of(rank.thread), at=time.monotonic())
    for rank in ranks:
        if rank.group is not None:
            rank.group.world.abort(f"run_threads gave up after {format_seconds(timeout)}")
    end = time.monotonic() + ABORT_TIMEOUT_S
    for rank in late:
        rank.thread.join(max(end - time.monotonic(), 0.0))
