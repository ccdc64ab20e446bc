"""Barriers of workers, implemented with the store."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable

from ..common.formatting import counted, format_seconds
from ..errors import ShoalError, StoreTimeout, UnknownWorker, UsageError, WorkerLost
from ..net import Deadline
from ..store import Store
from .connection.directory import Directory, Worker, is_name

#: seconds between two checks whether the missing workers still run
_LIVENESS_INTERVAL_S = 0.25
_PRUNE_COUNTS_FROM = 64


class Barriers:
    """The barriers of one worker.

    Args:
        me: this worker.
        directory: of the workers.
        store: of the job; not closed here.
        namespace: of the workers.
    """

    def __init__(self, me: Worker, directory: Directory, store: Store, namespace: str) -> None:
        self._me = me
        self._directory = directory
        self._store = store
        self._start = f"rpc/{namespace}/barrier"
        #: number of barriers that this worker has entered, by the incarnations of the members
        self._counts: dict[tuple[str, ...], int] = {}
        #: number of counts at which those of workers that have ended are removed
        self._limit = _PRUNE_COUNTS_FROM

    def wait(self, names: Iterable[str] | None, deadline: Deadline) -> None:
        """Wait at a barrier of the workers ``names``; see :meth:`Agent.barrier`."""
        me = self._me.name
        found = [worker.name for worker in self._directory.workers()] if names is None else names
        members = [] if isinstance(found, str) else list(set(found))
        if not members or not all(is_name(name) for name in members):
            raise UsageError(f"worker {me!r}: barrier of {found!r}: expected the names of workers")
        members.sort()
        if me not in members:
            raise UsageError(f"worker {me!r}: barrier of {members!r}, which must include this worker")
        there = {member: self._find(member, members, deadline) for member in members}
        # Keyed by incarnations: when a worker was restarted, the counts of all members start again at 1.
        who = tuple(there[member].incarnation for member in members)
        if len(self._counts) >= self._limit:
            alive = {worker.incarnation for worker in self._directory.workers()}
            self._counts = {each: count for each, count in self._counts.items() if alive.issuperset(each)}
            self._limit = max(_PRUNE_COUNTS_FROM, 2 * len(self._counts))
        number = self._counts[who] = self._counts.get(who, 0) + 1
        start = f"{self._start}/{_digest(who)}/{number}/"
        try:
            self._store.set(f"{start}came/{me}", b"")
            self._await(f"{start}came/", members, there, deadline)
        finally:
            # A worker that has passed does not read the keys again; the last one removes them.
            with contextlib.suppress(ShoalError):
                if self._store.add(f"{start}passed", 1) == len(members):
                    self._store.delete_prefix(start)

    def _await(self, came: str, members: list[str], there: dict[str, Worker], deadline: Deadline) -> None:
        """Wait until each member has set its key, which is ``came`` plus its name."""
        missing = members
        while missing:
            try:
                self._store.wait(
                    [came + each for each in missing], min(_LIVENESS_INTERVAL_S, deadline.remaining())
                )
                return
            except StoreTimeout:
                missing = [each for each in missing if not self._store.check([came + each])]
            for member in missing:
                self._look(there[member])
            if missing and deadline.expired:
                raise self._absent(missing, members, deadline)

    def _find(self, member: str, members: list[str], deadline: Deadline) -> Worker:
        """Wait for a worker with the name ``member``."""
        while True:
            try:
                return self._directory.find(
                    member, min(_LIVENESS_INTERVAL_S, deadline.remaining()), self._me.name
                )
            except UnknownWorker:
                worker = self._directory.look(member)
                if worker is not None:
                    self._look(worker)
                if deadline.expired:
                    raise self._absent([member], members, deadline) from None

    def _look(self, worker: Worker) -> None:
        """Raise WorkerLost if ``worker`` has ended or was replaced."""
        now = self._directory.look(worker.name)
        replaced = now is not None and now.incarnation != worker.incarnation
        if replaced or worker.is_dead():
            raise WorkerLost(
                f"worker {self._me.name!r}: {worker.name!r} (process {worker.pid}) ended before it reached a "
                "barrier",
                worker.name,
            )

    def _absent(self, missing: list[str], members: list[str], deadline: Deadline) -> UnknownWorker:
        return UnknownWorker(
            f"worker {self._me.name!r}: {', '.join(map(repr, missing))} did not reach a barrier of "
            f"{counted(len(members), 'worker')} within {format_seconds(deadline.timeout)}"
        )


def _digest(who: tuple[str, ...]) -> str:
    return hashlib.blake2b("/".join(who).encode(), digest_size=16).hexdigest()
