"""Rendezvous, coordinated shutdown and barriers of workers, through the store.

Workers of ``init_rpc`` with a ``world_size`` do both; agents of a group only shut down together.

**Rendezvous.**  Each worker writes an entry with its name under its rank, so that all detect duplicate names.
Then it joins, and updates its entry.  Entries of ended processes of this machine are ignored, and meetings
of the same processes are numbered, so that entries of earlier meetings are not mistaken for new ones.

If a worker cannot join, all fail with its reason: each one that reads the reason copies it to its own entry
and waits a moment until the others have done so, because when its process ends its entry is ignored, and the
store ends if that process serves it.

**Shutdown.**  The workers leave when no call is pending or served at any of them.  This takes rounds: a
worker enters a round when it is idle; when all have entered, it reports whether it has been idle since, by
comparing the number of calls that it has made.  If all have, all were idle when the last one entered, and an
idle worker makes no calls.  (Two equal counts: F. Mattern, "Algorithms for distributed termination
detection", 1987.)

The process that serves the store keeps it until all workers, or all ranks if workers join at any time, have
released it.  It does not wait for the connections to end: the workers may already meet again at the same
address, where they wait for a new store.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from ...common.decoding import MalformedMessage, from_msgpack
from ...common.formatting import counted, format_seconds
from ...common.process_identity import ProcessIdentity
from ...errors import (
    RendezvousError,
    RendezvousTimeout,
    ShoalError,
    StoreError,
    StoreTimeout,
    UnknownWorker,
    UsageError,
    WireError,
    WorkerLost,
)
from ...net import Deadline
from ...store import PrefixStore, Store
from ...store.requests import Add, Set
from ...torch_terms.arguments import CLOSE_TIMEOUT_S
from .directory import Directory, Worker, is_name

if TYPE_CHECKING:
    from ..agent import Agent

K = TypeVar("K")

#: seconds between two polls of an entry
_POLL_INTERVAL_S = 0.005
#: seconds between two checks for ended and failed workers
_LIVENESS_INTERVAL_S = 0.25
#: seconds for which a failed worker waits until the others have read its reason
_FAILURE_NOTICE_S = 5.0
#: number of sets of workers with barriers from which on those with ended workers are removed
_PRUNE_COUNTS_FROM = 64


def keys_of(store: Store, kind: str, count: int) -> Store:
    """Return the part of the store for one meeting, the ``count``-th of its kind."""
    return PrefixStore(f"rpc/workers/{kind}/{count}", store)


class RankReleases:
    """Which ranks have released the store, if workers join and leave it at any time.

    Args:
        store: of the job.
        rank: of this process; None: it has none.
        size: number of ranks; None: not known.
    """

    def __init__(self, store: Store, rank: int | None, size: int | None) -> None:
        self._store = PrefixStore("rpc/released", store)
        self._rank = rank
        self._others = [str(each) for each in range(size or 0) if each != rank]

    def withdraw(self) -> None:
        """Announce that this rank needs the store, perhaps again."""
        if self._rank is not None:
            self._store.delete(str(self._rank))

    def release(self, timeout: float, others_disconnected: Callable[[], bool] | None) -> None:
        """As :meth:`WorkerMeeting.release_store`."""
        deadline = Deadline(timeout)
        self._store.timeout = min(timeout, CLOSE_TIMEOUT_S)
        with contextlib.suppress(StoreError, WireError):  # the store was lost: nobody waits any more
            if self._rank is not None:
                self._store.set(str(self._rank), b"")
            if others_disconnected is not None:
                _wait_for_release(self._is_released, others_disconnected, deadline)

    def _is_released(self) -> bool:
        return bool(self._others) and self._store.check(self._others)


def _wait_for_release(
    is_released: Callable[[], bool], others_disconnected: Callable[[], bool], deadline: Deadline
) -> None:
    while not (is_released() or others_disconnected() or deadline.expired):
        time.sleep(_POLL_INTERVAL_S)


def _wait_for_keys(
    store: Store, keys: Mapping[K, str], deadline: Deadline, awaited: Callable[[list[K]], list[K]]
) -> list[K]:
    """Wait until all keys are set; return those that are missing at the deadline.

    Args:
        keys: participant -> its key.
        awaited: called repeatedly with the missing participants; returns those to wait for, raises if a
            participant has failed.
    """
    missing = list(keys)
    while missing:
        try:
            store.wait([keys[each] for each in missing], min(_LIVENESS_INTERVAL_S, deadline.remaining()))
            return []
        except StoreTimeout:
            missing = [each for each in missing if not store.check([keys[each]])]
        missing = awaited(missing)
        if deadline.expired:
            break
    return missing


class WorkerEntry(ProcessIdentity, frozen=True):
    """The entry of one worker, and its process; written by itself.

    Attributes:
        joined: whether it has joined.
        failed: the reason why the meeting failed; "" if none is known.
        leaving: whether it has begun a coordinated shutdown.
        left: whether it closed without waiting for the others, or released the store.
    """

    name: str
    joined: bool = False
    failed: str = ""
    leaving: bool = False
    left: bool = False


class WorkerMeeting:
    """The meeting of ``size`` workers.

    Args:
        store: used only by the workers of this meeting.
        operation: name of the function that all of them call to shut down, for messages.

    Attributes:
        names: of the workers, by rank; empty until :meth:`gather` returns.
    """

    def __init__(
        self, store: Store, me: ProcessIdentity, name: str, rank: int, size: int, operation: str
    ) -> None:
        self._store = store
        self._me = me
        self._name = name
        self._rank = rank
        self._size = size
        self._operation = operation
        #: attributes of this worker's entry
        self._state: dict[str, Any] = {}
        #: rank -> the entry that was read last
        self._seen: dict[int, WorkerEntry] = {}
        #: the entries of all ranks that :meth:`gather` has read
        self._gathered: list[WorkerEntry] = []
        self.names: list[str] = []

    def gather(self, deadline: Deadline) -> None:
        """Write this worker's entry and wait for those of all others.

        Before that, workers of an earlier job with the same keys that shut down must have left.

        Raises:
            UsageError: two workers have the same name.
            RendezvousError: another worker has failed, or the store was lost.
            RendezvousTimeout: a worker's entry is missing.
            StoreError: the store was lost before rank 0 had an entry.  If rank 0 serves the store, it was
                that of an earlier job.
        """
        try:
            self._await_earlier(deadline)
            self._write_entry()
            self._gathered = [self._await(rank, deadline, False) for rank in range(self._size)]
        except StoreError as error:
            if isinstance(error, StoreTimeout) or 0 not in self._seen:
                raise
            raise RendezvousError(
                f"worker {self._name!r}: the store was lost before all {self._size} workers had come: "
                f"{error}; start the job again"
            ) from error
        self.names = [entry.name for entry in self._gathered]
        twice = [name for name, times in Counter(self.names).items() if times > 1]
        if twice:
            ranks = [str(rank) for rank, name in enumerate(self.names) if name == twice[0]]
            duplicate = UsageError(
                f"name={twice[0]!r} is not unique: ranks {', '.join(ranks)} have it; give every worker a "
                "unique name"
            )
            self._propagate_failure(str(duplicate))
            raise duplicate

    def fail(self, why: BaseException) -> None:
        """Notify the others that this worker cannot join."""
        self._propagate_failure(
            f"{self._name!r} (rank {self._rank}) could not join: {str(why) or type(why).__name__}"
        )

    def join(self, deadline: Deadline) -> None:
        """Announce that this worker has joined, and wait until all have.

        Raises RendezvousError if a worker could not join, RendezvousTimeout if one did not join in time.
        """
        self._write_entry(joined=True)
        for rank in range(self._size):
            self._await(rank, deadline, True)

    def announce_joined(self) -> None:
        """Announce that this worker has joined, without waiting."""
        self._write_entry(joined=True)

    def leave(self, agent: Agent, deadline: Deadline, graceful: bool) -> None:
        """Wait for the others (:meth:`wait_until_all_idle`); if not ``graceful``, or if that fails, announce
        that this worker closes without them."""
        waited = False
        try:
            if graceful:
                self.wait_until_all_idle(agent, deadline)
                waited = True
        finally:
            if not waited:
                with contextlib.suppress(ShoalError):  # the store was closed, so the others have ended
                    self._write_entry(joined=True, left=True)

    def release_store(self, timeout: float, others_disconnected: Callable[[], bool] | None) -> None:
        """Announce that this worker no longer needs the store.

        If its process serves the store, wait instead until this is true of all others, or until they have
        disconnected, but at most ``timeout`` seconds.

        Args:
            others_disconnected: of the venue; None: another process serves the store.
        """
        deadline = Deadline(timeout)
        self._store.timeout = min(timeout, CLOSE_TIMEOUT_S)
        with contextlib.suppress(StoreError, WireError):  # the store was lost: nobody waits any more
            if others_disconnected is None:
                left = self._entry_call(**{**self._state, "leaving": False, "left": True})
                self._store.together([left, Add("released", 1)])
                return
            _wait_for_release(self._is_released, others_disconnected, deadline)

    def wait_until_all_idle(self, agent: Agent, deadline: Deadline) -> None:
        """Wait until all have called this, and no call is pending or served at any of them.

        Raises WorkerLost if a worker has failed, UnknownWorker after the deadline.
        """
        number, quiet = 0, False
        try:
            self._write_entry(joined=True, leaving=True)
            while not quiet:
                before = agent.wait_until_idle(deadline)
                self._exchange(f"{number}/idle", b"", agent, deadline)
                after = agent.wait_until_idle(Deadline(0.0))
                data = b"1" if before == after is not None else b""
                quiet = all(self._exchange(f"{number}/quiet", data, agent, deadline))
                if not quiet and deadline.expired:
                    raise UnknownWorker(
                        f"worker {self._name!r}: calls were still pending or served, here or at another "
                        f"worker, after the {format_seconds(deadline.timeout)} of {self._operation}"
                    )
                number += 1
        except (UnknownWorker, WorkerLost):
            raise
        except ShoalError as error:  # the store was lost, perhaps because a worker has failed
            for entry in self._seen.values():
                self._check_running(entry, agent, error)
            raise

    # -- inside --------------------------------------------------------------------------------

    def _is_released(self) -> bool:
        return self._store.add("released", 0) >= self._size - 1

    def _write_entry(self, **state: Any) -> None:
        self._store.together([self._entry_call(**state)])

    def _entry_call(self, **state: Any) -> Set:
        """Return the call that writes this worker's entry, with the given attributes."""
        self._state = state
        entry = WorkerEntry(self._me.machine, self._me.process, self._name, **state)
        return Set(str(self._rank), msgspec.msgpack.encode(entry))

    def _entry(self, rank: int, timeout: float) -> WorkerEntry:
        entry = self._seen[rank] = self._decoded(rank, self._store.get(str(rank), timeout))
        return entry

    def _decoded(self, rank: int, raw: bytes) -> WorkerEntry:
        try:
            return from_msgpack(raw, WorkerEntry)
        except MalformedMessage as error:
            raise RendezvousError(
                f"worker {self._name!r}: the entry of rank {rank} in the store cannot be read ({error}); "
                "does another program use the same keys?"
            ) from error

    def _await_earlier(self, deadline: Deadline) -> None:
        """Wait until the workers of an earlier job with the same keys have left, if they shut down."""
        while True:
            there = self._store.peek([str(rank) for rank in range(self._size)])
            entries = [self._decoded(rank, raw) for rank, raw in enumerate(there) if raw is not None]
            waited = [each for each in entries if each.leaving and not each.is_dead()]
            if not waited:
                return
            if deadline.expired:
                raise RendezvousTimeout(
                    f"worker {self._name!r}: an earlier job in this store is ending, but its worker "
                    f"{waited[0].name!r} (process {waited[0].pid}) did not leave it within "
                    f"{format_seconds(deadline.timeout)}; end it, or use another job name or address"
                )
            time.sleep(_POLL_INTERVAL_S)

    def _entry_of_running(self, rank: int, timeout: float = 0.0) -> WorkerEntry | None:
        """Return the entry of ``rank``; None: it does not exist, or its process has ended."""
        try:
            entry = self._entry(rank, timeout)
        except StoreTimeout:
            return None
        return None if entry.is_dead() else entry

    def _await(self, rank: int, deadline: Deadline, joined: bool) -> WorkerEntry:
        """Wait for the entry of ``rank``, or until that worker has ``joined``; return the entry."""
        listens = time.monotonic() + _LIVENESS_INTERVAL_S
        while True:
            entry = self._entry_of_running(rank, min(_LIVENESS_INTERVAL_S, deadline.remaining()))
            if entry is None and joined:
                entry = self._ended(rank)
            if entry is not None and (entry.joined or not joined):
                return entry
            if deadline.expired:
                absent = self._timeout_error(deadline)
                self._propagate_failure(str(absent))
                raise absent
            if time.monotonic() >= listens or (joined and entry is not None and entry.failed):
                self._check_failed(joined)
                listens = time.monotonic() + _LIVENESS_INTERVAL_S
            time.sleep(_POLL_INTERVAL_S)

    def _ended(self, rank: int) -> WorkerEntry | None:
        """Return the entry of ``rank`` if it joined this meeting and then ended; calls to it will fail."""
        entry, before = self._seen.get(rank), self._gathered[rank]
        return entry if entry is not None and entry.joined and entry.process == before.process else None

    def _check_failed(self, joined: bool) -> None:
        """Raise if the meeting has failed; in :meth:`gather` (not ``joined``) only if an entry is missing."""
        there = [self._entry_of_running(rank) for rank in range(self._size)]
        reasons = [entry.failed for entry in there if entry is not None and entry.failed]
        if reasons and (joined or None in there):
            self._propagate_failure(reasons[0])
            raise RendezvousError(f"worker {self._name!r}: {reasons[0]}")

    def _propagate_failure(self, reason: str) -> None:
        """Write the reason of the failure, and wait a moment until all running workers have, too."""
        deadline = Deadline(_FAILURE_NOTICE_S)
        with contextlib.suppress(StoreError):  # the process that serves it knew the reason and has ended
            self._write_entry(failed=reason)
            while not deadline.expired:
                there = [self._entry_of_running(rank) for rank in range(self._size)]
                if all(entry is None or entry.failed for entry in there):
                    return
                time.sleep(_POLL_INTERVAL_S)

    def _timeout_error(self, deadline: Deadline) -> RendezvousTimeout:
        missing = [str(rank) for rank in range(self._size) if not self._store.check([str(rank)])]
        who = f"ranks {', '.join(missing)}" if missing else "some"
        return RendezvousTimeout(
            f"worker {self._name!r}: {who} of {self._size} have not joined within "
            f"{format_seconds(deadline.timeout)}"
        )

    def _exchange(self, where: str, data: bytes, agent: Agent, deadline: Deadline) -> list[bytes]:
        """Write ``data``, wait for those of the other workers that have not left, and return all."""
        keys = {rank: f"{where}/{rank}" for rank in range(self._size)}
        self._store.set(keys[self._rank], data)
        missing = _wait_for_keys(
            self._store, keys, deadline, lambda ranks: [r for r in ranks if self._is_awaited(r, agent)]
        )
        if missing:
            who = ", ".join(map(self._described, missing))
            raise UnknownWorker(
                f"worker {self._name!r}: {who} did not call {self._operation}, or had calls pending, for "
                f"{format_seconds(deadline.timeout)}"
            )
        return [self._store.get(key, 0.0) for key in keys.values() if self._store.check([key])]

    def _is_awaited(self, rank: int, agent: Agent) -> bool:
        """Whether to wait for ``rank``, which may have left; raise if it has failed."""
        if not self._store.check([str(rank)]):  # it has not joined yet
            return True
        entry = self._entry(rank, 0.0)
        if not entry.left:
            try:
                self._check_running(entry, agent, None)
            except (UnknownWorker, WorkerLost):
                if not self._entry(rank, 0.0).left:  # it did not leave meanwhile
                    raise
                return False
        return not entry.left

    def _check_running(self, entry: WorkerEntry, agent: Agent, because: BaseException | None) -> None:
        """Raise if a worker has failed."""
        if entry.is_dead():
            raise WorkerLost(
                f"worker {self._name!r}: {entry.name!r} ended before {self._operation}", entry.name
            ) from because
        if entry.name != self._name:
            agent.check_reachable(entry.name, _LIVENESS_INTERVAL_S)

    def _described(self, rank: int) -> str:
        entry = self._seen.get(rank)
        return f"rank {rank} (which has not joined)" if entry is None else repr(entry.name)


class Barriers:
    """The barriers of the worker ``me``, in the store of its job."""

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
        there = {member: self._wait_for(member, members, deadline) for member in members}
        # Keyed by incarnations: when a worker was restarted, the counts of all members start again at 1.
        who = tuple(there[member].incarnation for member in members)
        if len(self._counts) >= self._limit:
            alive = {worker.incarnation for worker in self._directory.workers()}
            self._counts = {each: count for each, count in self._counts.items() if alive.issuperset(each)}
            self._limit = max(_PRUNE_COUNTS_FROM, 2 * len(self._counts))
        number = self._counts[who] = self._counts.get(who, 0) + 1
        digest = hashlib.blake2b("/".join(who).encode(), digest_size=16).hexdigest()
        start = f"{self._start}/{digest}/{number}/"
        try:
            self._store.set(f"{start}came/{me}", b"")
            missing = _wait_for_keys(
                self._store,
                {member: f"{start}came/{member}" for member in members},
                deadline,
                lambda missing: self._checked(missing, there.values()),
            )
            if missing:
                raise self._timeout_error(missing, members, deadline)
        finally:
            # A worker that has passed does not read the keys again; the last one removes them.
            with contextlib.suppress(ShoalError):
                if self._store.add(f"{start}passed", 1) == len(members):
                    self._store.delete_prefix(start)

    def _wait_for(self, member: str, members: list[str], deadline: Deadline) -> Worker:
        """Wait for a worker with the name ``member``."""
        while True:
            try:
                patience = Deadline(min(_LIVENESS_INTERVAL_S, deadline.remaining()))
                return self._directory.find(member, patience, self._me.name)
            except UnknownWorker:
                worker = self._directory.look(member)
                if worker is not None:
                    self._check_running(worker)
                if deadline.expired:
                    raise self._timeout_error([member], members, deadline) from None

    def _checked(self, missing: list[str], members: Iterable[Worker]) -> list[str]:
        """Return ``missing``; raise WorkerLost if any member has ended, also one that has come.

        Members that look it up after its end do not come.
        """
        if missing:
            for worker in members:
                self._check_running(worker)
        return missing

    def _check_running(self, worker: Worker) -> None:
        """Raise WorkerLost if ``worker`` has ended or was replaced."""
        now = self._directory.look(worker.name)
        replaced = now is not None and now.incarnation != worker.incarnation
        if replaced or worker.is_dead():
            raise WorkerLost(
                f"worker {self._me.name!r}: {worker.name!r} (process {worker.pid}) ended before all had "
                "reached a barrier",
                worker.name,
            )

    def _timeout_error(self, missing: list[str], members: list[str], deadline: Deadline) -> UnknownWorker:
        return UnknownWorker(
            f"worker {self._me.name!r}: {', '.join(map(repr, missing))} did not reach a barrier of "
            f"{counted(len(members), 'worker')} within {format_seconds(deadline.timeout)}"
        )
