"""The joining of workers: each calls :func:`arrive` at its master and waits until it becomes a node."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from ... import rpc
from ...future.state import Latch
from ...net import Deadline


@dataclass(frozen=True, slots=True)
class JoiningWorker:
    """A worker that joined.

    Attributes:
        name, pid: name and process id of the worker.
        index: index of the node that it was started as; None: the next free one.
    """

    name: str
    index: int | None
    pid: int


class Arrivals:
    """The workers that joined a master and are not nodes yet, in the order of joining."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: list[JoiningWorker] = []
        #: one for each waiting thread
        self._latches: list[Latch] = []

    def come(self, arrival: JoiningWorker) -> None:
        """Add a worker."""
        with self._lock:
            self._waiting.append(arrival)
            for latch in self._latches:
                latch.set()

    def go(self, name: str) -> None:
        """Remove a worker that failed or left."""
        with self._lock:
            self._waiting = [each for each in self._waiting if each.name != name]

    def take(self, fits: Callable[[JoiningWorker], bool], timeout: float) -> JoiningWorker | None:
        """Wait for the first worker that fits, and remove and return it; None after `timeout` seconds."""
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
    """Return the arrivals of the master `agent`; created on the first call, as a worker may join early."""
    with _lock:
        return _arrivals.setdefault(agent, Arrivals())


def arrive(index: int | None, pid: int) -> None:
    """Join the master as node `index`, or any (None); called by a worker through RPC."""
    call = rpc.current()
    arrivals_at(call.agent).come(JoiningWorker(call.caller, index, pid))
