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
from dataclasses import replace

import torch

from ... import config, failure_report
from ...backend.identity import Tuning
from ...backend.registry import backend_factory
from ...errors import GroupError, RendezvousError, ShoalError, StoreError, StoreTimeout, UsageError, WireError
from ...group import ProcessGroup
from ...initialize import init, world_group
from ...net import Deadline
from ...rendezvous import RendezvousPoint, open_point, rendezvous_again_at
from ...rendezvous.records import LOBBY
from ...rendezvous.venue import nothing
from ...store import MemoryStore, Store
from .candidates import (
    POLL_TIMEOUT_S,
    STORE_TIMEOUT_S,
    CandidateRegistry,
    Invitation,
    InvitationWaiter,
    StartedSession,
)

#: seconds to close a group that was not used
_CLOSE_TIMEOUT_S = 1.0
#: maximum number of attempts to join, as each makes the ranks wait; seconds between the first two
_MAX_JOIN_ATTEMPTS, _RETRY_DELAY_S = 5, 0.5
_ACCEPTED, _REJECTED = b"1", b"0"


class AdmissionController:
    """The admission of candidates, on the ranks of a session.

    ``fits``: whether the session may have that number of ranks; ``wanted``: of :class:`CandidateRegistry`.
    """

    def __init__(self, place: RendezvousPoint, fits: Callable[[int], bool], wanted: int | None) -> None:
        self._allows_size = fits
        self._place = place
        self._registry = CandidateRegistry(place, wanted)

    @classmethod
    def of(
        cls,
        group: ProcessGroup,
        fits: Callable[[int], bool],
        *,
        wanted: int | None,
        starts: bool,
        ident: int = 0,
    ) -> AdmissionController | None:
        """Return the controller of a group; None: other processes cannot find or join its rendezvous point.

        ``starts``: the session starts with this group; ``ident``: its identifier, if it is published.
        """
        place = group.world.membership.place
        if place is None or not group._is_first or not _backend_is_portable(group):
            return None
        admission = cls(place, fits, wanted)
        admission._registry.ident = ident
        if starts and group.rank == 0:
            admission._registry.open()
        admission.follow(group)
        return admission

    def follow(self, group: ProcessGroup) -> None:
        """Start to look for candidates if this process is rank 0 of ``group``, the current group."""
        if group.rank == 0:
            self._registry.start()

    @property
    def waiting(self) -> int:
        """Number of candidates, on rank 0; 0 on the other ranks."""
        return self._registry.waiting

    def is_wanted(self, group: ProcessGroup) -> bool:
        """Whether a candidate waits that can be admitted."""
        return self._registry.waiting > 0 and self._fits(group.size + 1)

    def grow(self, group: ProcessGroup) -> ProcessGroup | None:
        """Make a new group with the candidates that wait; a collective of ``group``; raises its GroupError.

        Returns:
            The new group, in which the ranks of ``group`` keep their numbers; None: ``group`` is kept.
        """
        registry = self._registry
        within = config.VOTE_TIMEOUT.get() / 2  # so that no rank is late for a rebuild
        group.barrier().wait()  # candidates are invited only when no rank is busy
        mine = [0, 0, 0, 0]
        if group.rank == 0:
            token = secrets.randbits(62)
            invited = self._invite(group, registry.rendezvous_name(token), within)
            mine = [invited, registry.ident, token, int(within * 1e6)]
        head = torch.tensor(mine, device="cpu")
        group.broadcast(head, 0).wait()
        count, registry.ident, token, microseconds = head.tolist()
        if count == 0:
            return None
        name, within = registry.rendezvous_name(token), microseconds / 1e6
        own = _invitation(group, name, within, group.rank, group.size + count)
        grown, release, accepted = None, None, False

        def check() -> None:
            if group.state != "open":
                raise RendezvousError(f"rank {group.rank} has detected that a rank of the session is lost")
            if group.rank == 0:
                registry.check_invited_alive()

        try:
            with contextlib.suppress(ShoalError, OSError):  # the agreement reports it to the other ranks
                grown, release = _connect(own, self._place, check)
            agreed = group._agreements.agree_to_grow(grown is not None).wait()
            accepted = bool(agreed.value) and not agreed.lost
            with contextlib.suppress(StoreError, WireError), _connect_store(self._place) as store:
                store.set(own.verdict_key, _ACCEPTED if accepted else _REJECTED)
            if grown is None or release is None or not accepted:
                return None
            group.world.enter()  # the new world uses the old one's rendezvous point, which must stay open
            release.then = group.world.exit
            return grown
        finally:
            if grown is not None and not accepted:
                grown.world.close(_CLOSE_TIMEOUT_S)
            failure_report.rebuilt()  # even if the admission failed, this rank has not

    def close(self, *, over: bool, void: bool) -> None:
        """Stop admitting candidates; ``over``: the session has ended; ``void``: before its first step."""
        self._registry.close(over=over, void=void)

    def _fits(self, size: int) -> bool:
        wanted = self._registry.wanted
        return (wanted is None or size <= wanted) and self._allows_size(size)

    def _invite(self, group: ProcessGroup, name: str, within: float) -> int:
        self._registry.refresh_wanted()
        max_count = self._registry.waiting
        while max_count > 0 and not self._fits(group.size + max_count):
            max_count -= 1

        def make_invitation(index: int, count: int) -> Invitation:
            return _invitation(group, name, within, group.size + index, group.size + count)

        return self._registry.invite(max_count, make_invitation)


class JoiningProcess:
    """A process that joins a session; it has a group of size 1 until it is admitted, to make its models.

    With ``may_start`` it starts a session if there is none, whose identifier is then ``started_session``.
    """

    def __init__(self, *, may_start: bool = False) -> None:
        self.started_session = 0
        self.may_start = may_start
        self._store = MemoryStore()
        self.solo_group = init(store=self._store, rank=0, size=1)

    def join(self, timeout: float) -> ProcessGroup:
        """Wait until the session admits this process, and return its group.

        Args:
            timeout: seconds within which a session must be found.

        Raises:
            SystemExit: with exit code 0; the session has ended.
            RendezvousError: there is no session, or this process cannot connect to its ranks.
            StateLost: as in :meth:`InvitationWaiter.await_invitation`.
            StoreError: the store is not reachable.
        """
        deadline = Deadline(timeout)
        place = open_point(timeout=timeout)
        try:
            candidate = InvitationWaiter(place, deadline, self.may_start)
            for attempt in range(_MAX_JOIN_ATTEMPTS):
                invitation = candidate.await_invitation()
                if isinstance(invitation, StartedSession):
                    self.started_session = invitation.ident
                    return _solo_group(place, invitation.ident)
                # If the store is not reachable, the next await_invitation waits for it.
                with contextlib.suppress(GroupError, RendezvousError, StoreError, WireError):
                    if (group := self._rendezvous(place, invitation)) is not None:
                        failure_report.joined()
                        return group
                time.sleep(_RETRY_DELAY_S * 2**attempt)
            raise RendezvousError(
                f"job {place.job!r}: the session invited this process {_MAX_JOIN_ATTEMPTS} times, and "
                "each time some processes could not connect"
            )
        except BaseException:
            place.close()
            raise

    def close(self) -> None:
        """Close the group of size 1, which has been replaced."""
        self.solo_group.close()
        self._store.close()

    def _rendezvous(self, place: RendezvousPoint, invitation: Invitation) -> ProcessGroup | None:
        """Return the group of an invitation; None: the ranks continued without this process."""
        group, release = _connect(invitation, place)
        try:
            with _connect_store(place) as store:
                verdict = self._verdict(store, invitation, group)
        except (StoreError, WireError):
            verdict = _REJECTED
        if verdict != _ACCEPTED:
            group.world.close(_CLOSE_TIMEOUT_S)
            return None
        release.then = lambda _: place.close()
        return group

    def _verdict(self, store: Store, invitation: Invitation, group: ProcessGroup) -> bytes:
        """Return the decision of the ranks; they may wait for a slow rank as long as in any collective."""
        deadline = Deadline(invitation.timeout)
        while group.state == "open" and not deadline.expired:
            with contextlib.suppress(StoreTimeout):
                return store.get(invitation.verdict_key, min(POLL_TIMEOUT_S, deadline.remaining()))
        return _REJECTED


def _invitation(group: ProcessGroup, name: str, within: float, rank: int, size: int) -> Invitation:
    """Return the invitation of ``rank`` to the rendezvous ``name`` in which ``group`` grows to ``size``."""
    links, tuning = group._links, group._spec.tuning
    return Invitation(
        meeting=name, rank=rank, size=size, epoch=group.epoch,
        name=group._history.spec.name, timeout=group.timeout,
        concurrency=tuning.concurrency, algorithm=tuning.algorithm,
        backend=links.backend.name, options=dict(links.options), within=within,
    )  # fmt: skip


def _connect(
    invitation: Invitation, place: RendezvousPoint, check: Callable[[], None] = nothing
) -> tuple[ProcessGroup, _Release]:
    """Make the new group and connect all its ranks; ``check``: see `rendezvous_again_at`."""
    deadline = Deadline(invitation.within)
    membership = rendezvous_again_at(
        place, invitation.meeting, rank=invitation.rank, size=invitation.size, timeout=invitation.within,
        check=check,
    )  # fmt: skip
    release = _Release(membership.release)
    group = world_group(
        replace(membership, release=release), backend_factory(invitation.backend), name=invitation.name,
        timeout=invitation.timeout, options=invitation.options,
        tuning=Tuning.chosen(invitation.concurrency, invitation.algorithm),
        within=max(deadline.remaining(), _CLOSE_TIMEOUT_S),
    )  # fmt: skip
    try:
        group._set_previous_epoch(invitation.epoch)
        group.barrier(timeout=max(deadline.remaining(), _CLOSE_TIMEOUT_S)).wait()
    except BaseException:
        # No abort, which would break the session of ranks that have connected.
        group.world.close(_CLOSE_TIMEOUT_S)
        raise
    return group, release


def _solo_group(place: RendezvousPoint, ident: int) -> ProcessGroup:
    """Return a group of size 1 that other processes can join: the first group of a session."""
    timeout = config.TIMEOUT.get()
    membership = rendezvous_again_at(place, f"{LOBBY}/{ident:016x}/alone", rank=0, size=1, timeout=timeout)
    release = _Release(membership.release)
    release.then = lambda _: place.close()
    return world_group(
        replace(membership, release=release), backend_factory("native"), name="world", timeout=timeout,
        tuning=Tuning.chosen(), options={},
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


def _connect_store(place: RendezvousPoint) -> Store:
    """Connect to the store at ``place``, which may have been restarted since the ranks met."""
    return place.store.clone(STORE_TIMEOUT_S, accept_new_data=True)


def _backend_is_portable(group: ProcessGroup) -> bool:
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
