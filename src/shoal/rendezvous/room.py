"""One room of a meeting: its keys, who is in it, and how it ends.

A room ends in one of two ways.  When all members left it (or are all dead), its keys are cleared.  When a
meeting in it can never succeed, because a member died or could not connect, it has *failed*: the reason is
kept for those who wait in it, and its keys are cleared when the room after it ends.  Either way the next
room is open at once, so nothing that an earlier try left behind stands in the way of a later one.
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

#: the reason of a room that all members left
_DONE = b"1"

#: the failures that were told in this process: whoever tries again after one waits for the others
_heard: set[str] = set()


class Room:
    """A room as one process sees it.

    Args:
        root: the job's keys.
        me: the process.
        number: of the room.
    """

    @classmethod
    def current(cls, root: Store, me: MemberDescription) -> tuple[Room, list[Arrival], bytes | None]:
        """The room in which ranks meet now, who of this machine came there and has ended, and its record."""
        expected = 0  # in most cases it is the first one: then there is one message
        while True:
            room = cls(root, me, expected)
            keys = [ROOM, room.key(room.neighbours.key), room.key("record")]
            number, processes, record = root.peek(keys)
            expected = 0 if number is None else decode_number(number)
            if expected == room.number:
                return room, room.neighbours.gone_of(processes), record

    def key(self, name: str) -> str:
        """A key of the room, among the job's."""
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
        """The members that are in the room now.  Not part of the way that a rank goes when all is well."""
        keys = self.store.list_keys("rank/")
        return {
            decode_number(key.removeprefix("rank/")): decode_member(value)
            for key, value in zip(keys, self.store.peek(keys), strict=True)
            if value is not None  # else it withdrew in the meantime
        }

    def dead(self, gone: Sequence[Arrival] | None = None) -> dict[int, MemberDescription]:
        """The members that died on this machine; ``gone``: who has ended there, if that is known."""
        tokens = {arrival.token for arrival in (self.neighbours.gone() if gone is None else gone)}
        if not tokens:
            return {}
        return {rank: each for rank, each in self.members().items() if each.token in tokens and not each.left}

    def ended_outside(self) -> dict[int, str]:
        """The ranks that are not here and will never come, as their process has ended, and how it did."""
        (read,) = self._root.peek([EXITS])
        lines = (read or b"").splitlines()  # without them no process has ended, or no launcher says so
        # In this order: who ended after it came is here.
        exits = (decode(line, Exit) for line in lines)
        return {exit.rank: exit.how for exit in exits if not self.store.check([rank_key(exit.rank)])}

    def is_dead(self, member: MemberDescription) -> bool:
        """Whether ``member`` has ended; False when it runs on another machine."""
        return member.machine == self._me.machine and process_is_gone(member.process)

    def is_complete(self) -> bool:
        """Whether all ranks have come, and were told so."""
        return self.store.check([MET])

    def record(self) -> MeetingRecord | None:
        """The record that is there now."""
        (raw,) = self.store.peek(["record"])
        return None if raw is None else decode(raw, MeetingRecord)

    def is_quiet(self) -> bool:
        """Whether nothing has happened that a member would have to act on.

        One message, and all that most looks need: it does not tell what has happened first.
        """
        number, processes, exits = self._root.peek([ROOM, self.key(self.neighbours.key), EXITS])
        return not (self._is_past(number) or exits or self.neighbours.gone_of(processes))

    # -- its end -------------------------------------------------------------------------------

    def has_ended(self) -> bool:
        """Whether the next room is open."""
        return self._is_past(*self._root.peek([ROOM]))

    def _is_past(self, now: bytes | None) -> bool:
        """Whether the room that is open ``now`` is another one."""
        return now is not None and decode_number(now) != self.number  # None: it was cleared by others

    def why_failed(self) -> str | None:
        """The reason for which the meeting in this room has failed, None if it has not."""
        if not self.has_ended():
            return None
        failure = self._failure()
        if failure is None:
            return None
        _heard.add(failure.ident)
        return failure.reason

    def why_failed_before(self) -> str | None:
        """The reason for which the room before failed, if this process was to meet there and has not heard.

        It was if it ran already when the member came that made the meeting fail.  Else it is a new start.
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
        """Whether every member left or is dead."""
        return bool(members) and all(each.left or self.is_dead(each) for each in members.values())

    def is_ending(self, members: Mapping[int, MemberDescription] | None = None) -> bool:
        """Whether some members left it already, or are dead."""
        # In this order: the last to leave opens the next room, and then deletes the count.
        if self._left() > 0 or self.has_ended():
            return True
        return any(self.is_dead(each) for each in (members or self.members()).values())

    def _left(self) -> int:
        """How many members closed their group."""
        (left,) = self.store.peek(["left"])
        return 0 if left is None else decode_number(left)

    def fail_if_doomed(self, gone: Sequence[Arrival] | None = None, advice: str = START_AGAIN) -> bool:
        """Fail the room if a member died before all had come; whether the room has ended.

        Args:
            gone: as of :meth:`dead`.
            advice: as of :func:`died`.
        """
        # In this order: a room that is not complete after the death never was.
        dead = self.dead(gone)
        if dead and not self.is_complete():
            self.fail(died(dead, advice), at=max(each.at for each in dead.values()))
            return True
        return False

    def fail(self, reason: str, at: float) -> None:
        """Tell those who wait here that they wait in vain, and open the next room.

        Args:
            reason: in words.
            at: when the member of this machine came that made the meeting fail.
        """
        if self.has_ended():
            return
        failure = MeetingFailure(reason, self._me.machine, at, secrets.token_hex(8))
        # The reason first: whoever sees that the room has ended finds it.
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
        """Clear what the room before left if it failed; its reason stays until this one is closed."""
        Room(self._root, self._me, self.number - 1).clear()
        self._root.delete(f"ended/{self.number - 2}")

    def _open_next(self) -> bool:
        """Whether the room after this one is the current one now."""
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
        """Wait until the room has ended, but no longer than ``timeout``."""
        with contextlib.suppress(StoreTimeout):
            self._root.wait([self._ended_key], timeout)


def died(members: Mapping[int, MemberDescription], advice: str = START_AGAIN) -> str:
    """The reason of a meeting that failed because these members died.

    Args:
        advice: what a user does then, as the end of a sentence.
    """
    named = ", ".join(f"rank {rank} ({each})" for rank, each in sorted(members.items()))
    return f"{named} died while the ranks were meeting; {advice}"


def never_came(ranks: Mapping[int, str]) -> str:
    """The reason of a meeting that failed because the processes of these ranks ended elsewhere."""
    named = "; ".join(f"rank {rank} ended ({how})" for rank, how in sorted(ranks.items()))
    return (
        f"{named} without meeting the others; every rank of a job must call init, as often as the others do"
    )
