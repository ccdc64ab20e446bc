"""Growth of a session: the admission of processes that wait to join.

After a barrier at the end of a step, the ranks and the candidates that rank 0 invites make a new group, while
the old one stays open.  The ranks agree whether all of them have connected: if so, all move to the new group;
otherwise all keep the old one.  So a candidate that fails costs only time.

If a rank is lost meanwhile, some ranks may be in this agreement and others already in a rebuild.  Then the
agreement fails with RebuildCalled on the former, which join the rebuild.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import torch

from ... import config, failure_report
from ...backend.arguments import lanes
from ...backend.registry import backend_factory
from ...errors import GroupError, RendezvousError, ShoalError, StoreError, StoreTimeout, UsageError, WireError
from ...group import ProcessGroup
from ...initialize import init, world_group
from ...net import Deadline
from ...rendezvous import RendezvousPoint, meet_beside, open_place
from ...rendezvous.record import LOBBY
from ...rendezvous.venue import nothing
from ...store import MemoryStore, Store
from .lobby import Lobby
from .lobby_keys import LOOK, PATIENCE, Invitation
from .waiting import Begun, WaitingProcess

#: seconds to close a group that was not used
_SHORT = 1.0
#: maximum number of attempts to join, as each makes the ranks wait; seconds between the first two
_ATTEMPTS, _PAUSE = 5, 0.5
_TAKEN, _REFUSED = b"1", b"0"


class Door:
    """The admission of candidates, on the ranks of a session.

    ``fits``: whether the session may have the given number of ranks; ``wanted``: as in :class:`Lobby`.
    """

    def __init__(self, place: RendezvousPoint, fits: Callable[[int], bool], wanted: int | None) -> None:
        self._can_be = fits
        self._place = place
        self._lobby = Lobby(place, wanted)

    @classmethod
    def of(
        cls,
        group: ProcessGroup,
        fits: Callable[[int], bool],
        *,
        wanted: int | None,
        begins: bool,
        ident: int = 0,
    ) -> Door | None:
        """Return the `Door` of a group; None: other processes cannot find or join its rendezvous point.

        ``begins``: the session starts with this group; ``ident``: its identifier, if it is published.
        """
        place = group.world.membership.place
        if place is None or not group._is_first or not _can_be_told(group):
            return None
        door = cls(place, fits, wanted)
        door._lobby.ident = ident
        if begins and group.rank == 0:
            door._lobby.open()
        door.follow(group)
        return door

    def follow(self, group: ProcessGroup) -> None:
        """Start to look for candidates if this process is rank 0 of ``group``, the current group."""
        if group.rank == 0:
            self._lobby.listen()

    @property
    def waiting(self) -> int:
        """Number of candidates, on rank 0; 0 on the other ranks."""
        return self._lobby.waiting

    def is_wanted(self, group: ProcessGroup) -> bool:
        """Whether a candidate waits that can be admitted."""
        return self._lobby.waiting > 0 and self._fits(group.size + 1)

    def grow(self, group: ProcessGroup) -> ProcessGroup | None:
        """Make a new group with the candidates that wait; a collective of ``group``; raises its GroupError.

        Returns:
            The new group, in which the ranks of ``group`` keep their numbers; None: ``group`` is kept.
        """
        lobby = self._lobby
        within = config.VOTE_TIMEOUT.get() / 2  # so that no rank is late for a rebuild
        group.barrier().wait()  # candidates are invited only when no rank is busy
        mine = [0, 0, 0, 0]
        if group.rank == 0:
            token = secrets.randbits(62)
            meeting = _Meeting.of(group, lobby.name_of_meeting(token), within)
            mine = [self._invite(group, meeting), lobby.ident, token, int(within * 1e6)]
        head = torch.tensor(mine, device="cpu")
        group.broadcast(head, 0).wait()
        count, lobby.ident, token, microseconds = head.tolist()
        if count == 0:
            return None
        meeting = _Meeting.of(group, lobby.name_of_meeting(token), microseconds / 1e6)
        grown, release, taken = None, None, False

        def look() -> None:
            if group.state != "open":
                raise RendezvousError(f"rank {group.rank} has detected that a rank of the session is lost")
            if group.rank == 0:
                lobby.check_invited()

        try:
            with contextlib.suppress(ShoalError, OSError):  # the agreement reports it to the other ranks
                grown, release = meeting.connect(self._place, group.rank, group.size + count, look)
            agreed = group._agree_to_grow(grown is not None).wait()
            taken = bool(agreed.value) and not agreed.lost
            with contextlib.suppress(StoreError, WireError), _store_of(self._place) as store:
                store.set(meeting.verdict, _TAKEN if taken else _REFUSED)
            if grown is None or release is None or not taken:
                return None
            group.world.enter()  # the new world uses the old one's rendezvous point, which must stay open
            release.then = group.world.exit
            return grown
        finally:
            if grown is not None and not taken:
                grown.world.close(_SHORT)
            failure_report.rebuilt()  # even if the admission failed, this rank has not

    def close(self, *, over: bool, void: bool) -> None:
        """Stop admitting candidates; ``over``: the session has ended; ``void``: before its first step."""
        self._lobby.close(over=over, void=void)

    def _fits(self, size: int) -> bool:
        wanted = self._lobby.wanted
        return (wanted is None or size <= wanted) and self._can_be(size)

    def _invite(self, group: ProcessGroup, meeting: _Meeting) -> int:
        self._lobby.look_up_wanted()
        most = self._lobby.waiting
        while most > 0 and not self._fits(group.size + most):
            most -= 1

        def compose(index: int, count: int) -> Invitation:
            return Invitation(rank=group.size + index, size=group.size + count, **asdict(meeting))

        return self._lobby.invite(most, compose)


class Newcomer:
    """A process that joins a session; it has a group of size 1 until it is admitted, to make its models.

    Attributes:
        begins: whether it starts a session if there is none.
        begun: identifier of the session that it has started; 0: it joins a running session.
    """

    def __init__(self, *, begins: bool = False) -> None:
        self.begun = 0
        self.begins = begins
        self._store = MemoryStore()
        self.alone = init(store=self._store, rank=0, size=1)

    def join(self, timeout: float) -> ProcessGroup:
        """Wait until the session admits this process, and return its group.

        Args:
            timeout: seconds within which a session must be found.

        Raises:
            SystemExit: with exit code 0; the session has ended.
            RendezvousError: there is no session, or this process cannot connect to its ranks.
            StateLost: as in :meth:`WaitingProcess.await_invitation`.
            StoreError: the store is not reachable.
        """
        deadline = Deadline(timeout)
        place = open_place(timeout=timeout)
        try:
            candidate = WaitingProcess(place, deadline, self.begins)
            for attempt in range(_ATTEMPTS):
                invitation = candidate.await_invitation()
                if isinstance(invitation, Begun):
                    self.begun = invitation.ident
                    return _alone(place, invitation.ident)
                # If the store is not reachable, the next await_invitation waits for it.
                with contextlib.suppress(GroupError, RendezvousError, StoreError, WireError):
                    if (group := self._met(place, invitation)) is not None:
                        failure_report.taken_in()
                        return group
                time.sleep(_PAUSE * 2**attempt)
            raise RendezvousError(
                f"job {place.job!r}: the session invited this process {_ATTEMPTS} times, and each time some "
                "processes could not connect"
            )
        except BaseException:
            place.close()
            raise

    def close(self) -> None:
        """Close the group of size 1, which has been replaced."""
        self.alone.close()
        self._store.close()

    def _met(self, place: RendezvousPoint, said: Invitation) -> ProcessGroup | None:
        """Return the group of an invitation; None: the ranks continued without this process."""
        meeting = _Meeting(**{each.name: getattr(said, each.name) for each in fields(_Meeting)})
        group, release = meeting.connect(place, said.rank, said.size)
        try:
            with _store_of(place) as store:
                verdict = self._verdict(store, meeting, group)
        except (StoreError, WireError):
            verdict = _REFUSED
        if verdict != _TAKEN:
            group.world.close(_SHORT)
            return None
        release.then = lambda _: place.close()
        return group

    def _verdict(self, store: Store, meeting: _Meeting, group: ProcessGroup) -> bytes:
        """Return the decision of the ranks; they may wait for a slow rank as long as in any collective."""
        deadline = Deadline(meeting.timeout)
        while group.state == "open" and not deadline.expired:
            with contextlib.suppress(StoreTimeout):
                return store.get(meeting.verdict, min(LOOK, deadline.remaining()))
        return _REFUSED


@dataclass(frozen=True, slots=True)
class _Meeting:
    """A rendezvous of ranks and candidates, and the new group; attributes as in :class:`Invitation`."""

    meeting: str
    epoch: int
    name: str
    timeout: float
    concurrency: int
    backend: str
    options: dict[str, Any]
    within: float

    @classmethod
    def of(cls, group: ProcessGroup, meeting: str, within: float) -> _Meeting:
        """Return the rendezvous in which ``group`` grows."""
        line, links = group._line, group._links
        name = group.name if line is None else line.spec.name
        return cls(
            meeting, group.epoch, name, group.timeout, group._spec.concurrency, links.backend.name,
            dict(links.options), within,
        )  # fmt: skip

    @property
    def verdict(self) -> str:
        """The key of the ranks' decision for or against the new group."""
        return f"{self.meeting}/verdict"

    def connect(
        self, place: RendezvousPoint, rank: int, size: int, look: Callable[[], None] = nothing
    ) -> tuple[ProcessGroup, _Release]:
        """Make the new group and wait until all its ranks are connected; ``look``: as in `meet_beside`."""
        deadline = Deadline(self.within)
        membership = meet_beside(place, self.meeting, rank=rank, size=size, timeout=self.within, look=look)
        release = _Release(membership.release)
        group = world_group(
            replace(membership, release=release), backend_factory(self.backend), name=self.name,
            timeout=self.timeout, concurrency=self.concurrency, options=self.options,
            within=max(deadline.remaining(), _SHORT),
        )  # fmt: skip
        try:
            group._goes_on_from(self.epoch)
            group.barrier(timeout=max(deadline.remaining(), _SHORT)).wait()
        except BaseException:
            # No abort, which would break the session of ranks that have connected.
            group.world.close(_SHORT)
            raise
        return group, release


def _alone(place: RendezvousPoint, ident: int) -> ProcessGroup:
    """Return a group of size 1 that other processes can join: the first group of a session."""
    timeout = config.TIMEOUT.get()
    membership = meet_beside(place, f"{LOBBY}/{ident:016x}/alone", rank=0, size=1, timeout=timeout)
    release = _Release(membership.release)
    release.then = lambda _: place.close()
    return world_group(
        replace(membership, release=release), backend_factory("native"), name="world", timeout=timeout,
        concurrency=lanes(None), options={},
    )  # fmt: skip


class _Release:
    """Releases the membership of a new world, and then the resources that it was made from."""

    def __init__(self, first: Callable[[float], None]) -> None:
        self._first = first
        self.then: Callable[[float], None] | None = None

    def __call__(self, seconds: float) -> None:
        deadline = Deadline(seconds)
        try:
            self._first(seconds)
        finally:
            if self.then is not None:
                self.then(deadline.remaining())


def _store_of(place: RendezvousPoint) -> Store:
    """Connect to the store at ``place``, which may have been restarted since the ranks met."""
    return place.store.clone(PATIENCE, accept_new_data=True)


def _can_be_told(group: ProcessGroup) -> bool:
    """Whether another process can make the backend of this group's world from its name and options."""
    links = group._links
    try:
        return (
            links is group.world.links
            and backend_factory(links.backend.name) is links.factory
            and all(
                isinstance(value, (str, int, float, bool, type(None))) for value in links.options.values()
            )
        )
    except UsageError:
        return False
