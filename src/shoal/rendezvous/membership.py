"""The result of a rendezvous, a :class:`Membership`, and the functions that return one."""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

from ..errors import AuthenticationError, StoreError, StoreTimeout, VersionMismatch, WireError, WireTimeout
from ..net import Deadline
from ..store import PrefixStore, Store
from .point import RendezvousPoint, checked_request, open_request
from .protocol import Rendezvous
from .venue import START_AGAIN, Request, Venue, nothing

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Membership:
    """One process's place in its job's world group.

    Attributes:
        rank, size: in the job's world group.
        local_rank, local_size: among the ranks on this host.
        store: shared by all ranks, with a prefix of job and epoch.
        job, epoch: the job, and the number of its restarts; traffic of another epoch is refused.
        launcher_job: the name of the job for users, if ``job`` only distinguishes its keys in the store from
            others; None: ``job``.
        secret: the job's secret; b"" only for a group of one.
        interface: the address that listeners bind to (loopback if all ranks are on this machine).
        ranks: if only some ranks of the world connect, their ranks in the world; empty: all do.
        status_page: if only some ranks connect: the ``status_page()`` of the backend that connects all.
        waits_for_stopped: the creator of the membership decides when a rank of this host whose process is
            stopped is lost; until then the others wait for it.
        host: identity of the host; ranks with equal values try shared memory first.
        place: the rendezvous point, where other ranks can join later; None: they cannot.
        meeting: name of the meeting that numbered the ranks; "": the first one of the job.
        advice: what the user should do if the ranks cannot connect, as the end of a sentence.
        lost: the ranks that are lost to this one, added before ``release``: it does not wait for them.
        release: called once, with a timeout in seconds, when the world group is closed: leaves the meeting,
            closes the store, and stops the server if this rank hosts it.
        abandon: called instead of ``release``, with the error, if this rank could not connect: also notifies
            the other ranks, which then fail to connect for the same reason.
        check: called by backends a few times a second while they connect: raises RendezvousError if a rank
            died or abandoned the meeting. Takes the ranks whose deaths count (default: all): a rank that is
            connected to all others may have ended normally.
        connected: called, possibly more than once, when this rank no longer needs the store to connect: by
            backends before they notify the other ranks of that, and when the backend is created.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    store: Store
    job: str
    epoch: int
    secret: bytes = field(repr=False)
    interface: str
    host: str
    ranks: tuple[int, ...] = ()
    status_page: object = field(default=None, compare=False, repr=False)
    waits_for_stopped: bool = False
    place: RendezvousPoint | None = None
    meeting: str = ""
    advice: str = START_AGAIN
    launcher_job: str | None = None
    lost: set[int] = field(default_factory=set, compare=False, repr=False)
    release: Callable[[float], None] = field(default=nothing, compare=False, repr=False)
    abandon: Callable[[BaseException], None] = field(default=nothing, compare=False, repr=False)
    check: Callable[..., None] = field(default=nothing, compare=False, repr=False)
    connected: Callable[[], None] = field(default=nothing, compare=False, repr=False)

    @property
    def job_name(self) -> str:
        """The name of the job in ``shoal top``, metrics, traces and dumps."""
        return self.job if self.launcher_job is None else self.launcher_job

    @property
    def world_name(self) -> str:
        """The name of the world among those with this :attr:`job_name`; "" for the first meeting of a job."""
        return self.meeting or (self.job if self.job != self.job_name else "")


#: seconds for the transition from one job's server to the next one's at the same address
_SERVER_HANDOVER_S = 5.0
_RETRY_INTERVAL_S = 0.02
#: seconds for the others to read why the meeting failed, before the store ends with this rank
_FAILURE_READ_TIMEOUT_S = 3.0
#: limits in seconds of the time in which the store must answer a rank that leaves
_MIN_LEAVE_TIMEOUT_S, _MAX_LEAVE_TIMEOUT_S = 1.0, 5.0


def rendezvous(
    url: str | None = None,
    *,
    store: object = None,
    rank: int | None = None,
    size: int | None = None,
    timeout: float | None = None,
    secret: str | bytes | None = None,
    host: str | None = None,
    job: str | None = None,
) -> Membership:
    """Meet the other processes of the job.

    Args:
        url: ``env://`` (the default), ``tcp://host:port``, ``file:///path``, or a scheme registered by
            :func:`register_store` or :func:`register_rendezvous`.
        store: a store to meet in instead, of shoal or of ``torch.distributed``; it is not closed. Without a
            secret the ranks agree on one in it.
        rank: of this process; None: from the launcher, else in order of arrival.
        size: number of processes; None: from the launcher, else from the job's record in the store.
        timeout: seconds until all must have arrived; None: ``SHOAL_TIMEOUT``.
        secret: the job's; None: ``SHOAL_SECRET``, or the file that ``SHOAL_SECRET_FILE`` names.
        host: identity of this host; None: ``SHOAL_HOST_ID``, or that of the machine.
        job: name of the job, the same for all its processes; None: ``SHOAL_JOB``, or from the launcher.

    Raises:
        UsageError, ConfigurationError: an argument or variable is invalid.
        RendezvousError: the size or rank contradicts that of others, or the group is full.
        RendezvousTimeout: names the missing ranks.
        AuthenticationError, VersionMismatch, StoreError: another secret or version of the store or of other
            processes, or a failure of the store.
    """
    request = checked_request(
        url, store=store, rank=rank, size=size, timeout=timeout, secret=secret, host=host, job=job
    )
    return open_and_rendezvous(request, store)


def open_and_rendezvous(request: Request, store: object = None) -> Membership:
    """Open the rendezvous point of a checked request, or the one in ``store``, and meet there."""
    return open_and_meet(request, rendezvous_at, store)


def open_and_meet(request: Request, meet: Callable[[RendezvousPoint], T], store: object = None) -> T:
    """Open the rendezvous point of a checked request, or the one in ``store``; return ``meet(point)``.

    A store (not ``store``) that is lost before all have met is opened again: it belonged to a job that just
    ended here, and rank 0 of this job will serve another one. If this raises, the point is closed.
    """
    settled: Deadline | None = None
    while True:
        place = None
        try:
            place = open_request(request, store)
            return meet(place)
        except BaseException as error:
            if place is not None:
                place.close()
                settled = None
            settled = settled or Deadline(_SERVER_HANDOVER_S)
            if store is not None or not _is_store_lost(error) or settled.expired or request.deadline.expired:
                raise
        time.sleep(_RETRY_INTERVAL_S)


def _is_store_lost(error: BaseException) -> bool:
    if isinstance(error, (StoreTimeout, WireTimeout, AuthenticationError, VersionMismatch)):
        return False
    return isinstance(error, (StoreError, WireError))


def rendezvous_at(place: RendezvousPoint, check: Callable[[], None] = nothing) -> Membership:
    """Meet the other ranks of the job, whose number is fixed, at an open rendezvous point.

    Releasing the membership closes the point. If this raises (as of :func:`rendezvous`), the caller must
    close it. ``check`` is called while waiting for others; a RendezvousError that it raises ends the meeting
    for all.
    """
    venue = place.venue
    meeting = Rendezvous(place, check)
    try:
        meeting.join()
    except BaseException as error:
        if venue.others_disconnected is not None:
            meeting.cancel(error)
            serve_until_read(venue.others_disconnected)
        raise
    try:
        venue.on_complete()
        machines = meeting.machines
        is_single = meeting.size == 1  # there is no other rank to authenticate
        secret = place.given_secret if is_single else place.secret(machines, store=meeting.round_store)
        interface = place.interface(machines)
        membership = _membership(meeting, place, secret, interface)
        return _outliving_membership(membership, meeting, venue) if venue.leaves_store_early else membership
    except BaseException as error:
        meeting.fail(error)
        if venue.others_disconnected is not None:
            serve_until_read(venue.others_disconnected)
        raise


def rendezvous_again_at(
    place: RendezvousPoint,
    name: str,
    *,
    rank: int,
    size: int,
    timeout: float,
    check: Callable[[], None] = nothing,
) -> Membership:
    """Meet again at a rendezvous point that stays open, under a ``name`` that is unique there.

    All must arrive within ``timeout`` seconds. ``check`` and the errors are those of :func:`rendezvous_at`.
    """
    store = PrefixStore(name, place.store.clone(timeout, accept_new_data=True))
    venue = replace(
        place.venue, store=store, rank=rank, size=size,
        local_rank=None, local_size=None, others_disconnected=None, on_complete=nothing, close=nothing,
    )  # fmt: skip
    request = replace(place.request, rank=rank, size=size, deadline=Deadline(timeout))
    beside = replace(place, venue=venue, request=request, meeting=name)
    try:
        membership = replace(rendezvous_at(beside, check), place=place)
    except BaseException:
        beside.close()
        raise
    membership.store.timeout = place.venue.store.timeout
    return membership


def _membership(meeting: Rendezvous, place: RendezvousPoint, secret: bytes, interface: str) -> Membership:
    venue, local = place.venue, meeting.local_ranks
    lost: set[int] = set()
    release = _make_release(meeting, place, lost)

    def abandon(error: BaseException) -> None:
        meeting.fail(error)
        release(_FAILURE_READ_TIMEOUT_S)

    return Membership(
        rank=meeting.rank,
        size=meeting.size,
        local_rank=local.index(meeting.rank) if venue.local_rank is None else venue.local_rank,
        local_size=len(local) if venue.local_size is None else venue.local_size,
        store=meeting.store,
        job=place.job,
        epoch=place.epoch,
        secret=secret,
        interface=interface,
        host=place.host,
        place=place,
        meeting=place.meeting,
        advice=place.venue.advice,
        launcher_job=place.request.launcher_job,
        lost=lost,
        release=release,
        abandon=abandon,
        check=meeting.check,
    )


def _outliving_membership(membership: Membership, meeting: Rendezvous, venue: Venue) -> Membership:
    """Return a membership that outlives its meeting: the ranks leave the meeting once they are connected.

    Its keys are beside the meeting's, under a name that is unique at this rendezvous point.
    """
    name = meeting.store.compare_set("lasting", b"", secrets.token_hex(8).encode()).decode()
    store = PrefixStore(name, venue.store.clone())

    def abandon(error: BaseException) -> None:
        try:
            membership.abandon(error)
        finally:
            store.close()

    return replace(
        membership,
        store=store,
        place=None,  # it is closed with the meeting
        connected=partial(membership.release, _MAX_LEAVE_TIMEOUT_S),
        release=lambda _: store.close(),
        abandon=abandon,
    )


def serve_until_read(others_disconnected: Callable[[], bool]) -> None:
    """Serve the store until the others have read the last keys, such as why the meeting failed."""
    deadline = Deadline(_FAILURE_READ_TIMEOUT_S)
    while not (others_disconnected() or deadline.expired):
        time.sleep(_RETRY_INTERVAL_S)


def _make_release(
    meeting: Rendezvous, place: RendezvousPoint, lost: Collection[int]
) -> Callable[[float], None]:
    released = threading.Event()

    def release(timeout: float) -> None:
        if released.is_set():
            return
        released.set()
        try:
            # The store may have ended with its host: there is no rank left to notify.
            with contextlib.suppress(StoreError, WireError):
                meeting.leave(min(max(timeout, _MIN_LEAVE_TIMEOUT_S), _MAX_LEAVE_TIMEOUT_S))
                if place.venue.others_disconnected is not None:
                    meeting.wait_until_all_left(timeout, place.venue.others_disconnected, lost)
        finally:
            place.close()

    return release
