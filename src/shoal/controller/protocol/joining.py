"""How workers come to their master: each calls :func:`arrive` there, and waits until it becomes a node."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from ... import rpc
from ...future.latch import Latch
from ...net import Deadline


@dataclass(frozen=True, slots=True)
class JoiningWorker:
    """A worker that has come.

    Attributes:
        name: of the worker.
        index: of the node that it was started as; None: it becomes whichever is wanted next.
        pid: its process.
    """

    name: str
    index: int | None
    pid: int


class Arrivals:
    """The workers of one master that have come and are no nodes yet, in the order of their coming."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: list[JoiningWorker] = []
        #: of those who wait for one
        self._latches: list[Latch] = []

    def come(self, arrival: JoiningWorker) -> None:
        """A worker is there."""
        with self._lock:
            self._waiting.append(arrival)
            for latch in self._latches:
                latch.set()

    def go(self, name: str) -> None:
        """A worker has died, or left."""
        with self._lock:
            self._waiting = [each for each in self._waiting if each.name != name]

    def take(self, fits: Callable[[JoiningWorker], bool], timeout: float) -> JoiningWorker | None:
        """The first worker that fits, as soon as there is one; None: none came in time."""
        deadline = Deadline(timeout)
        latch = Latch()
        with self._lock:
            self._latches.append(latch)
        try:
            while True:
                with self._lock:
                    latch.clear()
                    for arrival in self._waiting:
                        if fits(arrival):
                            self._waiting.remove(arrival)
                            return arrival
                if deadline.expired:
                    return None
                latch.wait(deadline.remaining())
        finally:
            with self._lock:
                self._latches.remove(latch)


_lock = threading.Lock()
_arrivals: WeakKeyDictionary[rpc.Agent, Arrivals] = WeakKeyDictionary()


def arrivals_at(agent: rpc.Agent) -> Arrivals:
    """Those of the master ``agent``; the first worker may come before anybody asks."""
    with _lock:
        return _arrivals.setdefault(agent, Arrivals())


def arrive(index: int | None, pid: int) -> None:
    """Called by a worker at its master: it can become node ``index``; None: any."""
    call = rpc.current()
    arrivals_at(call.agent).come(JoiningWorker(call.caller, index, pid))
