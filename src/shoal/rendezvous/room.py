"""One room of a meeting: its keys, its members, and its end.

A room ends in one of two ways. When all members have left or are dead, its keys are deleted. When its meeting
can never succeed, because a member died or could not connect, it has *failed*: the reason is kept for the
waiting members, and its keys are deleted when the next room ends. In both cases the next room is open at
once, so a failed attempt never obstructs a later one.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Mapping, Sequence

import msgspec

from ..errors import StoreTimeout
from ..store import Store
from ..store.requests import Add, CompareSet
from .host import process_is_gone, started
from .neighbours import Neighbours
from .record import (
    EXITS,
    ROOM,
    Arrival,
    Exit,
    MeetingFailure,
    MeetingRecord,
    MemberDescription,
    decode,
    decode_member,
    decode_number,
    rank_key,
    room_of,
)
from .summary import MET
from .venue import START_AGAIN

#: value of the end key of a room that all members left
_DONE = b"1"

#: identities of the failures reported in this process: a later attempt does not fail because of them again
_heard: set[str] = set()


class Room:
    """A room, from the point of view of the process ``me``; ``root``: the job's keys."""

    @classmethod
    def current(cls, root: Store, me: MemberDescription) -> tuple[Room, list[Arrival], bytes | None]:
        """Return the current room, the processes of this machine that ended in it, and its record."""
        expected = 0  # usually it is the first room: then one message is enough
        while True:
            room = cls(root, me, expected)
            keys = [ROOM, room.key(room.neighbours.key), room.key("record")]
            number, processes, record = root.peek(keys)
            expected = 0 if number is None else decode_number(number)
            if expected == room.number:
                return room, room.neighbours.gone_of(processes), record

    def key(self, name: str) -> str:
        """Return a key of the room, relative to the job's keys."""
        return f"{self.number}/{name}"

    def __init__(self, root: Store, me: MemberDescription, number: int) -> None:
        self._root = root
        self._me = me
        self.number = number
        self._ended_key = f"ended/{number}"
        self.store: Store = room_of(root, number)
        self.neighbours = Neighbours(self.store, me)

    # -- who is in it --------------------------------------------------------------------------

    def members(self) -> dict[int, MemberDescription]:
        """Return the present members of the room. Not called in a normal meeting."""
        keys = self.store.list_keys("rank/")
        return {
            decode_number(key.removeprefix("rank/")): decode_member(value)
            for key, value in zip(keys, self.store.peek(keys), strict=True)
            if value is not None  # else it withdrew in the meantime
        }

    def dead(self, gone: Sequence[Arrival] | None = None) -> dict[int, MemberDescription]:
        """Return the members that died on this machine; ``gone``: the processes that ended, if known."""
        tokens = {arrival.token for arrival in (self.neighbours.gone() if gone is None else gone)}
        if not tokens:
            return {}
        return {rank: each for rank, each in self.members().items() if each.token in tokens and not each.left}

    def ended_outside(self) -> dict[int, str]:
        """Return the ranks whose processes ended before they arrived, and how, as reported by a launcher."""
        (read,) = self._root.peek([EXITS])
        lines = (read or b"").splitlines()  # empty without a launcher that reports exits
        # In this order: a rank that ended after its arrival has its key.
        exits = (decode(line, Exit) for line in lines)
        return {exit.rank: exit.how for exit in exits if not self.store.check([rank_key(exit.rank)])}

    def is_dead(self, member: MemberDescription) -> bool:
        """Return whether ``member`` has ended; False if it runs on another machine."""
        return member.machine == self._me.machine and process_is_gone(member.process)

    def is_complete(self) -> bool:
        """Return whether all ranks have arrived and were notified."""
        return self.store.check([MET])

    def record(self) -> MeetingRecord | None:
        """Return the room's record, if it exists."""
        (raw,) = self.store.peek(["record"])
        return None if raw is None else decode(raw, MeetingRecord)

    def is_quiet(self) -> bool:
        """Return whether no event requires a member to act.

        One message, enough for most checks; it does not show which event came first.
        """
        number, processes, exits = self._root.peek([ROOM, self.key(self.neighbours.key), EXITS])
        return not (self._is_past(number) or exits or self.neighbours.gone_of(processes))

    # -- its end -------------------------------------------------------------------------------

    def has_ended(self) -> bool:
        """Return whether the next room is open."""
        return self._is_past(*self._root.peek([ROOM]))

    def _is_past(self, now: bytes | None) -> bool:
        return now is not None and decode_number(now) != self.number  # None: it was cleared by others

    def why_failed(self) -> str | None:
        """Return why the meeting in this room has failed; None if it has not."""
        if not self.has_ended():
            return None
        failure = self._failure()
        if failure is None:
            return None
        _heard.add(failure.ident)
        return failure.reason

    def why_failed_before(self) -> str | None:
        """Return why the previous room failed, if that concerns this process and it does not know yet.

        It does if the process was running already when the member arrived that made the meeting fail.
        Otherwise the process belongs to a new start.
        """
        if self.number == 0:
            return None
        failure = Room(self._root, self._me, self.number - 1)._failure()
        if failure is None or failure.ident in _heard:
            return None
        if failure.machine != self._me.machine or failure.at < started():
            return None
        _heard.add(failure.ident)
        return failure.reason

    def _failure(self) -> MeetingFailure | None:
        (raw,) = self._root.peek([self._ended_key])
        return None if raw in (None, _DONE) else decode(raw, MeetingFailure)

    def is_abandoned(self, members: Mapping[int, MemberDescription]) -> bool:
        """Return whether every member has left or is dead."""
        return bool(members) and all(each.left or self.is_dead(each) for each in members.values())

    def is_ending(self, members: Mapping[int, MemberDescription] | None = None) -> bool:
        """Return whether some members have left or are dead."""
        # In this order: the last member to leave opens the next room, and then deletes the count.
        if self._left() > 0 or self.has_ended():
            return True
        return any(self.is_dead(each) for each in (members or self.members()).values())

    def _left(self) -> int:
        (left,) = self.store.peek(["left"])
        return 0 if left is None else decode_number(left)

    def fail_if_doomed(self, gone: Sequence[Arrival] | None = None, advice: str = START_AGAIN) -> bool:
        """Make the room fail if a member died before all had arrived; return whether it did.

        The arguments are as of :meth:`dead` and :func:`died`.
        """
        # In this order: a room that is incomplete after the death was never complete.
        dead = self.dead(gone)
        if dead and not self.is_complete():
            self.fail(died(dead, advice), at=max(each.at for each in dead.values()))
            return True
        return False

    def fail(self, reason: str, at: float) -> None:
        """Notify the waiting members that the meeting has failed, and open the next room.

        ``at``: time of arrival of the member of this machine that made the meeting fail.
        """
        if self.has_ended():
            return
        failure = MeetingFailure(reason, self._me.machine, at, secrets.token_hex(8))
        # The reason first: a process that sees the room's end must find it.
        self._root.compare_set(self._ended_key, b"", msgspec.json.encode(failure))
        if self._open_next():
            self._forget_failure_before()

    def close(self) -> None:
        """Open the next room and clear this one, which all members have left."""
        if self._open_next():
            self._forget_failure_before()
            self._root.delete(f"ended/{self.number - 1}")
            self._root.compare_set(self._ended_key, b"", _DONE)
        self.clear()

    def _forget_failure_before(self) -> None:
        """Clear the previous room if it failed; its reason stays until this room is closed."""
        Room(self._root, self._me, self.number - 1).clear()
        self._root.delete(f"ended/{self.number - 2}")

    def _open_next(self) -> bool:
        """Open the next room; return whether it is the current one now."""
        following = self.number + 1
        record = self.record()
        if record is not None and record.fixed and not self.has_ended():
            room_of(self._root, following).set("record", msgspec.json.encode(record))
        here, there = str(self.number).encode(), str(following).encode()
        _, now = self._root.together([Add(ROOM, 0), CompareSet(ROOM, here, there)])
        return decode_number(now) == following

    def clear(self) -> None:
        """Delete the room's keys."""
        self.store.delete_prefix("")

    def watch(self, timeout: float) -> None:
        """Wait until the room has ended, for at most ``timeout`` seconds."""
        with contextlib.suppress(StoreTimeout):
            self._root.wait([self._ended_key], timeout)


def died(members: Mapping[int, MemberDescription], advice: str = START_AGAIN) -> str:
    """Return the reason of a meeting that failed because these members died; it ends with ``advice``."""
    named = ", ".join(f"rank {rank} ({each})" for rank, each in sorted(members.items()))
    return f"{named} died while the ranks were meeting; {advice}"


def never_came(ranks: Mapping[int, str]) -> str:
    """Return the reason of a meeting that failed because these ranks ended before they arrived."""
    named = "; ".join(f"rank {rank} ended ({how})" for rank, how in sorted(ranks.items()))
    return (
        f"{named} without meeting the others; every rank of a job must call init, as often as the others do"
    )
