"""The ranks of a session: the group of those that live, who joins it, and who leaves it.

What the ranks have to say about that stands in the record of each commit.  So all of them know at the same
point, between two steps, that processes wait or that ranks leave.
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

#: seconds between two looks at who has come
_LOOK = 0.02
#: errors after which the ranks that are left can go on, if one is lost
_OF_LOSSES = (PeerLost, ProtocolError, OperationTimeout, GroupClosed)


class SessionMembers:
    """The ranks of one session.

    Args:
        least, most: ``min`` and ``max`` of the session.
        check: raises UsageError if the session cannot do with so many ranks.
        follow: brings what works over the group over to a new one.

    Attributes:
        events: every change of the group, in order.
        notice: whether this rank shall leave.
        leavers: the ranks that leave before the next step.
        asked_to_admit: whether processes wait that the session has room for.
        left: whether the steps are over because this rank leaves, or because all end.
        is_out: whether the others go on without this rank.
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
        #: the group before one that has grown, until all ranks are known to have gone over
        self._older: ProcessGroup | None = None
        self._wanted = config.SESSION_SIZE.get() if most is None else None
        #: whether this process has begun the session alone, and may have to wait for others
        self._gathers = False
        self._gathered_by = Deadline(0.0)

    @property
    def group(self) -> ProcessGroup:
        """The ranks that live."""
        if self._group is None:
            raise UsageError("a Session has its group within its block: with Session(state) as session")
        return self._group

    @property
    def is_joining(self) -> bool:
        """Whether this process is alone so far, and joins the others before its first step."""
        return self._newcomer is not None

    @property
    def may_begin(self) -> bool:
        """Whether this process begins the session if there is none to join."""
        return self._newcomer is not None and self._newcomer.begins

    @property
    def waiting(self) -> int:
        """How many processes wait to join, as rank 0 knows; 0 on the other ranks."""
        return 0 if self._door is None else self._door.waiting

    # -- the beginning and the end -------------------------------------------------------------

    def begin(self, group: ProcessGroup | None) -> None:
        """Begin with these ranks; None: those that meet, or this process alone if it is to join others."""
        if group is None and (joins := config.JOIN.get()):
            self._newcomer = Newcomer(begins=joins == "auto")
            group = self._newcomer.alone
        self._group = init() if group is None else group

    def open(self) -> None:
        """Let others find the session, which begins; and be told by signals to leave."""
        if not self.is_joining:
            self._door = Door.of(self.group, self.fits, wanted=self._wanted, begins=True)
        self.notice.listen()

    def close(self, *, over: bool) -> None:
        """Let nobody in any more; ``over``: because the session has come to its end."""
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
        """What this rank asks for in the next commit."""
        wish = Wish.LEAVE if self.notice.given else Wish.NONE
        if self._door is not None and self._door.is_wanted(self.group):
            wish |= Wish.ADMIT
        return wish

    def hear(self, rows: Sequence[CommitRecord]) -> None:
        """Take to heart what all ranks have asked for."""
        self.asked_to_admit, self.leavers = False, ()
        if any(row.wishes for row in rows):
            self.asked_to_admit, self.leavers = Wish.ADMIT in all_wishes(rows), leavers(rows)

    # -- another group -------------------------------------------------------------------------

    def is_of_a_loss(self, error: BaseException) -> bool:
        """Whether ``error`` may tell that a rank is lost."""
        return isinstance(error, _OF_LOSSES) and self.group.state == "broken"

    def rebuild(self, progress: RankProgress, least: int) -> Rebuilt:
        """Go over to the group of those that are left; raises GroupError."""
        group = self.group.rebuild(min_size=least, note=progress.encode())
        assert group is not None
        assert group.rebuilt is not None
        self._take(group)
        self.left |= any(RankProgress.decode(note).ends for note in group.rebuilt.notes.values())
        return group.rebuilt

    def part(self, position: int, steps: int, most_that_leave: int | None) -> None:
        """Go on without the ranks that leave; or end with them, if fewer than ``min`` would be left.

        A rebuild, as after a death: so it meets that of a rank which has lost another one in the commit.

        Args:
            position, steps: how many steps and blocks count, and how many steps.
            most_that_leave: so many may leave at once; the others leave after the next step.
        """
        began, before = time.monotonic(), self.group
        least = min(self.least, before.size)
        ends = before.size - len(self.leavers) < least
        progress = RankProgress(position, ends=ends)
        with contextlib.suppress(GroupError):  # or a rank that is busy would be late for the rebuild
            before.barrier().wait()
        # The others ask again in the next commit, when others hold what those that leave now have held.
        if before.rank in self.leavers[:most_that_leave] and not ends:
            self.left = self.is_out = True
            with contextlib.suppress(GroupError):  # it is their matter
                before.rebuild(min_size=least, leave=True, note=progress.encode())
        else:
            rebuilt = self.rebuild(progress, 1 if ends else least)
            self.tell(steps, before, began, rebuilt)

    def join(self) -> bool:
        """In a process that is to join the others: wait until they take it in.

        Returns:
            Whether it has begun the session instead, as there was none.
        """
        if self._newcomer is None:
            return False
        self._take(self._newcomer.join(config.TIMEOUT.get()))
        self._gathers = bool(self._newcomer.begun)
        self._gathered_by = Deadline(config.TIMEOUT.get())
        return self._gathers

    def gather(self) -> bool:
        """In a process that has begun the session alone: wait until so many others have come that they can
        train; whether they are still to be met.

        Raises:
            RendezvousTimeout: they have not come.
            UsageError: so many can never train together.
        """
        group, door = self.group, self._door
        if not self._gathers or group.size >= self.least or door is None:
            self._gathers = False
            return False
        self._check(self.least)
        if self._wanted is not None and self._wanted < self.least:
            raise UsageError(
                f"Session: min={self.least}, and {config.SESSION_SIZE.name}={self._wanted} ranks are wanted"
            )
        while True:
            time.sleep(_LOOK)  # also where those that came could not be met
            if self.notice.given:
                self.left = self.is_out = True
                return True
            if door.waiting >= self.least - group.size:
                return True
            if self._gathered_by.expired:
                raise RendezvousTimeout(
                    f"this process began the session, which needs min={self.least} ranks: only "
                    f"{counted(door.waiting, 'other')} came within {in_seconds(self._gathered_by.timeout)}"
                )

    def meet(self) -> ProcessGroup | None:
        """Meet those that wait; their group with the ranks, or None if nothing comes of it."""
        assert self._door is not None
        self.asked_to_admit = False
        try:
            return self._door.grow(self.group)
        except RebuildCalled:
            return None  # the step will meet what the other rank has met
        except GroupError as error:
            if self.is_of_a_loss(error):
                return None  # the step will meet it
            raise

    def go_over(self, grown: ProcessGroup) -> None:
        """Take the group that :meth:`meet` gave."""
        self._older = self.group
        self._older._become(grown)
        self._take(grown)

    def settled(self) -> None:
        """All ranks are known to have the new group."""
        for old in (self._older, self._newcomer):
            if old is not None:
                old.close()
        if self._newcomer is not None:
            begun = self._newcomer.begun
            self._door = Door.of(self.group, self.fits, wanted=self._wanted, begins=False, ident=begun)
        self._older = self._newcomer = None

    def fits(self, size: int) -> bool:
        """Whether the session takes so many ranks."""
        try:
            self.check_size(size)
        except UsageError:
            return False
        return self._most is None or size <= self._most

    def check_size(self, size: int) -> None:
        """Raise UsageError if the session cannot do with so many ranks."""
        self._check(size)
        if self.least > size:
            raise UsageError(f"Session: min={self.least}, and there are {size} ranks")

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
        """Remember how ``group`` (None: the present one) came of ``before``.

        Args:
            step, again: as of :class:`Resize`.
            began: when this rank ceased to train.
            rebuilt: how; None: it has grown.
            place: in :attr:`events`; None: the last.
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
