"""The workers that become nodes: their names, the modules they import, and how they join a master.

Master and nodes are workers of :mod:`shoal.rpc`. Each worker calls :func:`join_master` at its master and
waits until it becomes a node.
"""

from __future__ import annotations

import importlib
import secrets
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from ... import rpc
from ...common.formatting import describe_error
from ...errors import UsageError
from ...future.state import Latch
from ...net import Deadline

MASTER = "master"


def node_name(index: int) -> str:
    """Return the name of node `index` in errors, whichever process it is."""
    return f"node{index}"


def worker_name(prefix: str) -> str:
    """Return a unique name for this process as a worker."""
    return f"{prefix}-{secrets.token_hex(4)}"


# -- imports before a node serves: modules that register user-defined operators with torch -------------------


def checked_imports(imports: object) -> tuple[str, ...]:
    """Return module names as a tuple; raises `UsageError` for other values."""
    if isinstance(imports, (list, tuple)) and all(isinstance(each, str) and each for each in imports):
        return tuple(imports)
    raise UsageError(f"imports={imports!r}: expected a list of module names, such as ['my_operators']")


def import_all(names: Iterable[str], process: str) -> None:
    """Import modules; raises `UsageError`, naming the `process`, if one cannot be imported."""
    for name in names:
        try:
            importlib.import_module(name)
        except Exception as error:
            raise UsageError(
                f"{process} cannot import {name!r}: {describe_error(error)}; it needs the module on its "
                "path, in PYTHONPATH or its working directory"
            ) from error


# -- joining -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class JoinedWorker:
    """A worker that joined.

    Attributes:
        name, pid: name and process id of the worker.
        index: index of the node that it was started as; None: the next free one.
    """

    name: str
    index: int | None
    pid: int


class JoinQueue:
    """The workers that joined a master and are not nodes yet, in the order of joining."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: list[JoinedWorker] = []
        #: one for each waiting thread
        self._latches: list[Latch] = []

    def add(self, arrival: JoinedWorker) -> None:
        with self._lock:
            self._waiting.append(arrival)
            for latch in self._latches:
                latch.set()

    def remove(self, name: str) -> None:
        """Remove a worker that failed or left."""
        with self._lock:
            self._waiting = [each for each in self._waiting if each.name != name]

    def take(self, fits: Callable[[JoinedWorker], bool], timeout: float) -> JoinedWorker | None:
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
_arrivals: WeakKeyDictionary[rpc.Agent, JoinQueue] = WeakKeyDictionary()


def join_queue(agent: rpc.Agent) -> JoinQueue:
    """Return the arrivals of the master `agent`; created on the first call, as a worker may join early."""
    with _lock:
        return _arrivals.setdefault(agent, JoinQueue())


def join_master(index: int | None, pid: int) -> None:
    """Join the master as node `index`, or any (None); called by a worker through RPC."""
    call = rpc.current()
    join_queue(call.agent).add(JoinedWorker(call.caller, index, pid))
