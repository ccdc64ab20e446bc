"""Rebuilding: the surviving ranks make a new group over their existing connections.

An agreement decides which ranks survive, and each rank computes the same plan from it.  A second agreement in
the new group checks that it is complete; if ranks have failed meanwhile, it is rebuilt too.  If that raises,
for example after a timeout, the next call continues with the newest group, which other ranks may have.
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
from ..common.arguments import explain_unknown_keywords
from ..common.formatting import ranks_named
from ..errors import OperationTimeout, ProtocolError, TooFewRanks
from ..net import Deadline
from ..store import PrefixStore, Store
from .agreement import Agreement, Agreements, OpsDiffer
from .submission import called

R = TypeVar("R", bound="Rebuilding")

#: the fields of `_Vote` (``is_in_use``: the program already has the group), with a count for ``without``
_HEAD = struct.Struct("<qIIBBH")
_RANK = struct.Struct("<I")
_SHORTEST = 0.001  # minimum timeout in seconds for the rest of a rebuild


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """The relation of a rebuilt group to the old group.

    Attributes:
        previous: the old rank of each new rank.
        lost: the ranks of the old group that were lost, ascending.
        left: the old ranks that left, or were named in ``without=``.
        notes: the ``note=`` of each participating rank, by old rank.
        completed: minimum and maximum over the ranks of the number of the last collective up to which all had
            completed in the old group; -1: none had.
    """

    previous: tuple[int, ...]
    lost: tuple[int, ...]
    left: tuple[int, ...]
    notes: dict[int, bytes]
    completed: tuple[int, int]

    def after(self, earlier: Rebuilt | None) -> Rebuilt:
        """Compose this rebuild with ``earlier``, which it followed in the same call."""
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
    """The common state of a group and all groups rebuilt from it.

    Attributes:
        spec, store: those of the first group.
        is_world: whether the first group has all ranks.
        epoch: the newest epoch that this rank knows.
        newest: the last group that ``rebuild`` has returned; None: the first group.
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
    """Decode the vote of ``rank`` in a group of ``size``."""
    flaw = f"rank {rank} sent an invalid vote for a rebuild"
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
    """Return the old rank of each new rank, given the surviving ranks, ascending.

    Ranks below the new size keep their numbers, so that as little data and optimiser state as possible moves;
    the other ranks fill the gaps.
    """
    size = len(stays)
    movers = iter(rank for rank in stays if rank >= size)
    keepers = set(stays)
    return tuple(rank if rank in keepers else next(movers) for rank in range(size))


class Rebuilding(Agreements):
    """The operation ``rebuild`` of a group.

    Attributes:
        epoch: greater than that of the old group; 0: it was not rebuilt.
        rebuilt: its relation to the old group; None: it was not rebuilt.
    """

    epoch: int = 0
    rebuilt: Rebuilt | None = None
    _line: _Lineage | None = None
    #: the new group of a rebuild that failed before it was complete
    _pending: Any = None

    @explain_unknown_keywords(called)
    def rebuild(
        self: R,
        *,
        min_size: int = 1,
        without: Iterable[int] = (),
        leave: bool = False,
        note: bytes = b"",
        timeout: float | None = None,
    ) -> R | None:
        """Make a group of the surviving ranks, and close this one.

        Every surviving rank calls it, in any state of the group; it waits for the others.  The new group uses
        the existing connections, so this takes milliseconds.  Ranks below the new size keep their numbers;
        the highest ranks replace lost ones.  Messages of the old group never arrive in the new one, and its
        pending operations fail with GroupClosed.  Subgroups of this group are not changed.  Processes of lost
        ranks that still run on the same host are ended by SIGKILL, as they could write into shared memory.

        Args:
            min_size: minimum size of the new group; if ranks pass different values, the largest counts.
            without: ranks to exclude, for example because they are slow.  They call ``rebuild`` too.
            leave: whether this rank leaves.
            note: bytes for all other ranks, in ``rebuilt.notes`` of the new group; at most 4,000, fewer in
                groups of more than 1,000 ranks.
            timeout: in seconds; None: that of the group plus twice ``SHOAL_VOTE_TIMEOUT``.

        Returns:
            The new group, with a greater ``epoch``, a new store, and the timeout of this one; None: this rank
            has left.

        Raises:
            TooFewRanks: fewer than ``min_size`` ranks would remain.
            Evicted: the other ranks continue without this rank.
            QuorumLost: too few ranks can be reached to decide.
            OperationTimeout: a rank that can be reached did not answer in time.
            GroupClosed: this rank has closed the group.
            UnsupportedOperation: the backend of the group has no agreements.

        After an error this group is unchanged, and the same ranks can call it again.  Compare ULFM's
        ``MPI_Comm_shrink``.
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
                    f"{ranks_named(living)}, which the group has lost; it may still write to shared memory",
                    living,
                )
            older, group = group, group._succeed(plan)
            group.rebuilt = seen = plan.after(seen)
            self._pending = group
            if older is not self:
                older.close(_SHORTEST)
            asks = asks._replace(leaves=False, is_in_use=False, without=frozenset())

    def _agree_on_plan(self, asks: _Vote, timeout: float) -> tuple[Rebuilt, bool]:
        """Return the plan that all surviving ranks compute, and whether this group is complete and unused."""
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
                f"rebuild on rank {self._rank} of group {self._spec.name!r}: {len(stays)} of {self._size} "
                f"ranks would remain, and min_size is {least}: {' and '.join(gone)}"
            )
        completed = [each.completed for each in votes.values()]
        plan = Rebuilt(
            new_ranks(stays), agreed.lost, left, {rank: each.note for rank, each in votes.items()},
            (min(completed), max(completed)),
        )  # fmt: skip
        return plan, is_whole

    def _agree_with_all(self, vote: bytes, deadline: Deadline) -> Agreement[tuple[bytes, ...]]:
        """Return the votes of all surviving ranks.

        A rank that has not detected the loss may have called ``agree``, also for the growth of its session.
        That call raises RebuildCalled, and the rank's next call matches the next one of this rank.
        """
        while True:
            with contextlib.suppress(OpsDiffer):
                return self._agree(Op.REBUILD, vote, max(deadline.remaining(), _SHORTEST)).wait()

    def _line_of_it(self) -> _Lineage:
        if self._line is None:
            self._line = _Lineage(self._spec, self._store, self._is_first)
        return self._line

    def _succeed(self: R, plan: Rebuilt) -> R:
        """Make the group of ``plan``."""
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
        """Make a group over the same connections."""

    def _become(self: R, successor: R) -> None:
        """Replace this group, which is closed next, by ``successor``."""
        self._line_of_it().newest, self._pending = successor, None
        failure_report.rebuilt()

    def _goes_on_from(self, epoch: int) -> None:
        """Set the epoch of this new group, which replaces one of ``epoch`` without a rebuild."""
        self.epoch = epoch + 1
        self._line_of_it().epoch = self.epoch

    def _close_pending(self, timeout: float) -> None:
        if self._pending is not None:
            self._pending.close(timeout)

    @abc.abstractmethod
    def close(self, timeout: float | None = None) -> None:
        """Release everything."""
