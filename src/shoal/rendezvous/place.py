"""An opened place: what a process knows of its job before it has met anybody.

    with open_place("tcp://10.0.0.1:29400") as place:       # store, secret and interface; no rank yet
        place.store.set("here", ...)

A fixed number of ranks then meets there (:mod:`shoal.rendezvous.meet`); whoever comes and goes as it likes
needs no more than the place.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from .. import config
from ..common.keywords import checked_count
from ..errors import ConfigurationError, UsageError
from ..net import Deadline
from ..store import Store
from ..store.external.url import redacted
from .caller_store import given
from .host import LOOPBACK, Here, address_towards, here, is_loopback, is_mine, resolve
from .private import user_secret
from .record import room_number, root_of
from .venue import Request, Venue, open_venue, parse_url


@dataclass(frozen=True, slots=True)
class RendezvousPoint:
    """Where the processes of a job find one another; a context manager, which closes the store.

    Attributes:
        venue: what the handler of the URL found.
        request: what this process wants.
        job, epoch: whose place it is; an epoch is one incarnation of a job.
        host: identity of this host, as the others are told.
        here: the machine and process itself.
        meeting: name of the meeting, where processes meet beside those that met first; "": the first one.
    """

    venue: Venue
    request: Request
    job: str
    epoch: int
    host: str
    here: Here
    meeting: str = ""

    @classmethod
    def at(cls, venue: Venue, request: Request) -> RendezvousPoint:
        """The place of ``venue`` for the job that request, venue or environment name.

        Raises:
            UsageError: that is no name for a job.
        """
        environ = request.environ
        machine = here()
        named = venue.job if request.job is None else request.job
        job = config.JOB.get(environ) if named is None else named
        check_job(job)
        epoch = config.EPOCH.get(environ) if venue.epoch is None else venue.epoch
        host = request.host or config.HOST_ID.get(environ) or machine.machine
        return cls(venue, request, job, epoch, host, machine)

    @property
    def store(self) -> Store:
        """The keys of this epoch of the job, which all its processes share."""
        return root_of(self.venue.store, self.job, self.epoch)

    @property
    def room(self) -> int:
        """The number of the room in which the next ranks meet: it counts the groups formed here."""
        return room_number(self.store)

    @property
    def given_secret(self) -> bytes:
        """The secret that the caller or the venue gave; empty if neither did."""
        return self.request.secret or self.venue.secret

    def secret(self, machines: Collection[str] | None = None, *, store: Store | None = None) -> bytes:
        """The job's secret, without which no two processes talk; never empty.

        Args:
            machines: on which all processes of the job run; None: unknown, so the one that serves the store.
            store: what processes at a private place agree in; None: :attr:`store`.

        Raises:
            ConfigurationError: none was given, and the place is neither private nor on this host alone.
        """
        if self.given_secret:
            return self.given_secret
        if self.venue.private:
            return agree_on_secret(self.store if store is None else store)
        if machines is None:
            address = self.venue.address or LOOPBACK
            alone, hosts = is_loopback(address), [address]
        else:
            alone, hosts = len(machines) == 1, [machine.split("/")[0] for machine in sorted(machines)]
        if alone:
            return user_secret()
        raise ConfigurationError(
            f"the ranks of this job run on several hosts ({', '.join(hosts)}) and the job has no secret: set "
            "the same one for all, SHOAL_SECRET=$(openssl rand -hex 16) (or SHOAL_SECRET_FILE, the path of a "
            "file)"
        )

    def interface(self, machines: Collection[str] | None = None) -> str:
        """The address that this process's listeners bind to.

        Args:
            machines: on which all processes of the job run; None: unknown, so the one towards the store.

        Raises:
            ConfigurationError: ``SHOAL_INTERFACE`` is no address of this host.
        """
        configured = config.INTERFACE.get(self.request.environ)
        if configured is not None:
            try:
                address = resolve(configured, 0)[0]
            except OSError as error:
                raise ConfigurationError(f"SHOAL_INTERFACE={configured!r} is no address: {error}") from error
            if not is_mine(address):
                raise ConfigurationError(f"SHOAL_INTERFACE={configured!r} is not an address of this host")
            return address
        if machines is not None and len(machines) == 1:
            return LOOPBACK
        return address_towards(self.venue.address or LOOPBACK)

    def close(self) -> None:
        """Close the store, and let go of what the venue holds."""
        try:
            self.venue.store.close()
        finally:
            self.venue.close()

    def __enter__(self) -> RendezvousPoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_place(
    url: str | None = None,
    *,
    store: object = None,
    rank: int | None = None,
    size: int | None = None,
    timeout: float | None = None,
    secret: str | bytes | None = None,
    host: str | None = None,
    job: str | None = None,
) -> RendezvousPoint:
    """Open the place that the arguments of :func:`shoal.rendezvous.rendezvous` name; meet nobody.

    Raises:
        UsageError, ConfigurationError: an argument or variable that cannot be right.
        StoreError, AuthenticationError, VersionMismatch: the store cannot be reached, or is a stranger's.
    """
    wanted = checked_request(
        url, store=store, rank=rank, size=size, timeout=timeout, secret=secret, host=host, job=job
    )
    return opened(wanted, store)


def opened(request: Request, store: object = None) -> RendezvousPoint:
    """The place of a checked request, or in ``store``."""
    venue = open_venue(request) if store is None else given(store, request)
    try:
        return RendezvousPoint.at(venue, request)
    except BaseException:
        venue.store.close()
        venue.close()
        raise


def checked_request(
    url: str | None,
    *,
    store: object,
    rank: int | None,
    size: int | None,
    timeout: float | None,
    secret: str | bytes | None,
    host: str | None,
    job: str | None,
) -> Request:
    """The request that these arguments make.

    Raises:
        UsageError: an argument cannot be right.
    """
    _check_numbers(rank, size)
    if job is not None:
        check_job(job)
    if url is not None and store is not None:
        raise UsageError(f"url={redacted(str(url))!r} and store=: expected one place to meet")
    if isinstance(secret, str):
        secret = secret.encode()
    if secret is not None and not isinstance(secret, bytes):
        raise UsageError(f"secret: expected str or bytes, not {type(secret).__name__}")
    return Request(
        parse_url("env://" if url is None else url),
        rank,
        size,
        config.secret() if secret is None else secret,
        Deadline(config.TIMEOUT.get() if timeout is None else timeout),
        host=host,
        job=job,
    )


def agree_on_secret(store: Store) -> bytes:
    """A secret that all processes share through ``store``.  Only for stores that nobody else can read."""
    return store.compare_set("secret", b"", secrets.token_hex(32).encode())


def check_job(job: Any) -> None:
    """Refuse what cannot name a job.

    Raises:
        UsageError: with what was expected.
    """
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
    if size is not None:
        checked_count("size", size)
    if rank is not None and (
        not isinstance(rank, int) or isinstance(rank, bool) or rank < 0 or (size is not None and rank >= size)
    ):
        raise UsageError(
            f"rank={rank!r}: expected a whole number from 0" + ("" if size is None else f" to {size - 1}")
        )
