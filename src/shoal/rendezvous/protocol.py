"""The protocol by which the ranks of a job meet in a store.

All keys have the prefix ``job/epoch``; an epoch is one start of a job. Within it, each world group that is
formed has a numbered *round*, so that one job can follow another at the same store::

    room              number of the current round
    ended/<round>     set when the round has ended: 1, or why the meeting in it failed
    exits             ranks whose process has ended, as reported by a launcher
    <round>/record    size and version, on which all members must agree
    <round>/arrivals  counter: the rank of processes that request none
    <round>/machine/  the processes of each machine, on which they detect dead ones
    <round>/rank/<r>  description of the member with rank r, or why there will be none
    <round>/came      counter of members that have a rank and wait
    <round>/met       set when all have arrived, with a key for each host: see ``records``
    <round>/left      counter of members that left the group
    <round>/store/    the group's keys

A rank reads the round's number and record, claims its rank with one ``compare_set`` and counts itself, and
waits for the key of its host, which the last arrival writes: three messages in all. Their number and size do
not depend on the size of the job, except for occasional checks for dead processes of its machine. The
count is never less than the number of waiting members; it only shows when to check whether all have arrived.
Rank 0 checks periodically too: in a store that executes ``together`` one by one, a member on another machine
may die between its claim and its count. The last member to leave opens the next round and deletes this one.

A member that dies before all ranks are connected, or that cannot connect, makes the meeting *fail* for all:
the process that detects it stores the reason and opens the next round, where restarted ranks meet. A newcomer
to a round that cannot succeed any more does the same. If it was running already when the dead member arrived,
both belong to the same start, and it raises the error; otherwise it belongs to a new start and goes on to the
next round. A rank whose process ended before it arrived, as reported by its launcher, makes the meeting fail
too. A newcomer to a full round whose members leave, or one of whose members died, waits for the next round;
if all members are dead, it opens that round itself.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import msgspec

from .. import failure_report
from ..common.formatting import format_seconds, ranks_named
from ..common.process_identity import now
from ..errors import RendezvousError, RendezvousTimeout, StoreError, StoreTimeout, VersionMismatch, WireError
from ..net import Deadline, build_version
from ..store import PrefixStore, Store
from ..store.requests import Add, Call, CompareSet, Delete, Set
from .point import RendezvousPoint
from .records import (
    PROTOCOL,
    ROUND,
    Cancelled,
    LocalMember,
    MeetingRecord,
    MemberDescription,
    Summary,
    cancel,
    decode,
    decode_met,
    decode_number,
    encode,
    host_key,
    publish_if_complete,
    rank_key,
)
from .rounds import Round, death_reason, early_exit_reason
from .venue import nothing

#: seconds between two checks of members that are leaving
_LEAVE_POLL_INTERVAL_S = 0.5
#: seconds between two checks of waiting members: the first, and the longest
_FIRST_CHECK_INTERVAL_S, _CHECK_INTERVAL_S = 0.03, 0.25
#: the same for each rank of the job, so that thousands of ranks do not overload the store
_CHECK_INTERVAL_PER_RANK_S = 0.002

#: seconds until a process whose store was lost is seen dead, and between two checks of it
_DEATH_TIMEOUT_S, _DEATH_POLL_INTERVAL_S = 0.2, 0.01

_ANOTHER_PLACE = "another job name (shoal.init(job=...) or SHOAL_JOB), or another store"


class Rendezvous:
    """One rank's part in forming, and later leaving, a world group.

    Args:
        place: not closed here. The rank of its venue may be None (assigned in order of arrival), and its size
            too (taken from the record).
        check: called while waiting for others; a RendezvousError that it raises ends the meeting for all.

    Attributes:
        rank, size: set by :meth:`join`.
        local_ranks: the ranks of this host, set by :meth:`join`.
        machines: some machines of the members, at least two if there are several.
    """

    def __init__(self, place: RendezvousPoint, check: Callable[[], None] = nothing) -> None:
        identity = place.identity
        self._root, self._name = place.store, place.meeting
        self._prefix = f"rendezvous (job {place.job!r}, epoch {place.epoch}): "
        self._rank, self._size = place.venue.rank, place.venue.size
        named, token = self._rank is not None, secrets.token_hex(8)
        self._me = MemberDescription(identity.machine, identity.process, place.host, named, token, at=now())
        self._deadline = place.request.deadline
        self._check_caller = check
        self._next_step = place.venue.advice
        self._round = Round(self._root, self._me, -1)
        self.rank = -1
        self.size = -1
        self.local_ranks: list[int] = []
        self.machines: list[str] = []
        self._counted = self._is_complete = False
        #: the rank of this process, or a rank whose claim got no answer
        self._claimed_rank: int | None = None
        #: number of members, with this one, when it claimed its rank, and the number of the round then
        self._arrivals, self._round_at_claim = 0, -1
        #: the members on this machine, once all have arrived
        self._local_members: list[LocalMember] = []

    def join(self) -> None:
        """Claim a rank and wait for all others.

        Raises:
            RendezvousError: the sizes differ, the rank is taken, or the group is full.
            VersionMismatch: the others run another version.
            RendezvousTimeout: names the missing ranks.
        """
        try:
            while not self._try_enter():
                self._await_next_round()
            met = self._await_completion()
            if self.rank not in met.together:
                raise StoreError(f"rendezvous: the store lists no rank {self.rank} among those of its host")
        except BaseException:
            self._withdraw()
            raise
        self._is_complete, self.machines, self.local_ranks = True, met.machines, met.together
        self._local_members = met.present

    def check(self, ranks: Collection[int] | None = None) -> None:
        """Check, while waiting for other ranks, whether the meeting can still succeed.

        Args:
            ranks: those whose deaths count; None: all. A rank that is connected to all others may end
                normally before this one is connected.

        Raises:
            RendezvousError: the meeting failed; the message names the dead member, or the reason.
        """
        if not self._is_complete and self._round.has_no_events():
            return
        dead = self._dead_now(ranks)
        # After the check for dead members: a member stores the reason of a failure before it ends.
        with contextlib.suppress(StoreError, WireError):
            if (why := self._round.failure_reason()) is not None:
                raise self._failed_error(why)
        if dead:
            at = max(each.at for each in dead.values())
            raise self._fail_for(death_reason(dead, self._next_step), dead, at)
        absent: dict[int, str] = {}
        if not self._is_complete:
            with contextlib.suppress(StoreError, WireError):
                absent = self._round.ended_before_arrival()
        if absent:
            raise self._fail_for(early_exit_reason(absent), absent, at=now())

    def _fail_for(self, reason: str, ranks: Collection[int], at: float) -> RendezvousError:
        """Record that the meeting failed because ``ranks`` ended; return the error to raise."""
        with contextlib.suppress(StoreError, WireError):
            self._round.fail(reason, at)
            self._round.failure_reason()  # marks the reason as known in this process
        return self._failed_error(reason, ranks)

    def fail(self, error: BaseException) -> None:
        """Record for the others that the meeting failed on this rank because of ``error``."""
        failure_report.failed(error)
        reason = str(error) or type(error).__name__
        if not isinstance(error, RendezvousError):
            reason = f"rank {self.rank} could not connect: {type(error).__name__}: {reason}"
        with contextlib.suppress(StoreError, WireError):
            self._round.fail(reason, at=self._me.at)
            self._round.failure_reason()  # marks the reason as known in this process

    def cancel(self, error: BaseException) -> None:
        """Notify waiting ranks that the store ends with this rank, which failed with ``error``.

        Otherwise they would try to reach the lost store.
        """
        failure_report.failed(error)
        reason = f"the rank that serves the store failed: {error or type(error).__name__}"
        notice = Cancelled(reason, isinstance(error, RendezvousTimeout))
        with contextlib.suppress(StoreError, WireError):
            record = self._round.record()
            members = self._round.members().values()
            for rank in range(0 if record is None else record.size):  # for ranks that arrive from now on
                self._round.store.compare_set(rank_key(rank), b"", encode(notice))
            cancel(self._round.store, notice, members)

    @property
    def store(self) -> Store:
        """The group's keys."""
        return PrefixStore("store", self._round.store)

    @property
    def round_store(self) -> Store:
        """The keys of the round, which are deleted when all have left it."""
        return self._round.store

    def leave(self, timeout: float) -> None:
        """Leave the group in ``timeout`` seconds; the last member opens the next round and clears this."""
        self._round.store.timeout = timeout
        ended = msgspec.structs.replace(self._me, left=True)
        mine = Set(rank_key(self.rank), encode(ended))
        if self._round.store.together([mine, Add("left", 1)])[1] >= self.size:
            self._round.close()

    def wait_until_all_left(self, timeout: float, alone: Callable[[], bool], lost: Collection[int]) -> None:
        """Block until every member has left or died, or ``timeout`` seconds have passed.

        Args:
            alone: whether no other process is connected to the store; dead members never leave.
            lost: ranks for which this does not wait: a stopped process, or one of a host that has failed, may
                stay connected.
        """
        deadline = Deadline(timeout)
        while not (self._round.has_ended() or alone() or deadline.expired):
            if lost and all(each.left for rank, each in self._round.members().items() if rank not in lost):
                return
            self._round.watch(min(_LEAVE_POLL_INTERVAL_S, deadline.remaining()))

    def _await_completion(self) -> Summary:
        try:
            if self._arrivals >= self.size:  # the last arrival notifies all
                publish_if_complete(self._round.store, self.size)
            return self._check_until_complete()
        except StoreError as error:
            # The process that serves the store may be dying: its sockets close a moment before it ends.
            patience = Deadline(min(_DEATH_TIMEOUT_S, self._deadline.remaining()))
            while not (ended := self._round.processes.ended_of_known()):
                if patience.expired:
                    raise
                time.sleep(_DEATH_POLL_INTERVAL_S)
            named = ", ".join(map(str, ended))
            raise self._failed_error(
                f"{named} died while the ranks were meeting, and the store is lost; {self._next_step}"
            ) from error

    def _check_until_complete(self) -> Summary:
        store, mine = self._round.store, host_key(self._me.host, self._me.machine)
        longest = max(_CHECK_INTERVAL_S, _CHECK_INTERVAL_PER_RANK_S * self.size)
        pause = max(_FIRST_CHECK_INTERVAL_S, longest - _CHECK_INTERVAL_S)
        while True:
            with contextlib.suppress(StoreTimeout):
                return decode_met(store.get(mine, min(pause, self._deadline.remaining())))
            self.check()
            try:
                self._check_caller()
            except RendezvousError as error:
                self.fail(error)
                raise
            if self.rank == 0 or self._deadline.expired:
                publish_if_complete(store, self.size)
            if self._deadline.expired and not store.check([mine]):
                raise self._missing_error()
            pause = min(2 * pause, longest)

    def _dead_now(self, ranks: Collection[int] | None) -> dict[int, MemberDescription]:
        if not self._is_complete:
            return self._round.dead()
        members = {
            each.rank: msgspec.structs.replace(self._me, process=each.process, at=each.at, token="")
            for each in self._local_members
            if ranks is None or each.rank in ranks
        }
        return {rank: each for rank, each in members.items() if each.is_dead()}

    def _try_enter(self) -> bool:
        """Claim a rank in the current round; False if the round is full or ending."""
        self._round, ended, record = Round.current(self._root, self._me)
        if (why := self._round.previous_failure_reason()) is not None:
            raise self._failed_error(why)
        if self._round.fail_if_member_died(ended, self._next_step):
            return False
        rank = self._claim(record)
        if rank is None:
            return False
        if self._round_at_claim != self._round.number:
            # The round ended and was cleared between the read of its number and the claim.
            self._round.clear()
            self._claimed_rank = None
            return False
        self.rank = rank
        failure_report.met(self.rank, self.size, self._name)
        return True

    def _claim(self, record: bytes | None) -> int | None:
        """Claim a rank, given the record if it exists; None if no rank is available here."""
        round_, number = self._round, str(self._round.number).encode()
        writes = record is None and self._size is not None
        while True:
            if record is None:
                record = self._await_record() if self._size is None else encode(MeetingRecord(self._size))
            if not self._agrees_with(decode(record, MeetingRecord)):
                return None
            # In this order: a member implies a round number, and a rank implies an entry in a machine's list.
            calls: list[Call] = [Add(ROUND, 0), CompareSet(ROUND, number, number)]
            if writes:
                calls.append(CompareSet(round_.key("record"), b"", record))
            calls.append(round_.processes.append(self._rank).under(round_.key("")))
            arrival = [Add(round_.key("arrivals"), 1)]
            last = arrival if self._rank is None else self._claim_calls(self._rank)
            results = self._root.together([*calls, *last])
            if results[1] != number:
                self._claimed_rank = None
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
            return self._round.store.get("record", self._deadline.remaining())
        except StoreTimeout:
            raise RendezvousTimeout(
                f"{self._prefix}within {format_seconds(self._deadline.timeout)} no process "
                "wrote the job's record, which contains its size; start the store with `shoal run` or "
                "`shoal store --size N`, or give every rank the size"
            ) from None

    def _agrees_with(self, record: MeetingRecord) -> bool:
        """Return whether this rank agrees with the record; False: the round is ending."""
        if (record.protocol, record.version) != (PROTOCOL, build_version()):
            if self._round.is_ending():
                return False
            raise VersionMismatch(
                f"{self._prefix}the job runs shoal {record.version} (rendezvous protocol "
                f"{record.protocol}), this process runs {build_version()} (protocol {PROTOCOL}); install the "
                "same version everywhere"
            )
        if self._size is not None and self._size != record.size:
            if self._round.is_ending():
                return False
            raise self._refused_error(
                f"this process{self._as_rank()} came with size {self._size}, but the job's size is "
                f"{record.size}; every rank must be given the same size"
            )
        self.size = record.size
        if self._rank is not None and self._rank >= self.size:
            raise self._refused_error(
                f"this process came as rank {self._rank}, but the job's size is {self.size}: ranks go from "
                f"0 to {self.size - 1}"
            )
        return True

    def _claim_on_arrival(self, arrival: int) -> int | None:
        """Claim the rank ``arrival``, this process's position in order of arrival, or any free one."""
        if arrival < self.size and self._try_claim(arrival):
            return arrival
        # A process that withdrew and arrived again, or that died, leaves its rank free.
        taken = self._round.members()
        free = (rank for rank in range(self.size) if rank not in taken)
        return next((rank for rank in free if self._try_claim(rank)), None)

    def _try_claim(self, rank: int) -> bool:
        return self._has_claimed(self._root.together(self._claim_calls(rank)))

    def _claim_calls(self, rank: int) -> list[Call]:
        """Return the calls that claim a rank, and count this process if it gets the rank."""
        mine, key = encode(self._me), self._round.key
        self._claimed_rank = rank
        return [CompareSet(key(rank_key(rank)), b"", mine), Add(key("came"), 1), Add(ROUND, 0)]

    def _has_claimed(self, results: list[Any]) -> bool:
        """Return whether this process has the rank, by the results of the calls that claim it."""
        self._counted = len(results) > 1
        if self._counted:
            _, self._arrivals, self._round_at_claim = results
        else:
            self._claimed_rank = None
        return self._counted

    def _withdraw(self) -> None:
        """Free the rank for a second attempt."""
        if self._claimed_rank is None:
            return
        with contextlib.suppress(StoreError, WireError, OSError):  # the store itself may have failed
            key = rank_key(self._claimed_rank)
            if not self._counted and self._round.store.peek([key]) != [encode(self._me)]:
                return
            calls: list[Call] = [Set(f"gave_up/{self._claimed_rank}", b""), Delete(key)]
            if self._counted:  # in this order: the count is never less than the number of waiting members
                calls.append(Add("came", -1))
                self._counted = False
            self._round.store.together(calls)

    def _await_next_round(self) -> None:
        """Wait while the members of this round leave it; RendezvousError if they do not."""
        while not self._round.has_ended():
            members = self._round.members()
            if self._round.all_left_or_dead(members):
                self._round.close()
                return
            if self._round.fail_if_member_died(advice=self._next_step):
                return
            if not self._round.is_ending(members):
                raise self._refused_error(self._why_full(members))
            if self._deadline.expired:
                ended = {rank for rank, each in members.items() if each.left or each.is_dead()}
                raise RendezvousTimeout(
                    f"{self._prefix}an earlier job in this store is ending, but its "
                    f"{ranks_named(members.keys() - ended)} did not leave it within "
                    f"{format_seconds(self._deadline.timeout)}; end them, or use {_ANOTHER_PLACE}"
                )
            self._round.watch(min(_LEAVE_POLL_INTERVAL_S, self._deadline.remaining()))

    def _why_full(self, members: Mapping[int, MemberDescription]) -> str:
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

    def _missing_error(self) -> RendezvousTimeout:
        here, store = self._round.members(), self._round.store
        those = (key.removeprefix("gave_up/") for key in store.list_keys("gave_up/"))
        gave_up = set(map(decode_number, those)) - {*here}
        missing = [rank for rank in range(self.size) if rank not in here and rank not in gave_up]
        text = (
            f"{self._prefix}rank {self.rank} of {self.size} waited "
            f"{format_seconds(self._deadline.timeout)} for {ranks_named([*missing, *gave_up])}"
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

    def _refused_error(self, reason: str) -> RendezvousError:
        """Return the error to raise here; waiting ranks report the reason if they time out."""
        self._round.store.set(f"refused/{self._me.token}", f"{self._me}: {reason}".encode())
        return RendezvousError(f"{self._prefix}{reason}")

    def _failed_error(self, reason: str, ranks: Collection[int] = ()) -> RendezvousError:
        """Return the error of a meeting that failed because of other ranks (``ranks``, if known)."""
        failure_report.notified(ranks, self._name)
        return RendezvousError(self._prefix + reason.removeprefix(self._prefix))

    def _as_rank(self) -> str:
        return "" if self._rank is None else f" (rank {self._rank})"
