"""One round of the rendezvous of a job: its keys, its members, and its end.

A round ends in one of two ways. When all members have left or are dead, its keys are deleted. When it can
never be complete, because a member died or could not connect, it has *failed*: the reason is kept for the
waiting members, and its keys are deleted when the next round ends. In both cases the next round begins at
once, so a failed attempt never obstructs a later one.

Every process appends itself to its machine's list before it claims a rank, so each process with a rank is in
a list. Only the processes of a machine read its list, because only they can inspect the listed processes; its
length does not grow with the number of machines.
"""

from __future__ import annotations

import contextlib
import hashlib
import secrets
from collections.abc import Mapping, Sequence

import msgspec

from ..common.process_identity import ProcessIdentity, process_start_time
from ..errors import StoreTimeout
from ..store import Store
from ..store.requests import Add, Append, CompareSet
from .records import (
    EXITS,
    MET,
    ROUND,
    Exit,
    LocalProcess,
    MeetingFailure,
    MeetingRecord,
    MemberDescription,
    decode,
    decode_member,
    decode_number,
    rank_key,
    round_keys,
)
from .venue import START_AGAIN


class LocalProcesses:
    """The list of the machine of process ``me`` in a round; ``key`` is the list's key in the round."""

    def __init__(self, keys: Store, me: MemberDescription) -> None:
        self._keys = keys
        self._me = me
        digest = hashlib.blake2b(me.machine.encode(), digest_size=8).hexdigest()
        self.key = f"machine/{digest}"
        self._known: list[LocalProcess] = []

    def append(self, rank: int | None) -> Append:
        """Return the call that adds this process, which is about to claim ``rank``."""
        mine = LocalProcess(self._me.process, self._me.token, rank)
        return Append(self.key, msgspec.json.encode(mine) + b"\n")

    def ended(self) -> list[LocalProcess]:
        """Read the list and return the processes that have ended.

        They need not be members: they may have withdrawn, or ended before they claimed a rank.
        """
        return self.ended_of(*self._keys.peek([self.key]))

    def ended_of(self, read: bytes | None) -> list[LocalProcess]:
        """Like :meth:`ended`, for the list that was just read (None: no process of this machine arrived)."""
        self._known = [decode(line, LocalProcess) for line in (read or b"").splitlines()]
        return self.ended_of_known()

    def ended_of_known(self) -> list[LocalProcess]:
        """Return the processes that have ended of the list as last read. Uses no store."""
        return [each for each in self._known if ProcessIdentity(self._me.machine, each.process).is_dead()]


#: value of the end key of a round that all members left
_ALL_LEFT = b"1"

#: identities of the failures reported in this process: a later attempt does not fail because of them again
_reported_failures: set[str] = set()


class Round:
    """A round, from the point of view of the process ``me``; ``root``: the job's keys."""

    @classmethod
    def current(cls, root: Store, me: MemberDescription) -> tuple[Round, list[LocalProcess], bytes | None]:
        """Return the current round, the processes of this machine that ended in it, and its record."""
        expected = 0  # usually it is the first round: then one message is enough
        while True:
            round_ = cls(root, me, expected)
            keys = [ROUND, round_.key(round_.processes.key), round_.key("record")]
            number, processes, record = root.peek(keys)
            expected = 0 if number is None else decode_number(number)
            if expected == round_.number:
                return round_, round_.processes.ended_of(processes), record

    def key(self, name: str) -> str:
        """Return a key of the round, relative to the job's keys."""
        return f"{self.number}/{name}"

    def __init__(self, root: Store, me: MemberDescription, number: int) -> None:
        self._root = root
        self._me = me
        self.number = number
        self._ended_key = f"ended/{number}"
        self.store: Store = round_keys(root, number)
        self.processes = LocalProcesses(self.store, me)

    # -- who is in it --------------------------------------------------------------------------

    def members(self) -> dict[int, MemberDescription]:
        """Return the present members of the round. Not called in a normal meeting."""
        keys = self.store.list_keys("rank/")
        return {
            decode_number(key.removeprefix("rank/")): decode_member(value)
            for key, value in zip(keys, self.store.peek(keys), strict=True)
            if value is not None  # else it withdrew in the meantime
        }

    def dead(self, ended: Sequence[LocalProcess] | None = None) -> dict[int, MemberDescription]:
        """Return the members that died on this machine; ``ended``: the processes that ended, if known."""
        tokens = {arrival.token for arrival in (self.processes.ended() if ended is None else ended)}
        if not tokens:
            return {}
        return {rank: each for rank, each in self.members().items() if each.token in tokens and not each.left}

    def ended_before_arrival(self) -> dict[int, str]:
        """Return the ranks whose processes ended before they arrived, and how, as reported by a launcher."""
        (read,) = self._root.peek([EXITS])
        lines = (read or b"").splitlines()  # empty without a launcher that reports exits
        # In this order: a rank that ended after its arrival has its key.
        exits = (decode(line, Exit) for line in lines)
        return {exit.rank: exit.how for exit in exits if not self.store.check([rank_key(exit.rank)])}

    def is_complete(self) -> bool:
        """Return whether all ranks have arrived and were notified."""
        return self.store.check([MET])

    def record(self) -> MeetingRecord | None:
        """Return the round's record, if it exists."""
        (raw,) = self.store.peek(["record"])
        return None if raw is None else decode(raw, MeetingRecord)

    def has_no_events(self) -> bool:
        """Return whether no event requires a member to act.

        One message, enough for most checks; it does not show which event came first.
        """
        number, processes, exits = self._root.peek([ROUND, self.key(self.processes.key), EXITS])
        return not (self._is_past(number) or exits or self.processes.ended_of(processes))

    # -- its end -------------------------------------------------------------------------------

    def has_ended(self) -> bool:
        """Return whether the next round is open."""
        return self._is_past(*self._root.peek([ROUND]))

    def _is_past(self, now: bytes | None) -> bool:
        return now is not None and decode_number(now) != self.number  # None: it was cleared by others

    def failure_reason(self) -> str | None:
        """Return why the meeting in this round has failed; None if it has not."""
        if not self.has_ended():
            return None
        failure = self._failure()
        if failure is None:
            return None
        _reported_failures.add(failure.ident)
        return failure.reason

    def previous_failure_reason(self) -> str | None:
        """Return why the previous round failed, if that concerns this process and it does not know yet.

        It does if the process was running already when the member arrived that made the meeting fail.
        Otherwise the process belongs to a new start.
        """
        if self.number == 0:
            return None
        failure = Round(self._root, self._me, self.number - 1)._failure()
        if failure is None or failure.ident in _reported_failures:
            return None
        if failure.machine != self._me.machine or failure.at < process_start_time():
            return None
        _reported_failures.add(failure.ident)
        return failure.reason

    def _failure(self) -> MeetingFailure | None:
        (raw,) = self._root.peek([self._ended_key])
        return None if raw in (None, _ALL_LEFT) else decode(raw, MeetingFailure)

    def all_left_or_dead(self, members: Mapping[int, MemberDescription]) -> bool:
        """Return whether every member has left or is dead."""
        return bool(members) and all(each.left or each.is_dead() for each in members.values())

    def is_ending(self, members: Mapping[int, MemberDescription] | None = None) -> bool:
        """Return whether some members have left or are dead."""
        # In this order: the last member to leave opens the next round, and then deletes the count.
        if self._left() > 0 or self.has_ended():
            return True
        return any(each.is_dead() for each in (members or self.members()).values())

    def _left(self) -> int:
        (left,) = self.store.peek(["left"])
        return 0 if left is None else decode_number(left)

    def fail_if_member_died(
        self, ended: Sequence[LocalProcess] | None = None, advice: str = START_AGAIN
    ) -> bool:
        """Make the round fail if a member died before all had arrived; return whether it did.

        The arguments are as of :meth:`dead` and :func:`death_reason`.
        """
        # In this order: a round that is incomplete after the death was never complete.
        dead = self.dead(ended)
        if dead and not self.is_complete():
            self.fail(death_reason(dead, advice), at=max(each.at for each in dead.values()))
            return True
        return False

    def fail(self, reason: str, at: float) -> None:
        """Notify the waiting members that the meeting has failed, and open the next round.

        ``at``: time of arrival of the member of this machine that made the meeting fail.
        """
        if self.has_ended():
            return
        failure = MeetingFailure(reason, self._me.machine, at, secrets.token_hex(8))
        # The reason first: a process that sees the round's end must find it.
        self._root.compare_set(self._ended_key, b"", msgspec.json.encode(failure))
        if self._open_next():
            self._forget_failure_before()

    def close(self) -> None:
        """Open the next round and clear this one, which all members have left."""
        if self._open_next():
            self._forget_failure_before()
            self._root.delete(f"ended/{self.number - 1}")
            self._root.compare_set(self._ended_key, b"", _ALL_LEFT)
        self.clear()

    def _forget_failure_before(self) -> None:
        """Clear the previous round if it failed; its reason stays until this round is closed."""
        Round(self._root, self._me, self.number - 1).clear()
        self._root.delete(f"ended/{self.number - 2}")

    def _open_next(self) -> bool:
        """Open the next round; return whether it is the current one now."""
        following = self.number + 1
        record = self.record()
        if record is not None and record.fixed and not self.has_ended():
            round_keys(self._root, following).set("record", msgspec.json.encode(record))
        here, there = str(self.number).encode(), str(following).encode()
        _, now = self._root.together([Add(ROUND, 0), CompareSet(ROUND, here, there)])
        return decode_number(now) == following

    def clear(self) -> None:
        """Delete the round's keys."""
        self.store.delete_prefix("")

    def watch(self, timeout: float) -> None:
        """Wait until the round has ended, for at most ``timeout`` seconds."""
        with contextlib.suppress(StoreTimeout):
            self._root.wait([self._ended_key], timeout)


def death_reason(members: Mapping[int, MemberDescription], advice: str = START_AGAIN) -> str:
    """Return the reason of a meeting that failed because these members died; it ends with ``advice``."""
    named = ", ".join(f"rank {rank} ({each})" for rank, each in sorted(members.items()))
    return f"{named} died while the ranks were meeting; {advice}"


def early_exit_reason(ranks: Mapping[int, str]) -> str:
    """Return the reason of a meeting that failed because these ranks ended before they arrived."""
    named = "; ".join(f"rank {rank} ended ({how})" for rank, how in sorted(ranks.items()))
    return (
        f"{named} without meeting the others; every rank of a job must call init, as often as the others do"
    )
