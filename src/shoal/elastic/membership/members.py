"""The ranks of a session: their group, and its changes when ranks are lost, leave or join.

Ranks announce waiting processes and their own leaving in the record of each commit.  So all ranks know of
them at the same point, between two steps.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ... import config
from ...common.formatting import counted, format_seconds
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
from ...group.rebuild import Rebuilt, replace_by
from ...initialize import init
from ...net import Deadline
from ..commit import CommitRecord, RankProgress, Requests
from ..signals import LeaveRequest
from .admission import AdmissionController, JoiningProcess


@dataclass(frozen=True, slots=True)
class Resize:
    """A change of the session's group.

    Attributes:
        step: number of the next step, the first to run in the new group.
        again: whether that step had begun in the old group, on any surviving rank.
        epoch: epoch of the new group.
        rank: rank of this process in the new group.
        size: size of the new group.
        previous_size: size of the old group.
        lost: ranks of the old group that were lost, ascending.
        left: ranks of the old group that have left it, ascending.
        joined: ranks of the new group that were not in the old one, ascending.
        seconds: duration for which this rank did not train, from the error, or the end of the step before, to
            the new group, including the transfer of the state to ranks that joined.
    """

    step: int
    again: bool
    epoch: int
    rank: int
    size: int
    previous_size: int
    lost: tuple[int, ...]
    left: tuple[int, ...]
    joined: tuple[int, ...]
    seconds: float


#: seconds between two checks for processes that wait to join
_POLL_INTERVAL_S = 0.02
#: errors that the loss of a rank can cause, after which the surviving ranks can continue
_LOSS_ERRORS = (PeerLost, ProtocolError, OperationTimeout, GroupClosed)


class SessionMembers:
    """The ranks of one session.

    Args:
        min_size, max_size: of the session.
        check: raises UsageError if the session cannot work with the given number of ranks.
        follow: moves the session's models and optimisers to a new group.

    Attributes:
        events: every change of the group, in order.
        leave_request: the request to leave.
        leavers: the ranks that leave before the next step.
        admission_requested: whether processes wait that the session has room for.
        left: whether ``steps`` ends because this rank leaves, or because too few ranks would remain.
        has_left: whether the other ranks continue without this rank.
    """

    def __init__(
        self,
        min_size: int,
        max_size: int | None,
        check: Callable[[int], None],
        follow: Callable[[ProcessGroup], None],
    ) -> None:
        self.min_size, self._max_size = min_size, max_size
        self._check, self._follow = check, follow
        self._group: ProcessGroup | None = None
        self.events: list[Resize] = []
        self.leave_request = LeaveRequest(lambda: self._joining is None)
        self.left = self.has_left = False
        self.leavers: tuple[int, ...] = ()
        self.admission_requested = False
        self._admission: AdmissionController | None = None
        self._joining: JoiningProcess | None = None
        #: the group before it grew, until all ranks are known to have moved to the new one
        self._previous_group: ProcessGroup | None = None
        self._wanted = config.SESSION_SIZE.get() if max_size is None else None
        #: whether this process has started the session alone, and may have to wait for others
        self._waiting_for_min = False
        self._min_deadline = Deadline(0.0)

    @property
    def group(self) -> ProcessGroup:
        """The current ranks."""
        if self._group is None:
            raise UsageError("a Session has its group within its block: with Session(state) as session")
        return self._group

    @property
    def is_joining(self) -> bool:
        """Whether this process is not a member yet, and joins the session before its first step."""
        return self._joining is not None

    @property
    def may_begin(self) -> bool:
        """Whether this process starts a session if there is none to join."""
        return self._joining is not None and self._joining.may_start

    @property
    def waiting(self) -> int:
        """Number of processes that wait to join, on rank 0; 0 on the other ranks."""
        return 0 if self._admission is None else self._admission.waiting

    # -- the beginning and the end -------------------------------------------------------------

    def begin(self, group: ProcessGroup | None) -> None:
        """Begin with ``group``; None: ``init()``, or a group of size 1 if ``SHOAL_JOIN`` is set."""
        if group is None and (joins := config.JOIN.get()):
            self._joining = JoiningProcess(may_start=joins == "auto")
            group = self._joining.solo_group
        self._group = init() if group is None else group

    def open(self) -> None:
        """Publish the session to processes that join, and handle signals that ask this rank to leave."""
        if not self.is_joining:
            self._admission = AdmissionController.of(
                self.group, self.allows_size, wanted=self._wanted, starts=True
            )
        self.leave_request.listen()

    def close(self, *, over: bool) -> None:
        """Stop admitting processes; ``over``: the session has ended."""
        self.leave_request.close(leave_was_requested=self.left and not self.leave_request.requested)
        if self._admission is not None:
            self._admission.close(over=over and not self._waiting_for_min, void=self._waiting_for_min)
        for each in (self._previous_group, self._joining):
            if each is not None:
                with contextlib.suppress(ShoalError):
                    each.close()
        self._admission = self._previous_group = self._joining = None

    # -- a commit ------------------------------------------------------------------------------

    def own_requests(self) -> Requests:
        """Return the requests of this rank in the next commit."""
        own_requests = Requests.LEAVE if self.leave_request.requested else Requests.NONE
        if self._admission is not None and self._admission.is_wanted(self.group):
            own_requests |= Requests.ADMIT
        return own_requests

    def store_requests(self, rows: Sequence[CommitRecord]) -> None:
        """Store the requests of all ranks."""
        self.admission_requested = any(row.requests & Requests.ADMIT for row in rows)
        self.leavers = tuple(rank for rank, row in enumerate(rows) if row.requests & Requests.LEAVE)

    # -- another group -------------------------------------------------------------------------

    def may_be_loss(self, error: BaseException) -> bool:
        """Whether ``error`` may have been caused by the loss of a rank."""
        return isinstance(error, _LOSS_ERRORS) and self.group.state == "broken"

    def rebuild(self, progress: RankProgress, min_size: int) -> Rebuilt:
        """Move to a group of the surviving ranks; raises GroupError."""
        group = self.group.rebuild(min_size=min_size, note=progress.encode())
        assert group is not None
        assert group.rebuilt is not None
        self._take(group)
        self.left |= any(RankProgress.decode(note).ends for note in group.rebuilt.notes.values())
        return group.rebuilt

    def part(self, position: int, steps: int, max_leavers: int | None) -> None:
        """Continue without the ranks that leave, or end on all ranks if fewer than ``min_size`` would remain.

        It calls ``rebuild``, as after a loss, so it matches the call of a rank that detected a loss in the
        commit.  At most ``max_leavers`` ranks leave now, the others after the next step.
        """
        began, before = time.monotonic(), self.group
        min_size = min(self.min_size, before.size)
        ends = before.size - len(self.leavers) < min_size
        progress = RankProgress(position, ends=ends)
        with contextlib.suppress(GroupError):  # wait for busy ranks, which would be late for the rebuild
            before.barrier().wait()
        # Ranks above the limit ask again in the next commit, when the state has been redistributed.
        if before.rank in self.leavers[:max_leavers] and not ends:
            self.left = self.has_left = True
            with contextlib.suppress(GroupError):  # it concerns only the ranks that continue
                before.rebuild(min_size=min_size, leave=True, note=progress.encode())
        else:
            rebuilt = self.rebuild(progress, 1 if ends else min_size)
            self.add_event(steps, before, began, rebuilt)

    def join(self) -> bool:
        """If this process is to join, wait for admission; return whether it has started a session instead."""
        if self._joining is None:
            return False
        self._take(self._joining.join(config.TIMEOUT.get()))
        self._waiting_for_min = bool(self._joining.started_session)
        self._min_deadline = Deadline(config.TIMEOUT.get())
        return self._waiting_for_min

    def wait_for_min(self) -> bool:
        """If this process has started the session alone, wait for ``min_size`` - 1 other processes.

        Return whether they still have to be admitted, or this process leaves.  Raises RendezvousTimeout, or
        UsageError if the session cannot work with ``min_size`` ranks.
        """
        group, admission = self.group, self._admission
        if not self._waiting_for_min or group.size >= self.min_size or admission is None:
            self._waiting_for_min = False
            return False
        self._check(self.min_size)
        if self._wanted is not None and self._wanted < self.min_size:
            raise UsageError(
                f"Session: min_size={self.min_size} is more than {config.SESSION_SIZE.name}={self._wanted}"
            )
        while True:
            time.sleep(_POLL_INTERVAL_S)  # also between failed attempts to admit processes
            if self.leave_request.requested:
                self.left = self.has_left = True
                return True
            if admission.waiting >= self.min_size - group.size:
                return True
            if self._min_deadline.expired:
                raise RendezvousTimeout(
                    f"this process started the session, which needs min_size={self.min_size} ranks: only "
                    f"{counted(admission.waiting, 'other')} came within "
                    f"{format_seconds(self._min_deadline.timeout)}"
                )

    def admit(self) -> ProcessGroup | None:
        """Admit the waiting processes; return the new group, or None if that failed."""
        assert self._admission is not None
        self.admission_requested = False
        try:
            return self._admission.grow(self.group)
        except RebuildCalled:
            return None  # the next step will detect the loss too
        except GroupError as error:
            if self.may_be_loss(error):
                return None  # handled in the next step
            raise

    def move_to(self, grown: ProcessGroup) -> None:
        """Move to the group that :meth:`admit` returned."""
        self._previous_group = self.group
        replace_by(self._previous_group, grown)
        self._take(grown)

    def release_old_groups(self) -> None:
        """Release the former groups: all ranks are known to have the new group."""
        for old in (self._previous_group, self._joining):
            if old is not None:
                old.close()
        if self._joining is not None:
            started_session = self._joining.started_session
            self._admission = AdmissionController.of(
                self.group, self.allows_size, wanted=self._wanted, starts=False, ident=started_session
            )
        self._previous_group = self._joining = None

    def allows_size(self, size: int) -> bool:
        """Whether the session may have ``size`` ranks."""
        try:
            self.check_size(size)
        except UsageError:
            return False
        return self._max_size is None or size <= self._max_size

    def check_size(self, size: int) -> None:
        """Raise UsageError if the session cannot work with ``size`` ranks."""
        self._check(size)
        if self.min_size > size:
            raise UsageError(f"Session: min_size={self.min_size}, and the group's size is {size}")

    def add_event(
        self,
        step: int,
        before: ProcessGroup,
        began: float,
        rebuilt: Rebuilt | None,
        *,
        group: ProcessGroup | None = None,
        again: bool = False,
        index: int | None = None,
    ) -> None:
        """Add an event: ``before`` was replaced by ``group`` (None: the current group).

        Args:
            step, again: as in :class:`Resize`.
            began: time at which this rank stopped training.
            rebuilt: result of the rebuild; None: the group has grown.
            index: in :attr:`events`; None: the end.
        """
        group = self.group if group is None else group
        lost, left = (rebuilt.lost, rebuilt.left) if rebuilt else ((), ())
        joined = () if rebuilt else tuple(range(before.size, group.size))
        seconds = time.monotonic() - began
        event = Resize(
            step, again, group.epoch, group.rank, group.size, before.size, lost, left, joined, seconds
        )
        self.events.insert(len(self.events) if index is None else index, event)

    def _take(self, group: ProcessGroup) -> None:
        self._group = group
        self.admission_requested, self.leavers = False, ()
        self._follow(group)
        if self._admission is not None:
            self._admission.follow(group)
