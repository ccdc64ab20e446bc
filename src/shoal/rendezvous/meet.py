"""From a URL to a :class:`Membership`: open the place, meet the others, find out who is where."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence

from .. import config
from ..errors import (
    AuthenticationError,
    ConfigurationError,
    StoreError,
    StoreTimeout,
    UsageError,
    VersionMismatch,
    WireError,
    WireTimeout,
)
from ..wire import Deadline
from .given import given
from .host import LOOPBACK, address_towards, here, is_mine, resolve
from .meeting import Meeting
from .membership import Membership
from .private import user_secret
from .record import Descriptor
from .venue import Request, Venue, open_venue, parse_url

#: seconds for the change from one job's server to the next one's at the same address
_SETTLING_TIME = 5.0
_PAUSE = 0.02
#: seconds for the others to hear why the meeting failed, before the store goes with this rank
_LETTING_GO = 3.0


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
        url: ``env://`` (the default), ``tcp://host:port``, ``file:///path``, or a scheme given to
            :func:`register_store` or :func:`register_rendezvous`.
        store: where to meet instead: a store of ours or of ``torch.distributed``, which stays the
            caller's.  Without a secret the ranks agree on one in it.
        rank: of this process; None: as the launcher says, else in order of arrival.
        size: number of processes; None: as the launcher says, else as the job's record in the store.
        timeout: seconds until all must be there; None: ``SHOAL_TIMEOUT``.
        secret: the job's; None: ``SHOAL_SECRET``, or the file that ``SHOAL_SECRET_FILE`` names.
        host: identity of this host; None: ``SHOAL_HOST_ID``, or the machine's own.
        job: name of the job: those of one name meet; None: ``SHOAL_JOB``, or as the launcher says.

    Raises:
        UsageError, ConfigurationError: an argument or variable that cannot be right.
        RendezvousError: a size or rank that the others contradict, or a group that is full.
        RendezvousTimeout: names the ranks that did not come.
        AuthenticationError, VersionMismatch, StoreError: the store, or the others, are strangers.
    """
    _check_numbers(rank, size)
    if job is not None:
        _check_job(job)
    if url is not None and store is not None:
        raise UsageError(f"url={url!r} and store=: expected one place to meet")
    if isinstance(secret, str):
        secret = secret.encode()
    if secret is not None and not isinstance(secret, bytes):
        raise UsageError(f"secret: expected str or bytes, not {type(secret).__name__}")
    seconds = config.TIMEOUT.get() if timeout is None else timeout
    request = Request(
        parse_url("env://" if url is None else url),
        rank,
        size,
        config.secret() if secret is None else secret,
        Deadline(seconds),
        host=host,
        job=job,
    )
    return meet(request) if store is None else _meet_in(given(store, request), request)


def meet(request: Request) -> Membership:
    """Serve a checked request.

    A store that goes away before all have met is looked for again: it belonged to a job that ended here
    just now, and rank 0 of ours will serve another.
    """
    settled: Deadline | None = None
    while True:
        venue = None
        try:
            venue = open_venue(request)
            return attend(venue, request)
        except BaseException as error:
            if venue is not None:
                _close(venue)
                settled = None
            settled = settled or Deadline(_SETTLING_TIME)
            if not _store_went_away(error) or settled.expired or request.deadline.expired:
                raise
        time.sleep(_PAUSE)


def _meet_in(venue: Venue, request: Request) -> Membership:
    try:
        return attend(venue, request)
    except BaseException:
        _close(venue)
        raise


def _store_went_away(error: BaseException) -> bool:
    if isinstance(error, (StoreTimeout, WireTimeout, AuthenticationError, VersionMismatch)):
        return False
    return isinstance(error, (StoreError, WireError))


def attend(venue: Venue, request: Request) -> Membership:
    """Meet the others at ``venue``."""
    environ = request.environ
    machine = here()
    host = request.host or config.HOST_ID.get(environ) or machine.machine
    named = venue.job if request.job is None else request.job
    job = config.JOB.get(environ) if named is None else named
    _check_job(job)
    epoch = config.EPOCH.get(environ) if venue.epoch is None else venue.epoch
    meeting = Meeting(
        venue.store,
        rank=venue.rank,
        size=venue.size,
        job=job,
        epoch=epoch,
        host=host,
        here=machine,
        deadline=request.deadline,
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
        secret = _secret(meeting, venue, request)
        interface = _interface(meeting.members, venue, config.INTERFACE.get(environ))
    except BaseException as error:
        meeting.fail(error)
        if venue.alone is not None:
            _let_go(venue.alone)
        raise
    together = [rank for rank, member in enumerate(meeting.members) if member.host == host]
    release = _release(meeting, venue)

    def abandon(error: BaseException) -> None:
        meeting.fail(error)
        release(_LETTING_GO)

    return Membership(
        rank=meeting.rank,
        size=meeting.size,
        local_rank=together.index(meeting.rank) if venue.local_rank is None else venue.local_rank,
        local_size=len(together) if venue.local_size is None else venue.local_size,
        store=meeting.store,
        job=job,
        epoch=epoch,
        secret=secret,
        interface=interface,
        host=host,
        release=release,
        abandon=abandon,
        look=meeting.look,
    )


def _let_go(alone: Callable[[], bool]) -> None:
    """Serve the store until the others have read why the meeting failed."""
    deadline = Deadline(_LETTING_GO)
    while not (alone() or deadline.expired):
        time.sleep(_PAUSE)


def _check_job(job: str) -> None:
    try:
        if isinstance(job, str):
            config.job_name(job)
            return
    except ValueError:
        pass
    shown = repr(job)
    raise UsageError(
        f"job={shown if len(shown) <= 80 else shown[:80] + '...'}: expected {config.JOB_NAME} as a job's name"
    )


def _check_numbers(rank: int | None, size: int | None) -> None:
    if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
        raise UsageError(f"size={size!r}: expected a whole number from 1")
    if rank is not None and (
        not isinstance(rank, int) or isinstance(rank, bool) or rank < 0 or (size is not None and rank >= size)
    ):
        raise UsageError(
            f"rank={rank!r}: expected a whole number from 0" + ("" if size is None else f" to {size - 1}")
        )


def _secret(meeting: Meeting, venue: Venue, request: Request) -> bytes:
    """The secret of the job: no two ranks talk without one."""
    secret = request.secret or venue.secret
    if secret or meeting.size == 1:
        return secret
    if venue.private:
        return meeting.agree_on_secret()
    machines = sorted({member.machine for member in meeting.members})
    if len(machines) == 1:
        return user_secret()
    names = ", ".join(machine.split("/")[0] for machine in machines)
    raise ConfigurationError(
        f"the ranks of this job run on several hosts ({names}) and the job has no secret: set the same one "
        "for all, SHOAL_SECRET=$(openssl rand -hex 16) (or SHOAL_SECRET_FILE, the path of a file)"
    )


def _interface(members: Sequence[Descriptor], venue: Venue, configured: str | None) -> str:
    """The address that this rank's listeners bind to."""
    if configured is not None:
        try:
            address = resolve(configured, 0)[0]
        except OSError as error:
            raise ConfigurationError(f"SHOAL_INTERFACE={configured!r} is no address: {error}") from error
        if not is_mine(address):
            raise ConfigurationError(f"SHOAL_INTERFACE={configured!r} is not an address of this host")
        return address
    if len({member.machine for member in members}) == 1:
        return LOOPBACK
    return address_towards(venue.address or LOOPBACK)


def _release(meeting: Meeting, venue: Venue) -> Callable[[float], None]:
    released = threading.Event()

    def release(timeout: float) -> None:
        if released.is_set():
            return
        released.set()
        try:
            # The store may be gone with its host, and there is nobody left to tell.
            with contextlib.suppress(StoreError, WireError):
                meeting.leave()
                if venue.alone is not None:
                    meeting.wait_until_all_left(timeout, venue.alone)
        finally:
            _close(venue)

    return release


def _close(venue: Venue) -> None:
    try:
        venue.store.close()
    finally:
        venue.close()
