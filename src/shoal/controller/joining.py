"""How workers come to their master: each calls :func:`arrive` there, and waits until it becomes a node."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from .. import rpc
from ..wire import Deadline


@dataclass(frozen=True, slots=True)
class Arrival:
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
        self._waiting: list[Arrival] = []
        #: of who waits for one: released when one comes
        self._wakes: list[threading.Lock] = []

    def come(self, arrival: Arrival) -> None:
        """A worker is there."""
        with self._lock:
            self._waiting.append(arrival)
            for wake in self._wakes:
                if wake.locked():
                    wake.release()

    def go(self, name: str) -> None:
        """A worker has died, or left."""
        with self._lock:
            self._waiting = [each for each in self._waiting if each.name != name]

    def take(self, fits: Callable[[Arrival], bool], timeout: float) -> Arrival | None:
        """The first worker that fits, as soon as there is one; None: none came in time."""
        deadline = Deadline(timeout)
        # No threading.Condition: a Ctrl-C between two lines of its wait() raises RuntimeError.
        wake = threading.Lock()
        wake.acquire()
        with self._lock:
            self._wakes.append(wake)
        try:
            while True:
                with self._lock:
                    for arrival in self._waiting:
                        if fits(arrival):
                            self._waiting.remove(arrival)
                            return arrival
                if deadline.expired:
                    return None
                wake.acquire(timeout=min(deadline.remaining(), threading.TIMEOUT_MAX))
        finally:
            with self._lock:
                self._wakes.remove(wake)


_lock = threading.Lock()
_arrivals: WeakKeyDictionary[rpc.Agent, Arrivals] = WeakKeyDictionary()


def arrivals_at(agent: rpc.Agent) -> Arrivals:
    """Those of the master ``agent``; the first worker may come before anybody asks."""
    with _lock:
        return _arrivals.setdefault(agent, Arrivals())


def arrive(index: int | None, pid: int) -> None:
    """Called by a worker at its master: it can become node ``index``; None: any."""
    call = rpc.current()
    arrivals_at(call.agent).come(Arrival(call.caller, index, pid))
