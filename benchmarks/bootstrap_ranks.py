"""Thousands of ranks that meet in one process; each runs the package's code on its own connections.

A rank is a greenlet. When a connection would block or the code sleeps, another rank runs; nothing else is
replaced. So the bytes and the order of requests are those of real ranks, and every connection is a kernel
socket. But there is one Python interpreter, and all ranks share one core.
"""

from __future__ import annotations

import heapq
import itertools
import random
import select
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import greenlet

from shoal.common.process_identity import ProcessIdentity
from shoal.errors import WireTimeout
from shoal.net import Connection, Deadline
from shoal.rendezvous import RendezvousPoint, Request, Venue
from shoal.rendezvous.protocol import Rendezvous
from shoal.store import Store, TCPStore
from shoal.store.tcp import client as tcp

#: number of ranks per simulated host
PER_HOST = 8
#: number of ranks that start per second; see ``rendezvous.schemes``
PER_SECOND = 2500


class Hub:
    """Runs greenlets, each until it waits for a descriptor or a time."""

    def __init__(self) -> None:
        self._main = greenlet.getcurrent()
        self._poll = select.epoll()
        self._known: set[int] = set()
        self._waiting: dict[int, greenlet.greenlet] = {}
        self._alarms: list[tuple[float, int, greenlet.greenlet, list[bool]]] = []
        self._order = itertools.count()
        self._alive = 0

    def spawn(self, function: Callable[[], None], delay: float) -> None:
        def run(_: bool) -> None:
            try:
                function()
            finally:
                self._alive -= 1

        self._alive += 1
        self._set_alarm(delay, greenlet.greenlet(run, self._main))

    def sleep(self, seconds: float) -> None:
        self._set_alarm(seconds, greenlet.getcurrent())
        self._main.switch()

    def wait(self, fd: int, events: int, seconds: float) -> bool:
        """Wait until the descriptor is ready; return False at the timeout."""
        events |= select.EPOLLONESHOT
        if fd in self._known:
            try:
                self._poll.modify(fd, events)
            except FileNotFoundError:  # the number was reused for another socket
                self._poll.register(fd, events)
        else:
            self._known.add(fd)
            self._poll.register(fd, events)
        current = self._waiting[fd] = greenlet.getcurrent()
        done = self._set_alarm(seconds, current)
        ready = bool(self._main.switch())
        done[0] = True
        self._waiting.pop(fd, None)
        return ready

    def run(self) -> None:
        while self._alive:
            now = time.monotonic()
            while self._alarms and self._alarms[0][0] <= now:
                _, _, sleeper, done = heapq.heappop(self._alarms)
                if not done[0]:
                    sleeper.switch(False)
            pause = max(0.0, self._alarms[0][0] - time.monotonic()) if self._alarms else 1.0
            for fd, _ in self._poll.poll(pause, 4096):
                if (waiting := self._waiting.get(fd)) is not None:
                    waiting.switch(True)

    def _set_alarm(self, seconds: float, sleeper: greenlet.greenlet) -> list[bool]:
        done = [False]
        heapq.heappush(self._alarms, (time.monotonic() + seconds, next(self._order), sleeper, done))
        return done


@contextmanager
def cooperative(hub: Hub) -> Iterator[None]:
    """Context in which connections wait in ``hub``."""

    def wait(self: Any, poll: select.poll, deadline: Deadline, what: str) -> None:
        self._check_open()
        events = select.EPOLLIN if poll is self._readable else select.EPOLLOUT
        if not hub.wait(self.fileno(), events, deadline.remaining()):
            raise WireTimeout(f"waited for {what} {self.peer}")

    class Time:
        monotonic = staticmethod(time.monotonic)
        sleep = staticmethod(hub.sleep)

    was = Connection._await
    Connection._await = wait  # type: ignore[method-assign]
    tcp.time = Time  # type: ignore[attr-defined]
    try:
        yield
    finally:
        Connection._await = was  # type: ignore[method-assign]
        tcp.time = time  # type: ignore[attr-defined]


@dataclass
class Outcome:
    """The seconds until the last rank had finished, and the number of cut connections."""

    seconds: float
    cut: int = 0
    failures: list[str] = field(default_factory=list)


class _Patience:
    """The ``closed`` event of a client that is not closed while it waits."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._set = False

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._set = True

    def wait(self, seconds: float) -> bool:
        self._hub.sleep(seconds)
        return self._set


def rendezvous_point(
    store: Store, rank: int, size: int, host: str, me: ProcessIdentity, timeout: float
) -> RendezvousPoint:
    """Return the open point of a rank on a simulated ``host``, which really runs in this process."""
    request = Request(urlsplit("env://"), rank, size, b"", Deadline(timeout), {})
    identity = ProcessIdentity(f"{host}/kernel", me.process)
    return RendezvousPoint(Venue(store, rank, size), request, "job", 0, host, identity)


def meet(
    open_store: Callable[[], Store],
    ranks: int,
    cut: float,
    patience: float,
    cooperative: Callable[[Hub], AbstractContextManager[None]] = cooperative,
) -> Outcome:
    """Let ``ranks`` ranks meet; a share of ``cut`` loses its connection (shoal's server only)."""
    hub, me, chosen = Hub(), ProcessIdentity.current(), random.Random(ranks)
    outcome = Outcome(0.0)
    stores: list[Store] = []
    begin = time.monotonic()

    def rank(number: int, cut_after: float | None) -> None:
        try:
            store = open_store()
            store._backing.closed = _Patience(hub)  # type: ignore[assignment]
            stores.append(store)
            if cut_after is not None:
                hub.spawn(lambda: break_off(store), cut_after)
            name = f"host {number // PER_HOST}"
            meeting = Rendezvous(rendezvous_point(store, number, ranks, name, me, patience))
            meeting.join()
            local_ranks = list(
                range(number - number % PER_HOST, min(ranks, number - number % PER_HOST + PER_HOST))
            )
            assert (meeting.rank, meeting.size, meeting.local_ranks) == (number, ranks, local_ranks)
            outcome.seconds = max(outcome.seconds, time.monotonic() - begin)
        except Exception as error:
            outcome.failures.append(f"rank {number}: {error!r}")

    def break_off(store: Store) -> None:
        assert isinstance(store, TCPStore)
        for line in [*store._backing._busy, *store._backing._idle]:
            if line.connection is not None:
                line.connection.shutdown()
                outcome.cut += 1

    with cooperative(hub):
        for number in range(ranks):
            loses = chosen.uniform(0.0, 0.05 + ranks / PER_SECOND) if chosen.random() < cut else None
            hub.spawn(partial(rank, number, loses), number / PER_SECOND if ranks >= 500 else 0.0)
        hub.run()
        for store in stores:
            store.close()
    return outcome
