"""Rebuilding: the surviving ranks make a new group over their existing connections.

An agreement decides which ranks survive, and each rank computes the same plan from it.  A second agreement in
the new group checks that it is complete; if ranks have failed meanwhile, it is rebuilt too.  If that raises,
for example after a timeout, the next call continues with the newest group, which other ranks may have.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple, Protocol

from .. import config, failure_report
from ..backend.agreement import AgreementOp
from ..backend.base import GroupSpec
from ..backend.identity import group_ident
from ..common.formatting import ranks_named
from ..errors import GroupError, OperationTimeout, ProtocolError, TooFewRanks
from ..net import Deadline
from ..store import PrefixStore, Store
from .agreement import Agreement, AgreementOpMismatch

if TYPE_CHECKING:
    from .process_group import ProcessGroup

#: the fields of `_Vote` (``is_in_use``: the program already has the group), with a count for ``without``
_HEAD = struct.Struct("<qIIBBH")
_RANK = struct.Struct("<I")
_MIN_TIMEOUT_S = 0.001  # minimum timeout in seconds for the rest of a rebuild


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
class RebuildHistory:
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
    newest: ProcessGroup | None = None


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


def new_ranks(survivors: Sequence[int]) -> tuple[int, ...]:
    """Return the old rank of each new rank, given the surviving ranks, ascending.

    Ranks below the new size keep their numbers, so that as little data and optimiser state as possible moves;
    the other ranks fill the gaps.
    """
    size = len(survivors)
    movers = iter(rank for rank in survivors if rank >= size)
    keepers = set(survivors)
    return tuple(rank if rank in keepers else next(movers) for rank in range(size))


def rebuild(
    group: ProcessGroup,
    min_size: int,
    without: Iterable[int],
    leave: bool,
    note: bytes,
    fence: bool,
    timeout: float | None,
) -> ProcessGroup | None:
    """See :meth:`shoal.ProcessGroup.rebuild`."""
    call = group._call("rebuild")
    default = group.timeout + 2 * config.VOTE_TIMEOUT.get()  # there are two agreements at least
    deadline = Deadline(default if timeout is None else group._submitter.checked_timeout(timeout))
    if not isinstance(min_size, int) or not 1 <= min_size <= group.size:
        call.refuse(f"min_size={min_size!r}: expected 1 to {group.size}, the size of the group")
    if not isinstance(note, bytes):
        call.refuse(f"note must be bytes, got {type(note).__name__}")
    excluded = frozenset(call.root(rank, "every element of without") for rank in without)
    own_vote = _Vote(-1, 0, min_size, bool(leave), True, excluded, note)
    room = group._agreements.vote_limit() - len(own_vote.encode()) + len(note)
    if len(note) > room:
        call.refuse(f"a note of {len(note)} bytes: there is room for {max(room, 0)}")

    def remaining() -> float:
        return max(deadline.remaining(), _MIN_TIMEOUT_S)

    current = group
    seen = None
    if group._pending is not None:
        current, seen = group._pending, group._pending.rebuilt
        assert seen is not None
        excluded = frozenset(rank for rank, before in enumerate(seen.previous) if before in excluded)
        own_vote = own_vote._replace(is_in_use=False, without=excluded)
    while True:
        plan, is_whole = _agree_on_plan(current, own_vote, remaining())
        if is_whole:
            replace_by(group, current)
        if is_whole or current.rank not in plan.previous:
            group.close(remaining())
            return current if is_whole else None
        if fence and (still_running := current._channel.fence(plan.lost, remaining())):
            raise OperationTimeout(
                f"rebuild on rank {current.rank} of group {current.name!r}: SIGKILL did not end "
                f"{ranks_named(still_running)}, which the group has lost; it may still write to "
                "shared memory",
                still_running,
            )
        older, current = current, make_successor(current, plan)
        current.rebuilt = seen = plan.after(seen)
        group._pending = current
        if older is not group:
            older.close(_MIN_TIMEOUT_S)
        own_vote = own_vote._replace(leaves=False, is_in_use=False, without=frozenset())


def _agree_on_plan(group: ProcessGroup, own_vote: _Vote, timeout: float) -> tuple[Rebuilt, bool]:
    """Return the plan that all surviving ranks compute, and whether this group is complete and unused."""
    history = group._history
    vote = own_vote._replace(completed=group._channel.last_completed(), epoch=history.epoch)
    agreed = _agree_with_all(group, vote.encode(), Deadline(timeout))
    votes = {
        rank: _decoded(each, rank, group.size) for rank, each in zip(agreed.ranks, agreed.value, strict=True)
    }
    excluded = frozenset[int]().union(*(each.without for each in votes.values()))
    left = tuple(rank for rank in agreed.ranks if votes[rank].leaves or rank in excluded)
    survivors = [rank for rank in agreed.ranks if rank not in left]
    is_whole = len(survivors) == group.size and not any(each.is_in_use for each in votes.values())
    history.epoch = max(each.epoch for each in votes.values()) + (not is_whole)
    min_size = max(each.min_size for each in votes.values())
    if len(survivors) < min_size:
        losses = [
            f"{ranks_named(ranks)} {has if len(ranks) == 1 else have}"
            for ranks, has, have in ((agreed.lost, "is lost", "are lost"), (left, "leaves", "leave"))
            if ranks
        ]
        raise TooFewRanks(
            f"rebuild on rank {group.rank} of group {group.name!r}: {len(survivors)} of {group.size} "
            f"ranks would remain, and min_size is {min_size}: {' and '.join(losses)}"
        )
    completed = [each.completed for each in votes.values()]
    plan = Rebuilt(
        new_ranks(survivors), agreed.lost, left, {rank: each.note for rank, each in votes.items()},
        (min(completed), max(completed)),
    )  # fmt: skip
    return plan, is_whole


def _agree_with_all(group: ProcessGroup, vote: bytes, deadline: Deadline) -> Agreement[tuple[bytes, ...]]:
    """Return the votes of all surviving ranks.

    A rank that has not detected the loss may have called ``agree``, also for the growth of its session.  That
    call raises RebuildCalled, and the rank's next call matches the next one of this rank.
    """
    while True:
        with contextlib.suppress(AgreementOpMismatch):
            timeout = max(deadline.remaining(), _MIN_TIMEOUT_S)
            return group._agreements.vote(AgreementOp.REBUILD, vote, timeout).wait()


def make_successor(group: ProcessGroup, plan: Rebuilt) -> ProcessGroup:
    """Make the group of ``plan``, over the same connections."""
    history, old = group._history, group._spec
    ranks = tuple(old.ranks[rank] for rank in plan.previous)
    label = f"{history.spec.ident:x}@{history.epoch}:{','.join(map(str, ranks))}"
    spec = replace(
        old, name=f"{history.spec.name}@{history.epoch}", ident=group_ident(label), ranks=ranks,
        rank=plan.previous.index(group.rank),
        world_ranks=tuple(range(len(ranks)))
        if history.is_world
        else old.world_ranks and tuple(old.world_ranks[rank] for rank in plan.previous),
    )  # fmt: skip
    successor = group._make_on_same_links(spec, PrefixStore(f"@{history.epoch}/", history.store))
    successor.epoch, successor._history = history.epoch, history
    return successor


def replace_by(group: ProcessGroup, successor: ProcessGroup) -> None:
    """Replace ``group``, which is closed next, by ``successor``."""
    group._history.newest, group._pending = successor, None
    failure_report.rebuilt()
    successor._is_first, group._is_first = group._is_first, False


# -- objects that move to a new group ----------------------------------------------------------


class Regroupable(Protocol):
    """An object that uses a group and can move to the result of :meth:`~shoal.ProcessGroup.rebuild`."""

    def check_regroup(self) -> None:
        """Raise UsageError if :meth:`regroup` cannot work, before it is needed."""

    def regroup(self, group: ProcessGroup) -> None:
        """Use ``group`` from now on, on every rank of it; does not communicate.

        Pending operations in the old group are dropped.
        """


class GroupOwner(Protocol):
    """The owner of the group, which makes a new group after a failure (a session)."""

    def goes_on(self, error: GroupError) -> bool:
        """After ``error``, make a new group and call :meth:`Regroupable.regroup`; False: no rank is lost."""

    def settle(self) -> None:
        """Redistribute state that differs between ranks in the new group, and handle further losses."""
