"""The ranks of a session: their group, and its changes when ranks are lost, leave or join.

Ranks announce waiting processes and their own leaving in the record of each commit.  So all ranks know of
them at the same point, between two steps.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence

from ... import config
from ...common.wording import counted, in_seconds
from ...errors import (
    GroupClosed,
    GroupError,
    OperationTimeout,
    PeerLost,
    ProtocolError,
    RebuildCalled,
    RendezvousTimeout,
    ShoalError,
    UsageError,
)
from ...group import ProcessGroup
from ...group.rebuild import Rebuilt
from ...initialize import init
from ...net import Deadline
from ..progress import RankProgress
from ..record import CommitRecord, Wish, all_wishes, leavers
from ..resize import Resize
from ..signals import Notice
from .growth import Door, Newcomer

#: seconds between two checks for processes that wait to join
_LOOK = 0.02
#: errors that the loss of a rank can cause, after which the surviving ranks can continue
_OF_LOSSES = (PeerLost, ProtocolError, OperationTimeout, GroupClosed)


class SessionMembers:
    """The ranks of one session.

    Args:
        least, most: ``min`` and ``max`` of the session.
        check: raises UsageError if the session cannot work with the given number of ranks.
        follow: moves the session's models and optimisers to a new group.

    Attributes:
        events: every change of the group, in order.
        notice: the request to leave.
        leavers: the ranks that leave before the next step.
        asked_to_admit: whether processes wait that the session has room for.
        left: whether ``steps`` ends because this rank leaves, or because too few ranks would remain.
        is_out: whether the other ranks continue without this rank.
    """

    def __init__(
        self,
        least: int,
        most: int | None,
        check: Callable[[int], None],
        follow: Callable[[ProcessGroup], None],
    ) -> None:
        self.least, self._most = least, most
        self._check, self._follow = check, follow
        self._group: ProcessGroup | None = None
        self.events: list[Resize] = []
        self.notice = Notice(lambda: self._newcomer is None)
        self.left = self.is_out = False
        self.leavers: tuple[int, ...] = ()
        self.asked_to_admit = False
        self._door: Door | None = None
        self._newcomer: Newcomer | None = None
        #: the group before it grew, until all ranks are known to have moved to the new one
        self._older: ProcessGroup | None = None
        self._wanted = config.SESSION_SIZE.get() if most is None else None
        #: whether this process has started the session alone, and may have to wait for others
        self._gathers = False
        self._gathered_by = Deadline(0.0)

    @property
    def group(self) -> ProcessGroup:
        """The current ranks."""
        if self._group is None:
            raise UsageError("a Session has its group within its block: with Session(state) as session")
        return self._group

    @property
    def is_joining(self) -> bool:
        """Whether this process is not a member yet, and joins the session before its first step."""
        return self._newcomer is not None

    @property
    def may_begin(self) -> bool:
        """Whether this process starts a session if there is none to join."""
        return self._newcomer is not None and self._newcomer.begins

    @property
    def waiting(self) -> int:
        """Number of processes that wait to join, on rank 0; 0 on the other ranks."""
        return 0 if self._door is None else self._door.waiting

    # -- the beginning and the end -------------------------------------------------------------

    def begin(self, group: ProcessGroup | None) -> None:
        """Begin with ``group``; None: ``init()``, or a group of size 1 if ``SHOAL_JOIN`` is set."""
        if group is None and (joins := config.JOIN.get()):
            self._newcomer = Newcomer(begins=joins == "auto")
            group = self._newcomer.alone
        self._group = init() if group is None else group

    def open(self) -> None:
        """Publish the session to processes that join, and handle signals that ask this rank to leave."""
        if not self.is_joining:
            self._door = Door.of(self.group, self.fits, wanted=self._wanted, begins=True)
        self.notice.listen()

    def close(self, *, over: bool) -> None:
        """Stop admitting processes; ``over``: the session has ended."""
        self.notice.close(others_were_told=self.left and not self.notice.given)
        if self._door is not None:
            self._door.close(over=over and not self._gathers, void=self._gathers)
        for each in (self._older, self._newcomer):
            if each is not None:
                with contextlib.suppress(ShoalError):
                    each.close()
        self._door = self._older = self._newcomer = None

    # -- a commit ------------------------------------------------------------------------------

    def wish(self) -> Wish:
        """Return the requests of this rank in the next commit."""
        wish = Wish.LEAVE if self.notice.given else Wish.NONE
        if self._door is not None and self._door.is_wanted(self.group):
            wish |= Wish.ADMIT
        return wish

    def hear(self, rows: Sequence[CommitRecord]) -> None:
        """Store the requests of all ranks."""
        self.asked_to_admit, self.leavers = False, ()
        if any(row.wishes for row in rows):
            self.asked_to_admit, self.leavers = Wish.ADMIT in all_wishes(rows), leavers(rows)

    # -- another group -------------------------------------------------------------------------

    def is_of_a_loss(self, error: BaseException) -> bool:
        """Whether ``error`` may have been caused by the loss of a rank."""
        return isinstance(error, _OF_LOSSES) and self.group.state == "broken"

    def rebuild(self, progress: RankProgress, least: int) -> Rebuilt:
        """Move to a group of the surviving ranks; raises GroupError."""
        group = self.group.rebuild(min_size=least, note=progress.encode())
        assert group is not None
        assert group.rebuilt is not None
        self._take(group)
        self.left |= any(RankProgress.decode(note).ends for note in group.rebuilt.notes.values())
        return group.rebuilt

    def part(self, position: int, steps: int, most_that_leave: int | None) -> None:
        """Continue without the ranks that leave, or end on all ranks if fewer than ``min`` would remain.

        It calls ``rebuild``, as after a loss, so it matches the call of a rank that detected a loss in the
        commit.  At most ``most_that_leave`` ranks leave now, the others after the next step.
        """
        began, before = time.monotonic(), self.group
        least = min(self.least, before.size)
        ends = before.size - len(self.leavers) < least
        progress = RankProgress(position, ends=ends)
        with contextlib.suppress(GroupError):  # wait for busy ranks, which would be late for the rebuild
            before.barrier().wait()
        # Ranks above the limit ask again in the next commit, when the state has been redistributed.
        if before.rank in self.leavers[:most_that_leave] and not ends:
            self.left = self.is_out = True
            with contextlib.suppress(GroupError):  # it concerns only the ranks that continue
                before.rebuild(min_size=least, leave=True, note=progress.encode())
        else:
            rebuilt = self.rebuild(progress, 1 if ends else least)
            self.tell(steps, before, began, rebuilt)

    def join(self) -> bool:
        """If this process is to join, wait for admission; return whether it has started a session instead."""
        if self._newcomer is None:
            return False
        self._take(self._newcomer.join(config.TIMEOUT.get()))
        self._gathers = bool(self._newcomer.begun)
        self._gathered_by = Deadline(config.TIMEOUT.get())
        return self._gathers

    def gather(self) -> bool:
        """If this process has started the session alone, wait for ``min`` - 1 other processes.

        Returns:
            Whether they still have to be admitted, or this process leaves.

        Raises:
            RendezvousTimeout: too few processes came in time.
            UsageError: the session cannot work with ``min`` ranks.
        """
        group, door = self.group, self._door
        if not self._gathers or group.size >= self.least or door is None:
            self._gathers = False
            return False
        self._check(self.least)
        if self._wanted is not None and self._wanted < self.least:
            raise UsageError(
                f"Session: min={self.least} is more than {config.SESSION_SIZE.name}={self._wanted}"
            )
        while True:
            time.sleep(_LOOK)  # also between failed attempts to admit processes
            if self.notice.given:
                self.left = self.is_out = True
                return True
            if door.waiting >= self.least - group.size:
                return True
            if self._gathered_by.expired:
                raise RendezvousTimeout(
                    f"this process started the session, which needs min={self.least} ranks: only "
                    f"{counted(door.waiting, 'other')} came within {in_seconds(self._gathered_by.timeout)}"
                )

    def meet(self) -> ProcessGroup | None:
        """Admit the waiting processes; return the new group, or None if that failed."""
        assert self._door is not None
        self.asked_to_admit = False
        try:
            return self._door.grow(self.group)
        except RebuildCalled:
            return None  # the next step will detect the loss too
        except GroupError as error:
            if self.is_of_a_loss(error):
                return None  # handled in the next step
            raise

    def go_over(self, grown: ProcessGroup) -> None:
        """Move to the group that :meth:`meet` returned."""
        self._older = self.group
        self._older._become(grown)
        self._take(grown)

    def settled(self) -> None:
        """Release the former groups: all ranks are known to have the new group."""
        for old in (self._older, self._newcomer):
            if old is not None:
                old.close()
        if self._newcomer is not None:
            begun = self._newcomer.begun
            self._door = Door.of(self.group, self.fits, wanted=self._wanted, begins=False, ident=begun)
        self._older = self._newcomer = None

    def fits(self, size: int) -> bool:
        """Whether the session may have ``size`` ranks."""
        try:
            self.check_size(size)
        except UsageError:
            return False
        return self._most is None or size <= self._most

    def check_size(self, size: int) -> None:
        """Raise UsageError if the session cannot work with ``size`` ranks."""
        self._check(size)
        if self.least > size:
            raise UsageError(f"Session: min={self.least}, and the group's size is {size}")

    def tell(
        self,
        step: int,
        before: ProcessGroup,
        began: float,
        rebuilt: Rebuilt | None,
        *,
        group: ProcessGroup | None = None,
        again: bool = False,
        place: int | None = None,
    ) -> None:
        """Add an event: ``before`` was replaced by ``group`` (None: the current group).

        Args:
            step, again: as in :class:`Resize`.
            began: time at which this rank stopped training.
            rebuilt: result of the rebuild; None: the group has grown.
            place: index in :attr:`events`; None: the end.
        """
        group = self.group if group is None else group
        lost, left = (rebuilt.lost, rebuilt.left) if rebuilt else ((), ())
        joined = () if rebuilt else tuple(range(before.size, group.size))
        seconds = time.monotonic() - began
        event = Resize(
            step, again, group.epoch, group.rank, group.size, before.size, lost, left, joined, seconds
        )
        self.events.insert(len(self.events) if place is None else place, event)

    def _take(self, group: ProcessGroup) -> None:
        self._group = group
        self.asked_to_admit, self.leavers = False, ()
        self._follow(group)
        if self._door is not None:
            self._door.follow(group)
