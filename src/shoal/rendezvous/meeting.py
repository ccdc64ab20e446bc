"""The protocol by which the ranks of a job meet in a store.

Everything lives under the prefix ``job/epoch``.  Within it, each world group that is formed has a
*generation*, a room of its own, so that a job may follow another one at the same place::

    generation            number of the current room
    ended/<generation>    set when everybody left that room
    <generation>/record   size and version: what all members must agree on
    <generation>/arrivals counter: the rank of those that come without one
    <generation>/rank/<r> descriptor of the member that is rank r, or why nobody will be it
    <generation>/left     counter of members that closed their group
    <generation>/store/   the group's own keys

A rank looks up the room, compares the record, claims its rank with one ``compare_set``, and waits for
all descriptors at once: the number of its store operations does not depend on the size of the job.
The last to leave opens the next room and deletes the old one's keys.  A newcomer who finds the room
full while its members leave waits for the next one; if the members died without leaving (all of them
on this machine, so that it can tell), it opens the next room itself.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Iterable, Mapping

import msgspec

from ..errors import (
    RendezvousError,
    RendezvousTimeout,
    StoreError,
    StoreTimeout,
    VersionMismatch,
    WireError,
)
from ..store import PrefixStore, Store
from ..wire import Deadline, build_version
from .host import Here, process_is_gone
from .record import PROTOCOL, CalledOff, Descriptor, Record, decode, decode_member, rank_key, room_of, root_of

#: seconds between two looks at members that are leaving
_LEAVING_CHECK = 0.5


class Meeting:
    """One rank's part in the forming, and later the leaving, of a world group.

    Args:
        store: shared by all ranks; not closed by the meeting.
        rank: None to be given one in order of arrival.
        size: None to take it from the record.
        host: identity of the host that is told to the others.
        deadline: until when everybody must be there.

    Attributes:
        rank, size: known after :meth:`join`.
        members: every rank's descriptor, in rank order, after :meth:`join`.
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
    ) -> None:
        self._root = root_of(store, job, epoch)
        self._where = f"job {job!r}, epoch {epoch}"
        self._rank = rank
        self._size = size
        self._me = Descriptor(host, here.machine, here.process, rank is not None, secrets.token_hex(8))
        self._deadline = deadline
        self._generation = -1
        self._room: Store = self._root
        self._fixed = False
        self.rank = -1
        self.size = -1
        self.members: list[Descriptor] = []

    def join(self) -> None:
        """Claim a rank and wait for everybody.

        Raises:
            RendezvousError: another size, a rank that is taken, or a group that is full.
            VersionMismatch: the others run another version.
            RendezvousTimeout: names the ranks that did not come.
        """
        while not self._enter():
            self._await_next_room()
        try:
            values = self._room.multi_get([rank_key(r) for r in range(self.size)], self._deadline.remaining())
        except StoreTimeout:
            missing = self._missing()
            self._withdraw()
            raise missing from None
        except BaseException:
            self._withdraw()
            raise
        self.members = [decode_member(value) for value in values]

    def call_off(self, error: BaseException) -> None:
        """The store goes with this rank, which gave up with ``error``: tell those who wait here.

        They would find the store gone, and look for it in vain.
        """
        reason = f"the rank that serves the store gave up: {error or type(error).__name__}"
        notice = msgspec.json.encode(CalledOff(reason, isinstance(error, RendezvousTimeout)))
        with contextlib.suppress(StoreError, WireError):
            record = decode(self._room.get("record", 0.0), Record)
            for rank in range(record.size):
                self._room.compare_set(rank_key(rank), b"", notice)

    @property
    def store(self) -> Store:
        """The group's own keys."""
        return PrefixStore("store", self._room)

    def agree_on_secret(self) -> bytes:
        """A secret that all ranks share through the store.  Only for stores that nobody else can read."""
        mine = secrets.token_hex(32).encode()
        return self._room.compare_set("secret", b"", mine)

    def leave(self) -> None:
        """Say that this rank is done; the last one opens the next room and clears this one."""
        gone = msgspec.structs.replace(self._me, left=True)
        self._room.set(rank_key(self.rank), msgspec.json.encode(gone))
        if self._room.add("left", 1) >= self.size:
            self._open_next_room()

    def wait_until_all_left(self, timeout: float, alone: Callable[[], bool]) -> None:
        """Block until every member left the room, is dead, or ``timeout`` ran out.

        Args:
            timeout: in seconds.
            alone: whether nobody else is connected to the store; those that died never leave.
        """
        deadline = Deadline(timeout)
        while not (self._has_ended() or alone() or deadline.expired):
            self._watch(min(_LEAVING_CHECK, deadline.remaining()))

    def _enter(self) -> bool:
        """Claim a rank in the current room; False when the room is full or about to end."""
        self._generation = self._root.add("generation", 0)
        self._room = room_of(self._root, self._generation)
        record = self._agree_on_record()
        if record is None:
            return False
        self.size, self._fixed = record.size, record.fixed
        if self._rank is not None:
            self._check_rank(self._rank)
        rank = self._claim()
        if rank is None:
            return False
        if self._has_ended():
            # The room ended, and was cleared, between our look at its number and our claim.
            self._clear()
            return self._enter()
        self.rank = rank
        return True

    def _agree_on_record(self) -> Record | None:
        if self._size is None:
            try:
                raw = self._room.get("record", self._deadline.remaining())
            except StoreTimeout:
                raise RendezvousTimeout(
                    f"rendezvous ({self._where}): within {self._deadline.timeout:g} s nobody wrote the job's "
                    "record, which holds its size; start the store with `shoal run` or "
                    "`shoal store --size N`, or give every rank the size"
                ) from None
        else:
            raw = self._room.compare_set("record", b"", msgspec.json.encode(Record(self._size)))
        record = decode(raw, Record)
        if (record.protocol, record.version) != (PROTOCOL, build_version()):
            if self._is_ending():
                return None
            raise VersionMismatch(
                f"rendezvous ({self._where}): the job runs shoal {record.version} (rendezvous protocol "
                f"{record.protocol}), this process runs {build_version()} (protocol {PROTOCOL}); install the "
                "same version everywhere"
            )
        if self._size is not None and self._size != record.size:
            if self._is_ending():
                return None
            raise self._refuse(
                f"this process{self._as_rank()} came with size {self._size}, but the job's size is "
                f"{record.size}; every rank must be given the same size"
            )
        return record

    def _check_rank(self, rank: int) -> None:
        if rank >= self.size:
            raise self._refuse(
                f"this process came as rank {rank}, but the job's size is {self.size}: ranks go from 0 to "
                f"{self.size - 1}"
            )

    def _claim(self) -> int | None:
        if self._rank is not None:
            return self._rank if self._take(self._rank) else None
        arrival = self._room.add("arrivals", 1) - 1
        if arrival < self.size and self._take(arrival):
            return arrival
        # Somebody gave up and came again, or died on the way: its place is free.
        taken = self._taken()
        free = (rank for rank in range(self.size) if rank not in taken)
        return next((rank for rank in free if self._take(rank)), None)

    def _take(self, rank: int) -> bool:
        mine = msgspec.json.encode(self._me)
        return self._room.compare_set(rank_key(rank), b"", mine) == mine

    def _taken(self) -> dict[int, Descriptor]:
        """The members that are in the room now.  Not part of the way that a rank goes when all is well."""
        found = {}
        for key in self._room.list_keys("rank/"):
            try:
                raw = self._room.get(key, 0.001)
            except StoreTimeout:
                continue  # it withdrew in the meantime
            found[int(key.removeprefix("rank/"))] = decode_member(raw)
        return found

    def _withdraw(self) -> None:
        """Free the rank, so that a second try can have it."""
        with contextlib.suppress(StoreError, OSError):  # the store may be what failed
            self._room.set(f"gave_up/{self.rank}", b"")
            self._room.delete(rank_key(self.rank))

    def _is_ending(self) -> bool:
        """Whether members of this room left it already, or all of them are dead."""
        return self._has_ended() or self._room.add("left", 0) > 0 or self._is_abandoned(self._taken())

    def _has_ended(self) -> bool:
        return self._root.add("generation", 0) != self._generation

    def _is_abandoned(self, members: Mapping[int, Descriptor]) -> bool:
        return bool(members) and all(
            member.left or (member.machine == self._me.machine and process_is_gone(member.process))
            for member in members.values()
        )

    def _await_next_room(self) -> None:
        """Wait while the members of this room leave it.

        Raises:
            RendezvousError: they do not.
        """
        while not self._has_ended():
            members = self._taken()
            if self._is_abandoned(members):
                self._open_next_room()
                return
            if not self._is_ending():
                raise self._refuse(self._why_no_place(members))
            if self._deadline.expired:
                still = [rank for rank, member in members.items() if not member.left]
                raise RendezvousTimeout(
                    f"rendezvous ({self._where}): an earlier job at this place is ending, but its rank(s) "
                    f"{_ranks(still)} did not leave it within {self._deadline.timeout:g} s; end them, or use "
                    "another SHOAL_JOB or place"
                )
            self._watch(min(_LEAVING_CHECK, self._deadline.remaining()))

    def _watch(self, timeout: float) -> None:
        """Wait until the last member leaves the room, but no longer than ``timeout``."""
        with contextlib.suppress(StoreTimeout):
            self._root.wait([self._ended_key()], timeout)

    def _why_no_place(self, members: Mapping[int, Descriptor]) -> str:
        advice = (
            "If that is an earlier job which ended without closing its group, use another SHOAL_JOB or "
            "another place to meet"
        )
        if self._rank is None:
            return (
                f"the group of {self.size} is full, this process is one too many; each rank is taken: "
                + "; ".join(f"rank {rank} by {member}" for rank, member in sorted(members.items()))
                + f". {advice}"
            )
        holder = members.get(self._rank)
        if holder is None:
            return f"rank {self._rank} was taken by a process that gave up just now; start again"
        mixed = (
            "" if holder.named else " (that process came without a rank and was given this one on arrival)"
        )
        return f"rank {self._rank} is given twice: {holder} has it already{mixed}. {advice}"

    def _open_next_room(self) -> None:
        following = self._generation + 1
        if self._fixed:
            room_of(self._root, following).set("record", msgspec.json.encode(Record(self.size, fixed=True)))
        self._root.compare_set("generation", str(self._generation).encode(), str(following).encode())
        self._clear()
        self._root.set(self._ended_key(), b"1")
        self._root.delete(f"ended/{self._generation - 1}")

    def _clear(self) -> None:
        for key in self._room.list_keys():
            self._room.delete(key)

    def _ended_key(self) -> str:
        return f"ended/{self._generation}"

    def _missing(self) -> RendezvousTimeout:
        here = self._taken()
        gave_up = {int(key.removeprefix("gave_up/")) for key in self._room.list_keys("gave_up/")} - {*here}
        missing = [rank for rank in range(self.size) if rank not in here and rank not in gave_up]
        text = (
            f"rendezvous ({self._where}): rank {self.rank} of {self.size} waited "
            f"{self._deadline.timeout:g} s for rank(s) {_ranks([*missing, *gave_up])}"
        )
        if missing:
            text += f"; {_ranks(missing)} did not come"
        if gave_up:
            text += f"; {_ranks(gave_up)} came and gave up waiting"
        refused = self._room.list_keys("refused/")
        if refused:
            reasons = "; ".join(value.decode() for value in self._room.multi_get(refused, 1.0))
            text += f". Refused meanwhile: {reasons}"
        return RendezvousTimeout(text)

    def _refuse(self, reason: str) -> RendezvousError:
        """The error to raise here; those that wait are told the reason when they give up."""
        self._room.set(f"refused/{self._me.token}", f"{self._me}: {reason}".encode())
        return RendezvousError(f"rendezvous ({self._where}): {reason}")

    def _as_rank(self) -> str:
        return "" if self._rank is None else f" (rank {self._rank})"


def _ranks(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(ranks)))
