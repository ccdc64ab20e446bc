"""The protocol by which the ranks of a job meet in a store.

All keys have the prefix ``job/epoch``; an epoch is one start of a job. Within it, each world group that is
formed has a numbered *room*, so that one job can follow another at the same store::

    room              number of the current room
    ended/<room>      set when the room has ended: 1, or why the meeting in it failed
    exits             ranks whose process has ended, as reported by a launcher
    <room>/record     size and version, on which all members must agree
    <room>/arrivals   counter: the rank of processes that request none
    <room>/machine/   the processes of each machine, on which they detect dead ones
    <room>/rank/<r>   description of the member with rank r, or why there will be none
    <room>/came       counter of members that have a rank and wait
    <room>/met        set when all have arrived, with a key for each host: see ``summary``
    <room>/left       counter of members that left the group
    <room>/store/     the group's keys

A rank reads the room's number and record, claims its rank with one ``compare_set`` and counts itself, and
waits for the key of its host, which the last arrival writes: three messages in all. Their number and size do
not depend on the size of the job, except for occasional checks for dead processes of its machine. The
count is never less than the number of waiting members; it only shows when to check whether all have arrived.
Rank 0 checks periodically too: in a store that executes ``together`` one by one, a member on another machine
may die between its claim and its count. The last member to leave opens the next room and deletes this one.

A member that dies before all ranks are connected, or that cannot connect, makes the meeting *fail* for all:
the process that detects it stores the reason and opens the next room, where restarted ranks meet. A newcomer
to a room that cannot succeed any more does the same. If it was running already when the dead member arrived,
both belong to the same start, and it raises the error; otherwise it belongs to a new start and goes on to the
next room. A rank whose process ended before it arrived, as reported by its launcher, makes the meeting fail
too. A newcomer to a full room whose members leave, or one of whose members died, waits for the next room; if
all members are dead, it opens that room itself.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import msgspec

from .. import failure_report
from ..common.wording import in_seconds, ranks_named
from ..errors import (
    RendezvousError,
    RendezvousTimeout,
    StoreError,
    StoreTimeout,
    VersionMismatch,
    WireError,
)
from ..net import Deadline, build_version
from ..store import PrefixStore, Store
from ..store.requests import Add, Call, CompareSet, Delete, Set
from .host import Here, now
from .record import (
    PROTOCOL,
    ROOM,
    CalledOff,
    MeetingRecord,
    MemberDescription,
    decode,
    decode_number,
    encode,
    rank_key,
)
from .room import Room, died, never_came
from .summary import Met, Present, call_off, decode_met, host_key, tell_if_all_came
from .venue import START_AGAIN, nothing

#: seconds between two checks of members that are leaving
_LEAVE_POLL_INTERVAL_S = 0.5
#: seconds between two checks of waiting members: the first, and the longest
_FIRST_CHECK_INTERVAL_S, _CHECK_INTERVAL_S = 0.03, 0.25
#: the same for each rank of the job, so that thousands of ranks do not overload the store
_CHECK_INTERVAL_PER_RANK_S = 0.002

#: seconds until a process whose store was lost is seen dead, and between two checks of it
_DEATH_TIMEOUT_S, _DEATH_POLL_INTERVAL_S = 0.2, 0.01

_ANOTHER_PLACE = "another job name (shoal.init(job=...) or SHOAL_JOB), or another store"


class Meeting:
    """One rank's part in forming, and later leaving, a world group.

    Args:
        store: the keys of this epoch of the job; not closed by the meeting.
        rank: None: assigned in order of arrival.
        size: None: taken from the record.
        host: identity of the host, for the other ranks.
        deadline: by which all ranks must have arrived.
        look: called while waiting for others; a RendezvousError that it raises ends the meeting for all.
        advice: what a user should do after a failed meeting, as the end of a sentence.
        name: of the meeting; "": the first one of the job.

    Attributes:
        rank, size: set by :meth:`join`.
        together: the ranks of this host, set by :meth:`join`.
        machines: some machines of the members, at least two if there are several.
    """

    def __init__(
        self,
        store: Store,
        *,
        rank: int | None,
        size: int | None,
        job: str,
        epoch: int,
        host: str,
        here: Here,
        deadline: Deadline,
        look: Callable[[], None] = nothing,
        advice: str = START_AGAIN,
        name: str = "",
    ) -> None:
        self._root, self._name = store, name
        self._where = f"job {job!r}, epoch {epoch}"
        self._prefix = f"rendezvous ({self._where}): "
        self._rank, self._size = rank, size
        self._me = MemberDescription(
            host, here.machine, here.process, rank is not None, secrets.token_hex(8), at=now()
        )
        self._deadline = deadline
        self._look = look
        self._next_step = advice
        self._room = Room(self._root, self._me, -1)
        self.rank = -1
        self.size = -1
        self.together: list[int] = []
        self.machines: list[str] = []
        self._counted = self._met = False
        #: the rank of this process, or a rank whose claim got no answer
        self._mine: int | None = None
        #: number of members, with this one, when it claimed its rank, and the number of the room then
        self._came, self._room_then = 0, -1
        #: the members on this machine, once all have arrived
        self._here: list[Present] = []

    def join(self) -> None:
        """Claim a rank and wait for all others.

        Raises:
            RendezvousError: the sizes differ, the rank is taken, or the group is full.
            VersionMismatch: the others run another version.
            RendezvousTimeout: names the missing ranks.
        """
        try:
            while not self._enter():
                self._await_next_room()
            met = self._await_all()
            if self.rank not in met.together:
                raise StoreError(f"rendezvous: the store lists no rank {self.rank} among those of its host")
        except BaseException:
            self._withdraw()
            raise
        self._met, self.machines, self.together, self._here = True, met.machines, met.together, met.present

    def look(self, ranks: Collection[int] | None = None) -> None:
        """Check, while waiting for other ranks, whether the meeting can still succeed.

        Args:
            ranks: those whose deaths count; None: all. A rank that is connected to all others may end
                normally before this one is connected.

        Raises:
            RendezvousError: the meeting failed; the message names the dead member, or the reason.
        """
        if not self._met and self._room.is_quiet():
            return
        dead = self._dead_now(ranks)
        # After the check for dead members: a member stores the reason of a failure before it ends.
        with contextlib.suppress(StoreError, WireError):
            if (why := self._room.why_failed()) is not None:
                raise self._failed(why)
        if dead:
            raise self._doomed(died(dead, self._next_step), dead, at=max(each.at for each in dead.values()))
        absent: dict[int, str] = {}
        if not self._met:
            with contextlib.suppress(StoreError, WireError):
                absent = self._room.ended_outside()
        if absent:
            raise self._doomed(never_came(absent), absent, at=now())

    def _doomed(self, reason: str, ranks: Collection[int], at: float) -> RendezvousError:
        """Record that the meeting failed because ``ranks`` ended; return the error to raise."""
        with contextlib.suppress(StoreError, WireError):
            self._room.fail(reason, at)
            self._room.why_failed()  # marks the reason as known in this process
        return self._failed(reason, ranks)

    def fail(self, error: BaseException) -> None:
        """Record for the others that the meeting failed on this rank because of ``error``."""
        failure_report.failed(error)
        reason = str(error) or type(error).__name__
        if not isinstance(error, RendezvousError):
            reason = f"rank {self.rank} could not connect: {type(error).__name__}: {reason}"
        with contextlib.suppress(StoreError, WireError):
            self._room.fail(reason, at=self._me.at)
            self._room.why_failed()  # marks the reason as known in this process

    def call_off(self, error: BaseException) -> None:
        """Notify waiting ranks that the store ends with this rank, which failed with ``error``.

        Otherwise they would try to reach the lost store.
        """
        failure_report.failed(error)
        reason = f"the rank that serves the store failed: {error or type(error).__name__}"
        notice = CalledOff(reason, isinstance(error, RendezvousTimeout))
        with contextlib.suppress(StoreError, WireError):
            record = self._room.record()
            members = self._room.members().values()
            for rank in range(0 if record is None else record.size):  # for ranks that arrive from now on
                self._room.store.compare_set(rank_key(rank), b"", encode(notice))
            call_off(self._room.store, notice, members)

    @property
    def store(self) -> Store:
        """The group's keys."""
        return PrefixStore("store", self._room.store)

    @property
    def room_store(self) -> Store:
        """The keys of the room, which are deleted when all have left it."""
        return self._room.store

    def leave(self, timeout: float) -> None:
        """Leave the group in ``timeout`` seconds; the last member opens the next room and clears this one."""
        self._room.store.timeout = timeout
        gone = msgspec.structs.replace(self._me, left=True)
        mine = Set(rank_key(self.rank), encode(gone))
        if self._room.store.together([mine, Add("left", 1)])[1] >= self.size:
            self._room.close()

    def wait_until_all_left(self, timeout: float, alone: Callable[[], bool]) -> None:
        """Block until every member has left or died, or ``timeout`` seconds have passed.

        ``alone`` returns whether no other process is connected to the store; dead members never leave.
        """
        deadline = Deadline(timeout)
        while not (self._room.has_ended() or alone() or deadline.expired):
            self._room.watch(min(_LEAVE_POLL_INTERVAL_S, deadline.remaining()))

    def _await_all(self) -> Met:
        try:
            if self._came >= self.size:  # the last arrival notifies all
                tell_if_all_came(self._room.store, self.size)
            return self._look_until_all_came()
        except StoreError as error:
            # The process that serves the store may be dying: its sockets close a moment before it ends.
            patience = Deadline(min(_DEATH_TIMEOUT_S, self._deadline.remaining()))
            while not (gone := self._room.neighbours.gone_of_known()):
                if patience.expired:
                    raise
                time.sleep(_DEATH_POLL_INTERVAL_S)
            named = ", ".join(map(str, gone))
            raise self._failed(
                f"{named} died while the ranks were meeting, and the store is lost; {self._next_step}"
            ) from error

    def _look_until_all_came(self) -> Met:
        store, mine = self._room.store, host_key(self._me.host, self._me.machine)
        longest = max(_CHECK_INTERVAL_S, _CHECK_INTERVAL_PER_RANK_S * self.size)
        pause = max(_FIRST_CHECK_INTERVAL_S, longest - _CHECK_INTERVAL_S)
        while True:
            with contextlib.suppress(StoreTimeout):
                return decode_met(store.get(mine, min(pause, self._deadline.remaining())))
            self.look()
            try:
                self._look()
            except RendezvousError as error:
                self.fail(error)
                raise
            if self.rank == 0 or self._deadline.expired:
                tell_if_all_came(store, self.size)
            if self._deadline.expired and not store.check([mine]):
                raise self._missing()
            pause = min(2 * pause, longest)

    def _dead_now(self, ranks: Collection[int] | None) -> dict[int, MemberDescription]:
        if not self._met:
            return self._room.dead()
        members = {
            each.rank: msgspec.structs.replace(self._me, process=each.process, at=each.at, token="")
            for each in self._here
            if ranks is None or each.rank in ranks
        }
        return {rank: each for rank, each in members.items() if self._room.is_dead(each)}

    def _enter(self) -> bool:
        """Claim a rank in the current room; False if the room is full or ending."""
        self._room, gone, record = Room.current(self._root, self._me)
        if (why := self._room.why_failed_before()) is not None:
            raise self._failed(why)
        if self._room.fail_if_doomed(gone, self._next_step):
            return False
        rank = self._claim(record)
        if rank is None:
            return False
        if self._room_then != self._room.number:
            # The room ended and was cleared between the read of its number and the claim.
            self._room.clear()
            self._mine = None
            return False
        self.rank = rank
        failure_report.met(self.rank, self.size, self._name)
        return True

    def _claim(self, record: bytes | None) -> int | None:
        """Claim a rank, given the record if it exists; None if no rank is available here."""
        room, number = self._room, str(self._room.number).encode()
        writes = record is None and self._size is not None
        while True:
            if record is None:
                record = self._await_record() if self._size is None else encode(MeetingRecord(self._size))
            if not self._agrees_with(decode(record, MeetingRecord)):
                return None
            # In this order: a member implies a room number, and a rank implies an entry in a machine's list.
            calls: list[Call] = [Add(ROOM, 0), CompareSet(ROOM, number, number)]
            if writes:
                calls.append(CompareSet(room.key("record"), b"", record))
            calls.append(room.neighbours.append(self._rank).under(room.key("")))
            last = [Add(room.key("arrivals"), 1)] if self._rank is None else self._claiming(self._rank)
            results = self._root.together([*calls, *last])
            if results[1] != number:
                self._mine = None
                return None
            if len(results) >= len(calls):
                break
            record, writes = results[-1], False  # another process wrote it meanwhile
        results = results[len(calls) :]
        if self._rank is None:
            return self._claim_on_arrival(results[0] - 1)
        return self._rank if self._has_claimed(results) else None

    def _await_record(self) -> bytes:
        try:
            return self._room.store.get("record", self._deadline.remaining())
        except StoreTimeout:
            raise RendezvousTimeout(
                f"rendezvous ({self._where}): within {in_seconds(self._deadline.timeout)} no process wrote "
                "the job's record, which contains its size; start the store with `shoal run` or "
                "`shoal store --size N`, or give every rank the size"
            ) from None

    def _agrees_with(self, record: MeetingRecord) -> bool:
        """Return whether this rank agrees with the record; False: the room is ending."""
        if (record.protocol, record.version) != (PROTOCOL, build_version()):
            if self._room.is_ending():
                return False
            raise VersionMismatch(
                f"rendezvous ({self._where}): the job runs shoal {record.version} (rendezvous protocol "
                f"{record.protocol}), this process runs {build_version()} (protocol {PROTOCOL}); install the "
                "same version everywhere"
            )
        if self._size is not None and self._size != record.size:
            if self._room.is_ending():
                return False
            raise self._refuse(
                f"this process{self._as_rank()} came with size {self._size}, but the job's size is "
                f"{record.size}; every rank must be given the same size"
            )
        self.size = record.size
        if self._rank is not None and self._rank >= self.size:
            raise self._refuse(
                f"this process came as rank {self._rank}, but the job's size is {self.size}: ranks go from "
                f"0 to {self.size - 1}"
            )
        return True

    def _claim_on_arrival(self, arrival: int) -> int | None:
        """Claim the rank ``arrival``, this process's position in order of arrival, or any free one."""
        if arrival < self.size and self._take(arrival):
            return arrival
        # A process that withdrew and arrived again, or that died, leaves its rank free.
        taken = self._room.members()
        free = (rank for rank in range(self.size) if rank not in taken)
        return next((rank for rank in free if self._take(rank)), None)

    def _take(self, rank: int) -> bool:
        return self._has_claimed(self._root.together(self._claiming(rank)))

    def _claiming(self, rank: int) -> list[Call]:
        """Return the calls that claim a rank, and count this process if it gets the rank."""
        mine, key = encode(self._me), self._room.key
        self._mine = rank
        return [CompareSet(key(rank_key(rank)), b"", mine), Add(key("came"), 1), Add(ROOM, 0)]

    def _has_claimed(self, results: list[Any]) -> bool:
        """Return whether this process has the rank, by the results of the calls that claim it."""
        self._counted = len(results) > 1
        if self._counted:
            _, self._came, self._room_then = results
        else:
            self._mine = None
        return self._counted

    def _withdraw(self) -> None:
        """Free the rank for a second attempt."""
        if self._mine is None:
            return
        with contextlib.suppress(StoreError, WireError, OSError):  # the store itself may have failed
            if not self._counted and self._room.store.peek([rank_key(self._mine)]) != [encode(self._me)]:
                return
            calls: list[Call] = [Set(f"gave_up/{self._mine}", b""), Delete(rank_key(self._mine))]
            if self._counted:  # in this order: the count is never less than the number of waiting members
                calls.append(Add("came", -1))
                self._counted = False
            self._room.store.together(calls)

    def _await_next_room(self) -> None:
        """Wait while the members of this room leave it; RendezvousError if they do not."""
        while not self._room.has_ended():
            members = self._room.members()
            if self._room.is_abandoned(members):
                self._room.close()
                return
            if self._room.fail_if_doomed(advice=self._next_step):
                return
            if not self._room.is_ending(members):
                raise self._refuse(self._why_no_place(members))
            if self._deadline.expired:
                gone = {rank for rank, each in members.items() if each.left or self._room.is_dead(each)}
                raise RendezvousTimeout(
                    f"rendezvous ({self._where}): an earlier job in this store is ending, but its "
                    f"{ranks_named(members.keys() - gone)} did not leave it within "
                    f"{in_seconds(self._deadline.timeout)}; end them, or use {_ANOTHER_PLACE}"
                )
            self._room.watch(min(_LEAVE_POLL_INTERVAL_S, self._deadline.remaining()))

    def _why_no_place(self, members: Mapping[int, MemberDescription]) -> str:
        if self._rank is None:
            return (
                f"the group of {self.size} is full, this process is one too many; each rank is taken: "
                + "; ".join(f"rank {rank} by {member}" for rank, member in sorted(members.items()))
                + f". {self._advice(members.values())}"
            )
        holder = members.get(self._rank)
        if holder is None:
            return f"rank {self._rank} was claimed by a process that withdrew just now; start again"
        mixed = "" if holder.named else " (that process requested no rank and got this one on arrival)"
        return f"rank {self._rank} is given twice: {holder} has it already{mixed}. {self._advice([holder])}"

    def _advice(self, holders: Iterable[MemberDescription]) -> str:
        if any(holder.process == self._me.process for holder in holders):
            return (
                "It is this process itself: a second world in one process needs a job name of its own, "
                "shoal.init(job=...), the same on all its ranks"
            )
        return f"If that is an earlier job which ended without closing its group, use {_ANOTHER_PLACE}"

    def _missing(self) -> RendezvousTimeout:
        here, store = self._room.members(), self._room.store
        those = (key.removeprefix("gave_up/") for key in store.list_keys("gave_up/"))
        gave_up = set(map(decode_number, those)) - {*here}
        missing = [rank for rank in range(self.size) if rank not in here and rank not in gave_up]
        text = (
            f"rendezvous ({self._where}): rank {self.rank} of {self.size} waited "
            f"{in_seconds(self._deadline.timeout)} for {ranks_named([*missing, *gave_up])}"
        )
        if missing:
            text += f"; {ranks_named(missing)} did not come"
        if gave_up:
            text += f"; {ranks_named(gave_up)} came and gave up waiting"
        refused = store.list_keys("refused/")
        if refused:
            reasons = "; ".join(value.decode() for value in store.multi_get(refused, 1.0))
            text += f". Refused meanwhile: {reasons}"
        return RendezvousTimeout(text)

    def _refuse(self, reason: str) -> RendezvousError:
        """Return the error to raise here; waiting ranks report the reason if they time out."""
        self._room.store.set(f"refused/{self._me.token}", f"{self._me}: {reason}".encode())
        return RendezvousError(f"rendezvous ({self._where}): {reason}")

    def _failed(self, reason: str, ranks: Collection[int] = ()) -> RendezvousError:
        """Return the error of a meeting that failed because of other ranks (``ranks``, if known)."""
        failure_report.told(ranks, self._name)
        return RendezvousError(self._prefix + reason.removeprefix(self._prefix))

    def _as_rank(self) -> str:
        return "" if self._rank is None else f" (rank {self._rank})"
