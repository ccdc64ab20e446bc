"""Rebuilding: the ranks that go on make a new group, over the connections that they have.

An agreement decides who they are, and each rank computes the same plan from it: nothing else is exchanged.
Another one, in the new group, shows whether that is whole; if ranks have died meanwhile, it is rebuilt in its
turn.  Where that fails, by a timeout say, the next call goes on with the newest group: others may have it.
"""

from __future__ import annotations

import abc
import contextlib
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

from .. import config, failure_report
from ..backend.agreements import Op
from ..backend.base import GroupSpec, ident_of
from ..common.keywords import explained
from ..common.wording import ranks_named
from ..errors import OperationTimeout, ProtocolError, TooFewRanks
from ..net import Deadline
from ..store import PrefixStore, Store
from .agreement import Agreement, Agreements, OpsDiffer
from .submission import called

R = TypeVar("R", bound="Rebuilding")

#: of a vote: the last collective that has completed, the newest epoch, the least size, whether the rank
#: leaves, whether its program has the group already, how many it names
_HEAD = struct.Struct("<qIIBBH")
_RANK = struct.Struct("<I")
_SHORTEST = 0.001  # seconds for what is left of a rebuild


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """How a group came of the one before it.

    Attributes:
        previous: the rank in the old group of each rank of the new one, in the order of the new ones.
        lost: the ranks of the old group that were lost, ascending.
        left: those that left, or were named in ``without=``.
        notes: what the ranks that took part gave as ``note=``, by their ranks in the old group.
        completed: the lowest and the highest over the ranks of a number: that of the last collective that
            had completed in the old group, together with all before it; -1: none had.
    """

    previous: tuple[int, ...]
    lost: tuple[int, ...]
    left: tuple[int, ...]
    notes: dict[int, bytes]
    completed: tuple[int, int]

    def after(self, earlier: Rebuilt | None) -> Rebuilt:
        """This one as it is seen from the group before ``earlier``, whose call went on with this."""
        if earlier is None:
            return self
        old = earlier.previous
        return replace(
            earlier,
            previous=tuple(old[rank] for rank in self.previous),
            lost=tuple(sorted({*earlier.lost, *(old[rank] for rank in self.lost)})),
            left=tuple(sorted({*earlier.left, *(old[rank] for rank in self.left)})),
        )


@dataclass(slots=True)
class _Lineage:
    """What all groups have in common that came of one by rebuilds.

    Attributes:
        spec, store: of the first of them.
        is_world: whether they are groups of all ranks.
        epoch: the newest that this rank knows of.
        newest: the last of them that the program has; None: the first.
    """

    spec: GroupSpec
    store: Store
    is_world: bool
    epoch: int = 0
    newest: Any = None


class _Vote(NamedTuple):
    completed: int
    epoch: int
    min_size: int
    leaves: bool
    is_in_use: bool
    without: frozenset[int]
    note: bytes

    def encode(self) -> bytes:
        named = b"".join(map(_RANK.pack, sorted(self.without)))
        flags = self.leaves, self.is_in_use
        head = _HEAD.pack(self.completed, self.epoch, self.min_size, *flags, len(self.without))
        return head + named + self.note


def _decoded(vote: bytes, rank: int, size: int) -> _Vote:
    """The vote of ``rank`` in a group of ``size``."""
    flaw = f"rank {rank} sent a vote for a rebuild that is none"
    if len(vote) < _HEAD.size:
        raise ProtocolError(flaw, [rank])
    completed, epoch, min_size, leaves, is_in_use, count = _HEAD.unpack_from(vote)
    end = _HEAD.size + count * _RANK.size
    without = frozenset(each for (each,) in _RANK.iter_unpack(vote[_HEAD.size : end]))
    if (
        len(vote) < end
        or max(leaves, is_in_use) > 1
        or completed < -1
        or any(each >= size for each in without)
    ):
        raise ProtocolError(flaw, [rank])
    return _Vote(completed, epoch, min_size, bool(leaves), bool(is_in_use), without, vote[end:])


def new_ranks(stays: Sequence[int]) -> tuple[int, ...]:
    """The old rank of each new one, of those that stay, which are ascending.

    Who can keeps its rank, so that shares of data and of optimiser state move as little as possible; the
    others fill the holes.
    """
    size = len(stays)
    movers = iter(rank for rank in stays if rank >= size)
    keepers = set(stays)
    return tuple(rank if rank in keepers else next(movers) for rank in range(size))


class Rebuilding(Agreements):
    """The operation ``rebuild`` of a group.

    Attributes:
        epoch: greater than that of the group before it; 0: it was not rebuilt.
        rebuilt: how it came of the one before it; None: it was not rebuilt.
    """

    epoch: int = 0
    rebuilt: Rebuilt | None = None
    _line: _Lineage | None = None
    #: what it would have become but for an error
    _pending: Any = None

    @explained(called)
    def rebuild(
        self: R,
        *,
        min_size: int = 1,
        without: Iterable[int] = (),
        leave: bool = False,
        note: bytes = b"",
        timeout: float | None = None,
    ) -> R | None:
        """Make a group of the ranks that live, and close this one.

        Every rank that lives calls it, whatever became of the group; it waits for the others.  The new group
        uses the connections that there are, so it takes milliseconds.  Who can keeps its rank; the highest
        ranks fill the places of those that are gone.  Nothing that was sent in the old group arrives in the
        new one, and what is still under way in it fails with GroupClosed.  Groups made from this one stay as
        they are.  Processes of lost ranks on the same host, should they live, are ended by SIGKILL: they
        could write into memory of the others.

        Args:
            min_size: with fewer ranks nothing is made; where ranks differ, the largest counts.
            without: ranks that do not go on, though they live, because they are slow, say.  They call it too.
            leave: whether this rank does not go on.
            note: for all others to read, in ``rebuilt.notes`` of the new group; up to 4,000 bytes, less in
                groups of more than 1,000 ranks.
            timeout: in seconds; None: that of the group plus twice ``SHOAL_VOTE_TIMEOUT``.

        Returns:
            The new group, with a greater ``epoch``, a store of its own, and the timeout of this one; None:
            this rank has left.

        Raises:
            TooFewRanks: fewer than ``min_size`` ranks would go on.
            Evicted: the others go on without this rank.
            QuorumLost: too few ranks can be reached to decide.
            OperationTimeout: a rank that can be reached did not answer in time.
            GroupClosed: this rank has closed the group.
            UnsupportedOperation: the backend of the group has no agreements.

        After an error this group is as it was, and can be rebuilt again by the same ranks.  What the result
        is for is from ULFM's ``MPI_Comm_shrink``.
        """
        call = self._call("rebuild")
        default = self._timeout + 2 * config.VOTE_TIMEOUT.get()  # there are two agreements at least
        deadline = Deadline(default if timeout is None else self._checked_timeout(timeout))
        if not isinstance(min_size, int) or not 1 <= min_size <= self._size:
            call.refuse(f"min_size={min_size!r}: expected 1 to {self._size}, the size of the group")
        if not isinstance(note, bytes):
            call.refuse(f"note must be bytes, got {type(note).__name__}")
        named = frozenset(call.root(rank, "every element of without") for rank in without)
        asks = _Vote(-1, 0, min_size, bool(leave), True, named, note)
        room = self._vote_limit() - len(asks.encode()) + len(note)
        if len(note) > room:
            call.refuse(f"a note of {len(note)} bytes: there is room for {max(room, 0)}")

        def left() -> float:
            return max(deadline.remaining(), _SHORTEST)

        group: R = self
        seen = None
        if self._pending is not None:
            group, seen = self._pending, self._pending.rebuilt
            old = enumerate(seen.previous)
            named = frozenset(rank for rank, before in old if before in named)
            asks = asks._replace(is_in_use=False, without=named)
        while True:
            plan, is_whole = group._agree_on_plan(asks, left())
            if is_whole:
                self._become(group)
            if is_whole or group._rank not in plan.previous:
                self.close(left())
                return group if is_whole else None
            if living := group._channel.fence(plan.lost, left()):
                raise OperationTimeout(
                    f"rebuild on rank {group._rank} of group {group._spec.name!r}: SIGKILL did not end "
                    f"{ranks_named(living)}, without which the group goes on; it may still write to it",
                    living,
                )
            older, group = group, group._succeed(plan)
            group.rebuilt = seen = plan.after(seen)
            self._pending = group
            if older is not self:
                older.close(_SHORTEST)
            asks = asks._replace(leaves=False, is_in_use=False, without=frozenset())

    def _agree_on_plan(self, asks: _Vote, timeout: float) -> tuple[Rebuilt, bool]:
        """What all that go on compute from one decision, and whether they can take this group as it is."""
        line = self._line_of_it()
        vote = asks._replace(completed=self._channel.last_completed(), epoch=line.epoch)
        agreed = self._agree_with_all(vote.encode(), Deadline(timeout))
        votes = {
            rank: _decoded(each, rank, self._size)
            for rank, each in zip(agreed.ranks, agreed.value, strict=True)
        }
        named = frozenset[int]().union(*(each.without for each in votes.values()))
        left = tuple(rank for rank in agreed.ranks if votes[rank].leaves or rank in named)
        stays = [rank for rank in agreed.ranks if rank not in left]
        is_whole = len(stays) == self._size and not any(each.is_in_use for each in votes.values())
        line.epoch = max(each.epoch for each in votes.values()) + (not is_whole)
        least = max(each.min_size for each in votes.values())
        if len(stays) < least:
            gone = [
                f"{ranks_named(ranks)} {has if len(ranks) == 1 else have}"
                for ranks, has, have in ((agreed.lost, "is lost", "are lost"), (left, "leaves", "leave"))
                if ranks
            ]
            raise TooFewRanks(
                f"rebuild on rank {self._rank} of group {self._spec.name!r}: of {self._size} ranks "
                f"{len(stays)} would go on, and min_size is {least}: {' and '.join(gone)}"
            )
        completed = [each.completed for each in votes.values()]
        plan = Rebuilt(
            new_ranks(stays), agreed.lost, left, {rank: each.note for rank, each in votes.items()},
            (min(completed), max(completed)),
        )  # fmt: skip
        return plan, is_whole

    def _agree_with_all(self, vote: bytes, deadline: Deadline) -> Agreement[tuple[bytes, ...]]:
        """The votes of all that go on.

        A rank that has not heard of a loss may have called ``agree``, or asked whether its session grows.  It
        is told of this call by RebuildCalled, and its next call meets the next one of this rank.
        """
        while True:
            with contextlib.suppress(OpsDiffer):
                return self._agree(Op.REBUILD, vote, max(deadline.remaining(), _SHORTEST)).wait()

    def _line_of_it(self) -> _Lineage:
        if self._line is None:
            self._line = _Lineage(self._spec, self._store, self._is_first)
        return self._line

    def _succeed(self: R, plan: Rebuilt) -> R:
        """The group of ``plan``."""
        line = self._line_of_it()
        ranks = tuple(self._spec.ranks[rank] for rank in plan.previous)
        label = f"{line.spec.ident:x}@{line.epoch}:{','.join(map(str, ranks))}"
        spec = replace(
            self._spec, name=f"{line.spec.name}@{line.epoch}", ident=ident_of(label), ranks=ranks,
            rank=plan.previous.index(self._rank),
            world_ranks=tuple(range(len(ranks)))
            if line.is_world
            else self._spec.world_ranks and tuple(self._spec.world_ranks[rank] for rank in plan.previous),
        )  # fmt: skip
        successor = self._made_again(spec, PrefixStore(f"@{line.epoch}/", line.store))
        successor.epoch, successor._line = line.epoch, line
        return successor

    @abc.abstractmethod
    def _made_again(self: R, spec: GroupSpec, store: Store) -> R:
        """A group over the same connections."""

    def _become(self: R, successor: R) -> None:
        """``successor`` takes the place of this group, which is closed next."""
        self._line_of_it().newest, self._pending = successor, None
        failure_report.rebuilt()

    def _goes_on_from(self, epoch: int) -> None:
        """This group, which is new, takes the place of one of ``epoch``, of which it was not rebuilt."""
        self.epoch = epoch + 1
        self._line_of_it().epoch = self.epoch

    def _close_pending(self, timeout: float) -> None:
        if self._pending is not None:
            self._pending.close(timeout)

    @abc.abstractmethod
    def close(self, timeout: float | None = None) -> None:
        """Release everything."""
