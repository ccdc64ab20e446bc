"""How a fixed number of workers meet, each of which has a rank, and how they part.

Those of ``init_rpc`` with a size do both; the agents of a group have met already.

Each writes its name under its rank, so that all see at once when two have the same one.  Then it joins, and
says so.  What dead processes of this machine left is not there, and meetings of the same processes are
counted: so nobody takes those of before for those that it waits for.

If one cannot join, all fail for its reason: who hears it says so in an entry of its own, and each stays, for
a moment, until the others have: with a process its entry ends, and the store that it served.

They part when none of them has a call pending or served any more, which takes rounds: a worker comes to a
round when it is idle, and when all have come it tells whether it has been idle since, by the number of calls
that it has made.  If all have, they all were at the moment when the last one came, and only a worker that is
not idle can call another.  (These are the two equal counts of F. Mattern, "Algorithms for distributed
termination detection", 1987.)
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from typing import Protocol

import msgspec

from ...common.decoding import MalformedMessage, from_msgpack
from ...common.wording import in_seconds
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
from ...rendezvous.host import Here, process_is_gone
from ...store import PrefixStore, Store

#: seconds between looks at an entry that is not yet what it has to become
_PAUSE = 0.005
#: seconds between looks at whether those that are awaited live, and at whether others have failed
_LOOK = 0.25
#: seconds for the others to hear why a meeting has failed
_HEARING = 5.0


def keys_of(store: Store, kind: str, count: int) -> Store:
    """Where the workers of one meeting write, at a place where others have met before."""
    return PrefixStore(f"rpc/workers/{kind}/{count}", store)


class WorkerEntry(msgspec.Struct):
    """The entry of one worker, in its own words.

    Attributes:
        machine, process: which process it is.
        joined: whether it has.
        failed: why the meeting fails, as far as it knows; "" if it does not.
        left: whether it has ended without waiting for the others.
    """

    name: str
    machine: str
    process: str
    joined: bool = False
    failed: str = ""
    left: bool = False


class Working(Protocol):
    """A worker's agent, as parting needs it."""

    def settle(self, deadline: Deadline) -> int | None:
        """Wait until no call is pending or served; a number that grows with each call.  None: time is up."""

    def reach(self, name: str, timeout: float) -> None:
        """Raise if a worker is lost."""


class WorkerMeeting:
    """The meeting of ``size`` workers.

    Args:
        store: where the workers write, and nobody else.
        me: this process.
        name, rank: of this worker.
        end: what all of them do when they part, in words.

    Attributes:
        names: of the workers, by rank, as soon as they are known.
    """

    def __init__(self, store: Store, me: Here, name: str, rank: int, size: int, end: str) -> None:
        self._store = store
        self._me = me
        self._name = name
        self._rank = rank
        self._size = size
        self._end = end
        #: the others, as far as they were seen
        self._seen: dict[int, WorkerEntry] = {}
        #: all, as they were when they had told their names
        self._gathered: list[WorkerEntry] = []
        self.names: list[str] = []

    def gather(self, deadline: Deadline) -> None:
        """Wait until all have told their names.

        Raises:
            UsageError: two have the same.
            RendezvousError: the meeting has failed for another.
            RendezvousTimeout: somebody did not come.
        """
        self._tell()
        self._gathered = [self._await(rank, deadline, False) for rank in range(self._size)]
        self.names = [entry.name for entry in self._gathered]
        twice = [name for name, times in Counter(self.names).items() if times > 1]
        if twice:
            ranks = [str(rank) for rank, name in enumerate(self.names) if name == twice[0]]
            error = UsageError(
                f"name={twice[0]!r} is not unique: the ranks {', '.join(ranks)} have it; give every worker a "
                "name of its own"
            )
            self._pass_on(str(error))
            raise error

    def fail(self, why: BaseException) -> None:
        """Tell the others that this worker cannot join."""
        self._pass_on(f"{self._name!r} (rank {self._rank}) could not join: {str(why) or type(why).__name__}")

    def join(self, deadline: Deadline) -> None:
        """Tell that this worker has joined, and wait until all have.

        Raises:
            RendezvousError: one could not.
            RendezvousTimeout: somebody did not come.
        """
        self._tell(joined=True)
        for rank in range(self._size):
            self._await(rank, deadline, True)

    def come(self) -> None:
        """Tell that this worker has joined, and wait for nobody."""
        self._tell(joined=True)

    def leave(self) -> None:
        """Tell that this worker ends without waiting for the others."""
        self._tell(joined=True, left=True)

    def part(self, agent: Working, deadline: Deadline) -> None:
        """Wait until all have come here, and no call is pending or served at any of them.

        Raises:
            WorkerLost: one is dead.
            UnknownWorker: time is up.
        """
        try:
            self._part(agent, deadline)
        except (UnknownWorker, WorkerLost):
            raise
        except ShoalError as error:  # the store is gone, perhaps with a worker
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
                    f"worker {self._name!r}: calls were still pending or served, here or elsewhere, when the "
                    f"{in_seconds(deadline.timeout)} of {self._end} were over"
                )
            number += 1

    # -- inside --------------------------------------------------------------------------------

    def _tell(self, *, joined: bool = False, failed: str = "", left: bool = False) -> None:
        entry = WorkerEntry(self._name, self._me.machine, self._me.process, joined, failed, left)
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

    def _gone(self, entry: WorkerEntry) -> bool:
        return entry.machine == self._me.machine and process_is_gone(entry.process)

    def _there(self, rank: int, timeout: float = 0.0) -> WorkerEntry | None:
        """The entry of ``rank``; None: it has not come, or has ended."""
        try:
            entry = self._entry(rank, timeout)
        except StoreTimeout:
            return None
        return None if self._gone(entry) else entry

    def _await(self, rank: int, deadline: Deadline, joined: bool) -> WorkerEntry:
        """The entry of ``rank``, as soon as it is there, or has ``joined``."""
        listens = time.monotonic() + _LOOK
        while True:
            entry = self._there(rank, min(_LOOK, deadline.remaining()))
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
                listens = time.monotonic() + _LOOK
            time.sleep(_PAUSE)

    def _ended(self, rank: int) -> WorkerEntry | None:
        """The entry of ``rank`` if it joined this meeting and has ended since; who calls it hears that."""
        entry, before = self._seen.get(rank), self._gathered[rank]
        return entry if entry is not None and entry.joined and entry.process == before.process else None

    def _listen(self, joined: bool) -> None:
        """Raise if the meeting has failed; before all names are compared only if some are not there."""
        there = [self._there(rank) for rank in range(self._size)]
        reasons = [entry.failed for entry in there if entry is not None and entry.failed]
        if reasons and (joined or None in there):
            self._pass_on(reasons[0])
            raise RendezvousError(f"worker {self._name!r}: {reasons[0]}")

    def _pass_on(self, reason: str) -> None:
        """Tell why the meeting has failed, and wait a moment until all that are there know it."""
        deadline = Deadline(_HEARING)
        with contextlib.suppress(StoreError):  # its server has ended, and has heard it
            self._tell(failed=reason)
            while not deadline.expired:
                there = [self._there(rank) for rank in range(self._size)]
                if all(entry is None or entry.failed for entry in there):
                    return
                time.sleep(_PAUSE)

    def _absent(self, deadline: Deadline) -> RendezvousTimeout:
        missing = [str(rank) for rank in range(self._size) if not self._store.check([str(rank)])]
        who = f"ranks {', '.join(missing)}" if missing else "some"
        return RendezvousTimeout(
            f"worker {self._name!r}: {who} of {self._size} have not joined within "
            f"{in_seconds(deadline.timeout)}"
        )

    def _come(self, where: str, word: bytes, agent: Working, deadline: Deadline) -> list[bytes]:
        """Leave a word, and wait for those of the others that have not left."""
        keys = {rank: f"{where}/{rank}" for rank in range(self._size)}
        self._store.set(keys[self._rank], word)
        missing = list(keys)
        while missing:
            try:
                self._store.wait([keys[rank] for rank in missing], min(_LOOK, deadline.remaining()))
                break
            except StoreTimeout:
                missing = [rank for rank in missing if not self._store.check([keys[rank]])]
                missing = [rank for rank in missing if self._stays(rank, agent)]
            if missing and deadline.expired:
                who = ", ".join(map(self._who, missing))
                raise UnknownWorker(
                    f"worker {self._name!r}: {who} did not call {self._end}, or had calls pending, for "
                    f"{in_seconds(deadline.timeout)}"
                )
        return [self._store.get(key, 0.0) for key in keys.values() if self._store.check([key])]

    def _stays(self, rank: int, agent: Working) -> bool:
        """Whether ``rank`` is still to come; raises if it is dead."""
        if not self._store.check([str(rank)]):  # it has not joined yet
            return True
        entry = self._entry(rank, 0.0)
        if not entry.left:
            try:
                self._look(entry, agent, None)
            except (UnknownWorker, WorkerLost):
                if not self._entry(rank, 0.0).left:  # or it has left meanwhile
                    raise
                return False
        return not entry.left

    def _look(self, entry: WorkerEntry, agent: Working, because: BaseException | None) -> None:
        """Raise if a worker is dead."""
        if self._gone(entry):
            raise WorkerLost(
                f"worker {self._name!r}: {entry.name!r} ended before {self._end}", entry.name
            ) from because
        if entry.name != self._name:
            agent.reach(entry.name, _LOOK)

    def _who(self, rank: int) -> str:
        entry = self._seen.get(rank)
        return f"rank {rank} (which has not joined)" if entry is None else repr(entry.name)
