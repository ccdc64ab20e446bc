"""The meeting of a fixed number of ranks at a rendezvous point, which results in a :class:`Membership`.

:mod:`shoal.rendezvous.place` opens the rendezvous point.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from ..errors import (
    AuthenticationError,
    StoreError,
    StoreTimeout,
    VersionMismatch,
    WireError,
    WireTimeout,
)
from ..net import Deadline
from ..store import PrefixStore
from .meeting import Meeting
from .membership import Membership
from .place import RendezvousPoint, checked_request, opened
from .venue import Request, Venue, nothing

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
    if store is None:
        return meet(request)
    place = opened(request, store)
    try:
        return meet_at(place)
    except BaseException:
        place.close()
        raise


def meet(request: Request) -> Membership:
    """Open the rendezvous point of a checked request and meet there.

    A store that is lost before all have met is opened again: it belonged to a job that just ended here, and
    rank 0 of this job will serve another one.
    """
    settled: Deadline | None = None
    while True:
        place = None
        try:
            place = opened(request)
            return meet_at(place)
        except BaseException as error:
            if place is not None:
                place.close()
                settled = None
            settled = settled or Deadline(_SERVER_HANDOVER_S)
            if not _store_went_away(error) or settled.expired or request.deadline.expired:
                raise
        time.sleep(_RETRY_INTERVAL_S)


def _store_went_away(error: BaseException) -> bool:
    if isinstance(error, (StoreTimeout, WireTimeout, AuthenticationError, VersionMismatch)):
        return False
    return isinstance(error, (StoreError, WireError))


def meet_at(place: RendezvousPoint, look: Callable[[], None] = nothing) -> Membership:
    """Meet the other ranks of the job, whose number is fixed, at an open rendezvous point.

    Releasing the membership closes the point. If this raises, the caller must close it.

    Args:
        look: as of :func:`meet_beside`.
    """
    venue = place.venue
    meeting = Meeting(
        place.store,
        rank=venue.rank,
        size=venue.size,
        job=place.job,
        epoch=place.epoch,
        host=place.host,
        here=place.here,
        deadline=place.request.deadline,
        look=look,
        advice=venue.advice,
        name=place.meeting,
    )
    try:
        meeting.join()
    except BaseException as error:
        if venue.alone is not None:
            meeting.call_off(error)
            _let_go(venue.alone)
        raise
    try:
        venue.met()
        machines = meeting.machines
        alone = meeting.size == 1  # there is no other rank to authenticate
        secret = place.given_secret if alone else place.secret(machines, store=meeting.room_store)
        interface = place.interface(machines)
        membership = _membership(meeting, place, secret, interface)
        return _lasting(membership, meeting, venue) if venue.brief else membership
    except BaseException as error:
        meeting.fail(error)
        if venue.alone is not None:
            _let_go(venue.alone)
        raise


def meet_beside(
    place: RendezvousPoint,
    name: str,
    *,
    rank: int,
    size: int,
    timeout: float,
    look: Callable[[], None] = nothing,
) -> Membership:
    """Meet again at a rendezvous point that stays open, under a ``name`` that is unique there.

    Args:
        rank, size: in this meeting.
        timeout: seconds until all must have arrived.
        look: called while waiting for others; a RendezvousError that it raises ends the meeting for all.

    Raises:
        RendezvousError, StoreError: as of :func:`rendezvous`.
    """
    store = PrefixStore(name, place.store.clone(timeout, accept_new_data=True))
    venue = replace(
        place.venue, store=store, rank=rank, size=size,
        local_rank=None, local_size=None, alone=None, met=nothing, close=nothing,
    )  # fmt: skip
    request = replace(place.request, rank=rank, size=size, deadline=Deadline(timeout))
    beside = replace(place, venue=venue, request=request, meeting=name)
    try:
        membership = replace(meet_at(beside, look), place=place)
    except BaseException:
        beside.close()
        raise
    membership.store.timeout = place.venue.store.timeout
    return membership


def _membership(meeting: Meeting, place: RendezvousPoint, secret: bytes, interface: str) -> Membership:
    venue = place.venue
    release = _release(meeting, place)

    def abandon(error: BaseException) -> None:
        meeting.fail(error)
        release(_FAILURE_READ_TIMEOUT_S)

    return Membership(
        rank=meeting.rank,
        size=meeting.size,
        local_rank=meeting.together.index(meeting.rank) if venue.local_rank is None else venue.local_rank,
        local_size=len(meeting.together) if venue.local_size is None else venue.local_size,
        store=meeting.store,
        job=place.job,
        epoch=place.epoch,
        secret=secret,
        interface=interface,
        host=place.host,
        place=place,
        meeting=place.meeting,
        advice=place.venue.advice,
        release=release,
        abandon=abandon,
        look=meeting.look,
    )


def _lasting(membership: Membership, meeting: Meeting, venue: Venue) -> Membership:
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


def _let_go(alone: Callable[[], bool]) -> None:
    """Serve the store until the others have read why the meeting failed."""
    deadline = Deadline(_FAILURE_READ_TIMEOUT_S)
    while not (alone() or deadline.expired):
        time.sleep(_RETRY_INTERVAL_S)


def _release(meeting: Meeting, place: RendezvousPoint) -> Callable[[float], None]:
    released = threading.Event()

    def release(timeout: float) -> None:
        if released.is_set():
            return
        released.set()
        try:
            # The store may have ended with its host: there is no rank left to notify.
            with contextlib.suppress(StoreError, WireError):
                meeting.leave(min(max(timeout, _MIN_LEAVE_TIMEOUT_S), _MAX_LEAVE_TIMEOUT_S))
                if place.venue.alone is not None:
                    meeting.wait_until_all_left(timeout, place.venue.alone)
        finally:
            place.close()

    return release
