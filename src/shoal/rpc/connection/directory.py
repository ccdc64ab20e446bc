"""The directory of workers by name, in the store of the job.

A name belongs to the worker that claimed it first, until that one leaves.  If its process is known to have
ended, which only processes of its machine can determine, the next claim of the name replaces it.  Each claim
has a unique *incarnation*, which distinguishes a new process from an earlier one with the same name.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from typing import TypeGuard

import msgspec

from ...common.decoding import MalformedMessage, from_msgpack
from ...common.formatting import format_seconds
from ...common.process_identity import ProcessIdentity, machine_id
from ...errors import RpcError, ShoalError, StoreTimeout, UnknownWorker, UsageError, WorkerLost
from ...net import Deadline
from ...store import PrefixStore, Store

#: seconds between two polls for the replacement of a worker that has ended
_POLL_INTERVAL_S = 0.02
#: bytes
_MAX_NAME_BYTES = 256


class Worker(ProcessIdentity, frozen=True):
    """The entry of one worker, and its process.

    Attributes:
        name: unique in the job while the worker runs.
        incarnation: of this claim of the name; never used twice.
        rank: of the process in its job; -1 if it has none.
        host: workers with equal values share memory.
        unix: name of the unix socket that it listens on.
        address, port: of the TCP socket that it listens on.
    """

    name: str
    incarnation: str
    rank: int
    host: str
    unix: str
    address: str
    port: int


def incarnation() -> str:
    """Return a new unique identity."""
    return secrets.token_hex(8)


def is_name(name: object) -> TypeGuard[str]:
    return isinstance(name, str) and name.isprintable() and 1 <= len(name.encode()) <= _MAX_NAME_BYTES


def checked_name(name: object) -> str:
    """Return ``name`` if it is valid as the name of a worker; raise UsageError if not."""
    if is_name(name):
        return name
    raise UsageError(
        f"name={name!r}: expected 1 to {_MAX_NAME_BYTES} bytes of printable text as a worker's name"
    )


class Directory:
    """The names of one namespace.

    Args:
        store: of the job; not closed here.
        namespace: workers of different namespaces do not see each other.
    """

    def __init__(self, store: Store, namespace: str) -> None:
        self._names = PrefixStore(f"rpc/{namespace}/name", store)
        self._ranks = PrefixStore(f"rpc/{namespace}/rank", store)

    def claim(self, mine: Worker) -> None:
        """Add ``mine``; raise UsageError if another worker that is not known to have ended has the name."""
        entry = msgspec.msgpack.encode(mine)
        held = b""
        while True:
            found = self._names.compare_set(mine.name, held, entry)
            if found == entry:
                break
            if found == held:  # the entry was removed meanwhile
                held = b""
                continue
            holder = _decoded(found)
            if not holder.is_dead():
                where = "this machine" if holder.machine == machine_id() else holder.hostname
                raise UsageError(
                    f"name={mine.name!r} is not unique: process {holder.pid} on {where} has joined under it "
                    "and is not known to have ended; give every worker a unique name"
                )
            held = found
        if mine.rank >= 0:
            self._ranks.set(str(mine.rank), mine.name)

    def withdraw(self, mine: Worker) -> None:
        """Remove ``mine`` if it still has its name.  Errors of the store are ignored."""
        with contextlib.suppress(ShoalError):
            if self.look(mine.name) == mine:
                self._names.delete(mine.name)

    def find(self, name: str, deadline: Deadline, me: str, *, wait_for_replacement: bool = True) -> Worker:
        """Return the running worker that has ``name``; wait until there is one.

        Args:
            me: name of the calling worker, for messages.
            wait_for_replacement: whether to wait for a replacement if the worker has ended.

        Raises:
            UnknownWorker: no worker joined in time; the message lists the workers that did.
            WorkerLost: the worker has ended, and not ``wait_for_replacement``.
        """
        try:
            while True:
                worker = _decoded(self._names.get(name, deadline.remaining()))
                if not worker.is_dead():
                    return worker
                if not wait_for_replacement:
                    raise WorkerLost(
                        f"worker {me!r}: {name!r} (process {worker.pid}) has ended and was not replaced; "
                        f"peer({name!r}, timeout=...) waits for a replacement",
                        name,
                    )
                if deadline.expired:
                    break
                time.sleep(_POLL_INTERVAL_S)  # stores cannot notify of a changed value
        except StoreTimeout:
            worker = None
        there = sorted(each.name for each in self.workers())
        what = (
            f"no worker has joined as {name!r}{_within(deadline)}, or it has left"
            if worker is None
            else f"{name!r} (process {worker.pid}) has ended and was not replaced{_within(deadline)}"
        )
        raise UnknownWorker(
            f"worker {me!r}: {what}; "
            + (f"there are {', '.join(map(repr, there))}" if there else "there are no workers")
        )

    def look(self, name: str) -> Worker | None:
        """Return the worker that has ``name`` now, running or not; None: there is none."""
        try:
            return _decoded(self._names.get(name, 0.0))
        except StoreTimeout:
            return None

    def name_of_rank(self, rank: int, deadline: Deadline, me: str) -> str:
        """Wait until the worker with a rank has joined; return its name; raise UnknownWorker if too late."""
        try:
            return self._ranks.get(str(rank), deadline.remaining()).decode()
        except StoreTimeout:
            there = ", ".join(sorted(repr(each.name) for each in self.workers()))
            raise UnknownWorker(
                f"worker {me!r}: rank {rank} has not joined{_within(deadline)}; there are {there}"
            ) from None

    def workers(self) -> list[Worker]:
        """Return all workers that have joined and are not known to have ended."""
        found = [self.look(name) for name in self._names.list_keys()]
        return [each for each in found if each is not None and not each.is_dead()]


def _within(deadline: Deadline) -> str:
    """Return the text " within N s", or "" for a timeout of 0."""
    return f" within {format_seconds(deadline.timeout)}" if deadline.timeout else ""


def _decoded(entry: bytes) -> Worker:
    try:
        return from_msgpack(entry, Worker)
    except MalformedMessage as error:
        raise RpcError(f"the store has an invalid entry under the name of a worker: {error}") from error
