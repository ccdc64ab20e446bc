"""Workers that wait for one another, in the store."""

from __future__ import annotations

from collections.abc import Iterable

from ..errors import StoreTimeout, UnknownWorker, UsageError, WorkerLost
from ..store import Store
from ..wire import Deadline
from ..wording import counted, in_seconds
from .directory import Directory, Worker

#: seconds between looks at whether the others live
_LOOK = 0.25


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
        #: how often this worker has come to a barrier of these workers
        self._counts: dict[tuple[str, ...], int] = {}

    def wait(self, names: Iterable[str] | None, deadline: Deadline) -> None:
        """Wait until all of ``names`` have come as often as this worker; see :meth:`Agent.barrier`."""
        me = self._me.name
        found = [worker.name for worker in self._directory.workers()] if names is None else names
        members = tuple(sorted(set(found)))
        if me not in members:
            raise UsageError(f"worker {me!r}: barrier of {list(members)!r}, of which it is none")
        number = self._counts[members] = self._counts.get(members, 0) + 1
        start = f"{self._start}/{'|'.join(members)}/{number}"
        self._store.set(f"{start}/{me}", b"")
        missing = [*members]
        while missing:
            try:
                self._store.wait([f"{start}/{each}" for each in missing], min(_LOOK, deadline.remaining()))
                return
            except StoreTimeout:
                missing = [each for each in missing if not self._store.check([f"{start}/{each}"])]
            self._look(missing)
            if missing and deadline.expired:
                raise UnknownWorker(
                    f"worker {me!r}: {', '.join(map(repr, missing))} did not come to a barrier of "
                    f"{counted(len(members), 'worker')} within {in_seconds(deadline.timeout)}"
                )

    def _look(self, missing: list[str]) -> None:
        """Raise if one of those that are awaited is dead."""
        for member in missing:
            worker = self._directory.look(member)
            if worker is not None and worker.is_gone(self._me.machine):
                raise WorkerLost(
                    f"worker {self._me.name!r}: {member!r} (process {worker.pid}) ended before it came to a "
                    "barrier",
                    member,
                )
