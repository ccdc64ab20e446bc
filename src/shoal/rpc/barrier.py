"""Workers that wait for one another, in the store."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable

from ..common.wording import counted, in_seconds
from ..errors import ShoalError, StoreTimeout, UnknownWorker, UsageError, WorkerLost
from ..net import Deadline
from ..store import Store
from .connection.directory import Directory, Worker, is_name

#: seconds between looks at whether the others live
_LOOK = 0.25
_MANY = 64


class Barriers:
    """The barriers that one worker comes to.

    Args:
        me: this worker.
        directory: knows who is there, and who is dead.
        store: the job's; stays the caller's.
        namespace: of the workers.
    """

    def __init__(self, me: Worker, directory: Directory, store: Store, namespace: str) -> None:
        self._me = me
        self._directory = directory
        self._store = store
        self._start = f"rpc/{namespace}/barrier"
        #: how often this worker has come to a barrier of these incarnations
        self._counts: dict[tuple[str, ...], int] = {}
        #: as many counts are kept until those of workers that have ended are looked for
        self._limit = _MANY

    def wait(self, names: Iterable[str] | None, deadline: Deadline) -> None:
        """Wait until all of ``names`` have come as often as this worker; see :meth:`Agent.barrier`."""
        me = self._me.name
        found = [worker.name for worker in self._directory.workers()] if names is None else names
        members = [] if isinstance(found, str) else list(set(found))
        if not members or not all(is_name(name) for name in members):
            raise UsageError(f"worker {me!r}: barrier of {found!r}: expected the names of workers")
        members.sort()
        if me not in members:
            raise UsageError(f"worker {me!r}: barrier of {members!r}, of which it is none")
        there = {member: self._find(member, members, deadline) for member in members}
        # By their incarnations: a worker that comes again begins anew, and so do the others with it.
        who = tuple(there[member].incarnation for member in members)
        if len(self._counts) >= self._limit:
            alive = {worker.incarnation for worker in self._directory.workers()}
            self._counts = {each: count for each, count in self._counts.items() if alive.issuperset(each)}
            self._limit = max(_MANY, 2 * len(self._counts))
        number = self._counts[who] = self._counts.get(who, 0) + 1
        start = f"{self._start}/{_digest(who)}/{number}/"
        try:
            self._store.set(f"{start}came/{me}", b"")
            self._await(f"{start}came/", members, there, deadline)
        finally:
            # Whoever has passed looks at the keys no more, and the last one removes them.
            with contextlib.suppress(ShoalError):
                if self._store.add(f"{start}passed", 1) == len(members):
                    self._store.delete_prefix(start)

    def _await(self, came: str, members: list[str], there: dict[str, Worker], deadline: Deadline) -> None:
        """Wait until all have come, each of which writes its name behind ``came``."""
        missing = members
        while missing:
            try:
                self._store.wait([came + each for each in missing], min(_LOOK, deadline.remaining()))
                return
            except StoreTimeout:
                missing = [each for each in missing if not self._store.check([came + each])]
            for member in missing:
                self._look(there[member])
            if missing and deadline.expired:
                raise self._absent(missing, members, deadline)

    def _find(self, member: str, members: list[str], deadline: Deadline) -> Worker:
        """The worker with the name ``member``, as soon as there is one."""
        while True:
            try:
                return self._directory.find(member, min(_LOOK, deadline.remaining()), self._me.name)
            except UnknownWorker:
                worker = self._directory.look(member)
                if worker is not None:
                    self._look(worker)
                if deadline.expired:
                    raise self._absent([member], members, deadline) from None

    def _look(self, worker: Worker) -> None:
        """Raise if ``worker``, which is awaited, is dead."""
        now = self._directory.look(worker.name)
        replaced = now is not None and now.incarnation != worker.incarnation
        if replaced or worker.is_gone(self._me.machine):
            raise WorkerLost(
                f"worker {self._me.name!r}: {worker.name!r} (process {worker.pid}) ended before it came to a "
                "barrier",
                worker.name,
            )

    def _absent(self, missing: list[str], members: list[str], deadline: Deadline) -> UnknownWorker:
        return UnknownWorker(
            f"worker {self._me.name!r}: {', '.join(map(repr, missing))} did not come to a barrier of "
            f"{counted(len(members), 'worker')} within {in_seconds(deadline.timeout)}"
        )


def _digest(who: tuple[str, ...]) -> str:
    return hashlib.blake2b("/".join(who).encode(), digest_size=16).hexdigest()
