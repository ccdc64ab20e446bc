"""The directory of workers by name: a table in the store that all workers of a job read.

A name belongs to the worker that claimed it first, until that one leaves.  A holder that is provably dead,
which only its own machine can say, is replaced by whoever claims the name next.  Each claim has an
*incarnation* of its own, so that nobody takes a new process for the old one.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from typing import TypeGuard

import msgspec

from ...common.decoding import MalformedMessage, from_msgpack
from ...common.wording import in_seconds
from ...errors import RpcError, ShoalError, StoreTimeout, UnknownWorker, UsageError, WorkerLost
from ...net import Deadline
from ...rendezvous.host import process_is_gone
from ...store import PrefixStore, Store

#: seconds between looks for a successor of a worker that died
_PAUSE = 0.02
_LONGEST_NAME = 256


class Worker(msgspec.Struct, frozen=True):
    """One worker, as the others find it.

    Attributes:
        name: unique in the job while the worker lives.
        incarnation: of this claim of the name; never used twice.
        rank: of the process in its job; -1 if it has none.
        pid, process, machine: which process it is, and where (:class:`~shoal.rendezvous.host.Here`).
        host: workers with equal values share memory.
        unix: name of the unix socket that it listens on.
        address, port: of the TCP socket.
    """

    name: str
    incarnation: str
    rank: int
    pid: int
    process: str
    machine: str
    host: str
    unix: str
    address: str
    port: int

    def is_gone(self, machine: str) -> bool:
        """Whether the worker has certainly ended; only its own machine can tell."""
        return self.machine == machine and process_is_gone(self.process)


def incarnation() -> str:
    """An identity that nobody has had before."""
    return secrets.token_hex(8)


def is_name(name: object) -> TypeGuard[str]:
    """Whether ``name`` can name a worker."""
    return isinstance(name, str) and name.isprintable() and 1 <= len(name.encode()) <= _LONGEST_NAME


def checked_name(name: object) -> str:
    """``name``, if it can name a worker.

    Raises:
        UsageError: it cannot.
    """
    if is_name(name):
        return name
    raise UsageError(
        f"name={name!r}: expected 1 to {_LONGEST_NAME} bytes of printable text as a worker's name"
    )


class Directory:
    """The names of one namespace.

    Args:
        store: the job's; stays the caller's.
        namespace: workers of different namespaces do not see each other.
        machine: identity of this machine.
    """

    def __init__(self, store: Store, namespace: str, machine: str) -> None:
        self._names = PrefixStore(f"rpc/{namespace}/name", store)
        self._ranks = PrefixStore(f"rpc/{namespace}/rank", store)
        self._machine = machine

    def claim(self, mine: Worker) -> None:
        """Enter ``mine`` under its name.

        Raises:
            UsageError: somebody else has the name, and is not known to be dead.
        """
        entry = msgspec.msgpack.encode(mine)
        held = b""
        while True:
            found = self._names.compare_set(mine.name, held, entry)
            if found == entry:
                break
            if found == held:  # the holder's entry went away meanwhile
                held = b""
                continue
            holder = _decoded(found)
            if not holder.is_gone(self._machine):
                where = "this machine" if holder.machine == self._machine else holder.machine.split("/")[0]
                raise UsageError(
                    f"name={mine.name!r} is not unique: process {holder.pid} on {where} has joined under it "
                    "and is not known to have ended; give every worker a name of its own"
                )
            held = found
        if mine.rank >= 0:
            self._ranks.set(str(mine.rank), mine.name)

    def withdraw(self, mine: Worker) -> None:
        """Take the name of ``mine`` back, if it still has it; a store that is gone is none to mind."""
        with contextlib.suppress(ShoalError):
            if self._found(mine.name) == mine:
                self._names.delete(mine.name)

    def find(self, name: str, timeout: float, me: str, *, after_death: bool = True) -> Worker:
        """The living worker that has ``name``, as soon as there is one.

        Args:
            me: who looks, for the message.
            after_death: whether to wait for a successor of a worker that has died.

        Raises:
            UnknownWorker: nobody came in time; lists who is there.
            WorkerLost: the worker has died, and no successor is waited for.
        """
        deadline = Deadline(timeout)
        try:
            while True:
                worker = _decoded(self._names.get(name, deadline.remaining()))
                if not worker.is_gone(self._machine):
                    return worker
                if not after_death:
                    raise WorkerLost(
                        f"worker {me!r}: {name!r} (process {worker.pid}) has ended and nobody took its "
                        f"place; peer({name!r}, timeout=...) waits for somebody who does",
                        name,
                    )
                if deadline.expired:
                    break
                time.sleep(_PAUSE)  # for a successor, of which no store tells
        except StoreTimeout:
            worker = None
        there = sorted(each.name for each in self.workers())
        what = (
            f"nobody has joined as {name!r}{_within(timeout)}, or it has left"
            if worker is None
            else f"{name!r} (process {worker.pid}) has ended and nobody took its place{_within(timeout)}"
        )
        raise UnknownWorker(
            f"worker {me!r}: {what}; "
            + (f"there are {', '.join(map(repr, there))}" if there else "nobody is there")
        )

    def look(self, name: str) -> Worker | None:
        """The worker that has ``name`` now, dead or alive."""
        return self._found(name)

    def name_of_rank(self, rank: int, timeout: float, me: str) -> str:
        """The name under which the process with this rank has joined, as soon as it has.

        Raises:
            UnknownWorker: it did not in time.
        """
        try:
            return self._ranks.get(str(rank), timeout).decode()
        except StoreTimeout:
            there = ", ".join(sorted(repr(each.name) for each in self.workers()))
            raise UnknownWorker(
                f"worker {me!r}: rank {rank} has not joined{_within(timeout)}; there are {there}"
            ) from None

    def workers(self) -> list[Worker]:
        """All that have joined and are not known to be dead."""
        found = [self._found(name) for name in self._names.list_keys()]
        return [each for each in found if each is not None and not each.is_gone(self._machine)]

    def _found(self, name: str) -> Worker | None:
        try:
            return _decoded(self._names.get(name, 0.0))
        except StoreTimeout:
            return None


def _within(timeout: float) -> str:
    """How long was waited, as the end of a clause; nothing if nobody waited."""
    return f" within {in_seconds(timeout)}" if timeout else ""


def _decoded(entry: bytes) -> Worker:
    try:
        return from_msgpack(entry, Worker)
    except MalformedMessage as error:
        raise RpcError(
            f"the store has something else than a worker under a worker's name: {error}"
        ) from error
