"""How a session takes in processes that wait in the lobby.

At the end of a step all ranks of the group wait for each other; then they and the candidates that rank 0
invites meet anew beside the group, which stays as it is.  Then its ranks agree whether every one of them got
through: if so, all go over to the new group; if not, all stay.  So a candidate that dies on the way costs a
moment and nothing else, and a rank that is busy is waited for as in any collective.

If a rank of the group is lost on the way, some of the others may be in this agreement and others already in a
rebuild.  An agreement of both kinds decides nothing: those of the first kind hear of the rebuild and join it.
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

#: for closing what came to nothing
_SHORT = 1.0
#: how often a newcomer tries, as each try makes the others wait; and seconds between the first two
_ATTEMPTS, _PAUSE = 5, 0.5
_TAKEN, _REFUSED = b"1", b"0"


class Door:
    """The ranks' side: one of a session.

    Args:
        place: where the ranks have met.
        fits: whether the session can go on with so many ranks.
        wanted: as of :class:`Lobby`.
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
        """The door of a group; None: nobody can find the place where its ranks have met.

        Args:
            begins: whether the session begins with this group.
            ident: of the session, if the others know it already.
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
        """``group`` is that of the session from now on."""
        if group.rank == 0:
            self._lobby.listen()

    @property
    def waiting(self) -> int:
        """How many candidates this rank knows of: on rank 0 all, on the others none."""
        return self._lobby.waiting

    def is_wanted(self, group: ProcessGroup) -> bool:
        """Whether somebody waits who can be taken in."""
        return self._lobby.waiting > 0 and self._fits(group.size + 1)

    def grow(self, group: ProcessGroup) -> ProcessGroup | None:
        """Meet those that wait; a collective of ``group``.

        Returns:
            The group of all, in which the ranks of ``group`` keep theirs; None: ``group`` stays.

        Raises:
            GroupError: of ``group``.
        """
        lobby = self._lobby
        within = config.VOTE_TIMEOUT.get() / 2  # who is in the meeting is not late for a rebuild
        group.barrier().wait()  # a rank may be busy with something of its own: nobody is invited before
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
                raise RendezvousError(f"rank {group.rank} has heard that a rank of the session is lost")
            if group.rank == 0:
                lobby.check_invited()

        try:
            with contextlib.suppress(ShoalError, OSError):  # the others hear of it in the agreement
                grown, release = meeting.connect(self._place, group.rank, group.size + count, look)
            agreed = group._agree_to_grow(grown is not None).wait()
            taken = bool(agreed.value) and not agreed.lost
            with contextlib.suppress(StoreError, WireError), _store_of(self._place) as store:
                store.set(meeting.verdict, _TAKEN if taken else _REFUSED)
            if grown is None or release is None or not taken:
                return None
            group.world.enter()  # the new world goes with its place, which is that of the old one
            release.then = group.world.exit
            return grown
        finally:
            if grown is not None and not taken:
                grown.world.close(_SHORT)
            failure_report.rebuilt()  # whatever became of the meeting, this rank has not failed

    def close(self, *, over: bool, void: bool) -> None:
        """Nobody is let in any more; ``over``: because the session has come to its end; ``void``: before its
        first step.
        """
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
    """The side of a process that joins a session: alone at first, so that it can make its models.

    Args:
        begins: it begins the session if there is none.

    Attributes:
        begins: as above.
        begun: the session that it has begun; 0: it joins that of others.
    """

    def __init__(self, *, begins: bool = False) -> None:
        self.begun = 0
        self.begins = begins
        self._store = MemoryStore()
        self.alone = init(store=self._store, rank=0, size=1)

    def join(self, timeout: float) -> ProcessGroup:
        """Wait until the session takes this process in; its group.

        Args:
            timeout: seconds until there must be a session.

        Raises:
            SystemExit: with the exit code 0; it is over.
            RendezvousError: there is none, or this process cannot connect to its ranks.
            StateLost: as of :meth:`WaitingProcess.await_invitation`.
            StoreError: the store is gone.
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
                # Where the store is gone, it is waited for with the next invitation.
                with contextlib.suppress(GroupError, RendezvousError, StoreError, WireError):
                    if (group := self._met(place, invitation)) is not None:
                        failure_report.taken_in()
                        return group
                time.sleep(_PAUSE * 2**attempt)
            raise RendezvousError(
                f"job {place.job!r}: the session invited this process {_ATTEMPTS} times, and each time not "
                "all could connect"
            )
        except BaseException:
            place.close()
            raise

    def close(self) -> None:
        """Let go of the group of one, which another one has taken the place of."""
        self.alone.close()
        self._store.close()

    def _met(self, place: RendezvousPoint, said: Invitation) -> ProcessGroup | None:
        """The group of an invitation; None: its ranks went on without this process."""
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
        """What the ranks have agreed on: they wait for the last of them as long as in any collective."""
        deadline = Deadline(meeting.timeout)
        while group.state == "open" and not deadline.expired:
            with contextlib.suppress(StoreTimeout):
                return store.get(meeting.verdict, min(LOOK, deadline.remaining()))
        return _REFUSED


@dataclass(frozen=True, slots=True)
class _Meeting:
    """A meeting of ranks and newcomers, and the group that is to come of it.

    Attributes:
        meeting: its name, by which all find it in the store.
        epoch: of the group before.
        name, timeout, concurrency, backend, options: of the new group.
        within: seconds until all must be connected.
    """

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
        """The meeting of a group's ranks with others."""
        line, links = group._line, group._links
        name = group.name if line is None else line.spec.name
        return cls(
            meeting, group.epoch, name, group.timeout, group._spec.concurrency, links.backend.name,
            dict(links.options), within,
        )  # fmt: skip

    @property
    def verdict(self) -> str:
        """The key under which the ranks say whether they have taken the new group."""
        return f"{self.meeting}/verdict"

    def connect(
        self, place: RendezvousPoint, rank: int, size: int, look: Callable[[], None] = nothing
    ) -> tuple[ProcessGroup, _Release]:
        """The new group, after all its ranks have shown that they are connected; ``look``: as of Meeting."""
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
            # No abort: others may have got through, and would lose their session.
            group.world.close(_SHORT)
            raise
        return group, release


def _alone(place: RendezvousPoint, ident: int) -> ProcessGroup:
    """A group of this process alone, which others can join: the beginning of a session."""
    timeout = config.TIMEOUT.get()
    membership = meet_beside(place, f"{LOBBY}/{ident:016x}/alone", rank=0, size=1, timeout=timeout)
    release = _Release(membership.release)
    release.then = lambda _: place.close()
    return world_group(
        replace(membership, release=release), backend_factory("native"), name="world", timeout=timeout,
        concurrency=lanes(None), options={},
    )  # fmt: skip


class _Release:
    """Releases the membership of a new world, and then what the world was made from."""

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
    """The store at ``place`` as it is now: it may have begun anew since the others met there."""
    return place.store.clone(PATIENCE, accept_new_data=True)


def _can_be_told(group: ProcessGroup) -> bool:
    """Whether a process elsewhere can make the backend of this group's world."""
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
