"""Rendezvous and coordinated shutdown of a fixed number of workers with ranks.

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
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from typing import Protocol

import msgspec

from ...common.decoding import MalformedMessage, from_msgpack
from ...common.formatting import format_seconds
from ...common.process_identity import ProcessIdentity
from ...errors import (
    RendezvousError,
    RendezvousTimeout,
    ShoalError,
    StoreError,
    StoreTimeout,
    UnknownWorker,
    UsageError,
    WorkerLost,
)
from ...net import Deadline
from ...store import PrefixStore, Store

#: seconds between two polls of an entry
_POLL_INTERVAL_S = 0.005
#: seconds between two checks for ended and failed workers
_LIVENESS_INTERVAL_S = 0.25
#: seconds for which a failed worker waits until the others have read its reason
_FAILURE_NOTICE_S = 5.0


def keys_of(store: Store, kind: str, count: int) -> Store:
    """Return the part of the store for one meeting, the ``count``-th of its kind."""
    return PrefixStore(f"rpc/workers/{kind}/{count}", store)


class WorkerEntry(ProcessIdentity, frozen=True):
    """The entry of one worker, and its process; written by itself.

    Attributes:
        joined: whether it has joined.
        failed: the reason why the meeting failed; "" if none is known.
        left: whether it closed without waiting for the others.
    """

    name: str
    joined: bool = False
    failed: str = ""
    left: bool = False


class Working(Protocol):
    """The part of an agent that a coordinated shutdown uses."""

    def settle(self, deadline: Deadline) -> int | None:
        """Wait until no call is pending or served; return the number of calls made; None: timed out."""

    def reach(self, name: str, timeout: float) -> None:
        """Raise WorkerLost if a worker is lost."""


class WorkerMeeting:
    """The meeting of ``size`` workers.

    Args:
        store: used only by the workers of this meeting.
        me: this process.
        name, rank: of this worker.
        end: name of the function that all of them call to shut down, for messages.

    Attributes:
        names: of the workers, by rank; empty until :meth:`gather` returns.
    """

    def __init__(self, store: Store, me: ProcessIdentity, name: str, rank: int, size: int, end: str) -> None:
        self._store = store
        self._me = me
        self._name = name
        self._rank = rank
        self._size = size
        self._end = end
        #: rank -> the entry that was read last
        self._seen: dict[int, WorkerEntry] = {}
        #: the entries of all ranks that :meth:`gather` has read
        self._gathered: list[WorkerEntry] = []
        self.names: list[str] = []

    def gather(self, deadline: Deadline) -> None:
        """Write this worker's entry and wait for those of all others.

        Raises:
            UsageError: two workers have the same name.
            RendezvousError: another worker has failed.
            RendezvousTimeout: a worker's entry is missing.
        """
        self._tell()
        self._gathered = [self._await(rank, deadline, False) for rank in range(self._size)]
        self.names = [entry.name for entry in self._gathered]
        twice = [name for name, times in Counter(self.names).items() if times > 1]
        if twice:
            ranks = [str(rank) for rank, name in enumerate(self.names) if name == twice[0]]
            error = UsageError(
                f"name={twice[0]!r} is not unique: ranks {', '.join(ranks)} have it; give every worker a "
                "unique name"
            )
            self._pass_on(str(error))
            raise error

    def fail(self, why: BaseException) -> None:
        """Notify the others that this worker cannot join."""
        self._pass_on(f"{self._name!r} (rank {self._rank}) could not join: {str(why) or type(why).__name__}")

    def join(self, deadline: Deadline) -> None:
        """Announce that this worker has joined, and wait until all have.

        Raises RendezvousError if a worker could not join, RendezvousTimeout if one did not join in time.
        """
        self._tell(joined=True)
        for rank in range(self._size):
            self._await(rank, deadline, True)

    def come(self) -> None:
        """Announce that this worker has joined, without waiting."""
        self._tell(joined=True)

    def leave(self) -> None:
        """Announce that this worker closes without waiting for the others."""
        self._tell(joined=True, left=True)

    def part(self, agent: Working, deadline: Deadline) -> None:
        """Wait until all have called this, and no call is pending or served at any of them.

        Raises WorkerLost if a worker has failed, UnknownWorker after the deadline.
        """
        try:
            self._part(agent, deadline)
        except (UnknownWorker, WorkerLost):
            raise
        except ShoalError as error:  # the store was lost, perhaps because a worker has failed
            for entry in self._seen.values():
                self._look(entry, agent, error)
            raise

    def _part(self, agent: Working, deadline: Deadline) -> None:
        number, quiet = 0, False
        while not quiet:
            before = agent.settle(deadline)
            self._come(f"{number}/idle", b"", agent, deadline)
            after = agent.settle(Deadline(0.0))
            word = b"1" if before == after is not None else b""
            quiet = all(self._come(f"{number}/quiet", word, agent, deadline))
            if not quiet and deadline.expired:
                raise UnknownWorker(
                    f"worker {self._name!r}: calls were still pending or served, here or at another worker, "
                    f"after the {format_seconds(deadline.timeout)} of {self._end}"
                )
            number += 1

    # -- inside --------------------------------------------------------------------------------

    def _tell(self, *, joined: bool = False, failed: str = "", left: bool = False) -> None:
        entry = WorkerEntry(self._me.machine, self._me.process, self._name, joined, failed, left)
        self._store.set(str(self._rank), msgspec.msgpack.encode(entry))

    def _entry(self, rank: int, timeout: float) -> WorkerEntry:
        raw = self._store.get(str(rank), timeout)
        try:
            entry = from_msgpack(raw, WorkerEntry)
        except MalformedMessage as error:
            raise RendezvousError(
                f"worker {self._name!r}: the entry of rank {rank} in the store cannot be read ({error}); "
                "does another program use the same keys?"
            ) from error
        self._seen[rank] = entry
        return entry

    def _there(self, rank: int, timeout: float = 0.0) -> WorkerEntry | None:
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
            entry = self._there(rank, min(_LIVENESS_INTERVAL_S, deadline.remaining()))
            if entry is None and joined:
                entry = self._ended(rank)
            if entry is not None and (entry.joined or not joined):
                return entry
            if deadline.expired:
                absent = self._absent(deadline)
                self._pass_on(str(absent))
                raise absent
            if time.monotonic() >= listens or (joined and entry is not None and entry.failed):
                self._listen(joined)
                listens = time.monotonic() + _LIVENESS_INTERVAL_S
            time.sleep(_POLL_INTERVAL_S)

    def _ended(self, rank: int) -> WorkerEntry | None:
        """Return the entry of ``rank`` if it joined this meeting and then ended; calls to it will fail."""
        entry, before = self._seen.get(rank), self._gathered[rank]
        return entry if entry is not None and entry.joined and entry.process == before.process else None

    def _listen(self, joined: bool) -> None:
        """Raise if the meeting has failed; in :meth:`gather` (not ``joined``) only if an entry is missing."""
        there = [self._there(rank) for rank in range(self._size)]
        reasons = [entry.failed for entry in there if entry is not None and entry.failed]
        if reasons and (joined or None in there):
            self._pass_on(reasons[0])
            raise RendezvousError(f"worker {self._name!r}: {reasons[0]}")

    def _pass_on(self, reason: str) -> None:
        """Write the reason of the failure, and wait a moment until all running workers have, too."""
        deadline = Deadline(_FAILURE_NOTICE_S)
        with contextlib.suppress(StoreError):  # the process that serves it knew the reason and has ended
            self._tell(failed=reason)
            while not deadline.expired:
                there = [self._there(rank) for rank in range(self._size)]
                if all(entry is None or entry.failed for entry in there):
                    return
                time.sleep(_POLL_INTERVAL_S)

    def _absent(self, deadline: Deadline) -> RendezvousTimeout:
        missing = [str(rank) for rank in range(self._size) if not self._store.check([str(rank)])]
        who = f"ranks {', '.join(missing)}" if missing else "some"
        return RendezvousTimeout(
            f"worker {self._name!r}: {who} of {self._size} have not joined within "
            f"{format_seconds(deadline.timeout)}"
        )

    def _come(self, where: str, word: bytes, agent: Working, deadline: Deadline) -> list[bytes]:
        """Write ``word``, wait for those of the other workers that have not left, and return all."""
        keys = {rank: f"{where}/{rank}" for rank in range(self._size)}
        self._store.set(keys[self._rank], word)
        missing = list(keys)
        while missing:
            try:
                self._store.wait(
                    [keys[rank] for rank in missing], min(_LIVENESS_INTERVAL_S, deadline.remaining())
                )
                break
            except StoreTimeout:
                missing = [rank for rank in missing if not self._store.check([keys[rank]])]
                missing = [rank for rank in missing if self._stays(rank, agent)]
            if missing and deadline.expired:
                who = ", ".join(map(self._who, missing))
                raise UnknownWorker(
                    f"worker {self._name!r}: {who} did not call {self._end}, or had calls pending, for "
                    f"{format_seconds(deadline.timeout)}"
                )
        return [self._store.get(key, 0.0) for key in keys.values() if self._store.check([key])]

    def _stays(self, rank: int, agent: Working) -> bool:
        """Whether to wait for ``rank``, which may have left; raise if it has failed."""
        if not self._store.check([str(rank)]):  # it has not joined yet
            return True
        entry = self._entry(rank, 0.0)
        if not entry.left:
            try:
                self._look(entry, agent, None)
            except (UnknownWorker, WorkerLost):
                if not self._entry(rank, 0.0).left:  # it did not leave meanwhile
                    raise
                return False
        return not entry.left

    def _look(self, entry: WorkerEntry, agent: Working, because: BaseException | None) -> None:
        """Raise if a worker has failed."""
        if entry.is_dead():
            raise WorkerLost(
                f"worker {self._name!r}: {entry.name!r} ended before {self._end}", entry.name
            ) from because
        if entry.name != self._name:
            agent.reach(entry.name, _LIVENESS_INTERVAL_S)

    def _who(self, rank: int) -> str:
        entry = self._seen.get(rank)
        return f"rank {rank} (which has not joined)" if entry is None else repr(entry.name)
