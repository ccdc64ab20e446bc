"""An open rendezvous point: what a process knows of its job before it meets other processes.

    with open_point("tcp://10.0.0.1:29400") as place:       # store, secret and interface; no rank yet
        place.store.set("here", ...)

A fixed number of ranks then meets there (:mod:`shoal.rendezvous.membership`). Processes that may join and
leave at any time need only the rendezvous point.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from .. import config
from ..common.arguments import checked_count
from ..common.formatting import encodable
from ..common.process_identity import ProcessIdentity
from ..errors import ConfigurationError, UsageError
from ..net import Deadline
from ..store import Store
from ..store.external.url import redacted
from .addresses import LOOPBACK, address_on_route_to, is_local_address, is_loopback, resolve
from .records import job_keys
from .user_files import user_secret
from .venue import Request, Venue, caller_venue, open_venue, parse_url


@dataclass(frozen=True, slots=True)
class RendezvousPoint:
    """The open store of a job, and the identity of this process; a context manager that closes the store.

    Attributes:
        venue: opened by the handler of the URL.
        request: the arguments of this process.
        job, epoch: the job, and the number of its restarts.
        host: identity of this host for the other ranks.
        identity: of this process.
        meeting: name of a further meeting beside the first one; "": the first one.
    """

    venue: Venue
    request: Request
    job: str
    epoch: int
    host: str
    identity: ProcessIdentity
    meeting: str = ""

    @classmethod
    def at(cls, venue: Venue, request: Request) -> RendezvousPoint:
        """Return the point at ``venue`` for the job that the request, venue or environment name.

        Raises UsageError if the job's name is invalid.
        """
        environ = request.environ
        identity = ProcessIdentity.current()
        named = venue.job if request.job is None else request.job
        job = config.JOB.get(environ) if named is None else named
        check_job(job)
        epoch = config.EPOCH.get(environ) if venue.epoch is None else venue.epoch
        host = request.host or config.HOST_ID.get(environ) or identity.machine
        return cls(venue, request, job, epoch, encodable(host), identity)

    @property
    def store(self) -> Store:
        """The keys of this epoch of the job, shared by all its processes."""
        return job_keys(self.venue.store, self.job, self.epoch)

    @property
    def given_secret(self) -> bytes:
        """The secret from the caller or the venue; empty without one."""
        return self.request.secret or self.venue.secret

    def secret(self, machines: Collection[str] | None = None, *, store: Store | None = None) -> bytes:
        """Return the job's secret, with which all connections are authenticated; never empty.

        Args:
            machines: of all processes of the job; None: unknown, so that of the store's server.
            store: in which processes at a private venue agree on a secret; None: :attr:`store`.

        Raises:
            ConfigurationError: no secret was given, and the venue is neither private nor on this host only.
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
        """Return the address that this process's listeners bind to.

        Args:
            machines: of all processes of the job; None: unknown, so the address on the route to the store.

        Raises:
            ConfigurationError: ``SHOAL_INTERFACE`` is not an address of this host.
        """
        configured = configured_interface(self.request.environ)
        if configured is not None:
            return configured
        if machines is not None and len(machines) == 1:
            return LOOPBACK
        return address_on_route_to(self.venue.address or LOOPBACK)

    def close(self) -> None:
        """Close the store and release the resources of the venue."""
        try:
            self.venue.store.close()
        finally:
            self.venue.close()

    def __enter__(self) -> RendezvousPoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def named_interface(environ: Mapping[str, str]) -> str | None:
    """Return the numeric address that ``SHOAL_INTERFACE`` names, or None; ConfigurationError: it is none."""
    name = config.INTERFACE.get(environ)
    if name is None:
        return None
    try:
        return resolve(name, 0)[0]
    except (OSError, UnicodeError) as error:
        raise ConfigurationError(f"SHOAL_INTERFACE={name!r} is not an address: {error}") from error


def configured_interface(environ: Mapping[str, str]) -> str | None:
    """Like :func:`named_interface`; raises ConfigurationError also if it is not an address of this host."""
    address = named_interface(environ)
    if address is not None and not is_local_address(address):
        name = config.INTERFACE.get(environ)
        raise ConfigurationError(f"SHOAL_INTERFACE={name!r} is not an address of this host")
    return address


def open_point(
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
    """Open the rendezvous point for the arguments of :func:`shoal.rendezvous.rendezvous`, without a meeting.

    Raises:
        UsageError, ConfigurationError: an argument or variable is invalid.
        StoreError, AuthenticationError, VersionMismatch: the store cannot be reached, or has another secret
            or version.
    """
    wanted = checked_request(
        url, store=store, rank=rank, size=size, timeout=timeout, secret=secret, host=host, job=job
    )
    return open_request(wanted, store)


def open_request(request: Request, store: object = None) -> RendezvousPoint:
    """Open the rendezvous point of a checked request, or the one in ``store``."""
    venue = open_venue(request) if store is None else caller_venue(store, request)
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
    """Return the arguments as a request; UsageError if one is invalid."""
    _check_numbers(rank, size)
    if job is not None:
        check_job(job)
    if url is not None and store is not None:
        raise UsageError(f"url={redacted(str(url))!r} and store=: expected one place to meet")
    return Request(
        parse_url("env://" if url is None else url),
        rank,
        size,
        config.secret() if secret is None else config.encoded_secret(secret),
        Deadline(config.TIMEOUT.get() if timeout is None else timeout),
        host=host,
        job=job,
    )


def agree_on_secret(store: Store) -> bytes:
    """Return a secret shared through ``store``. Only for stores that no other user can read."""
    return store.compare_set("secret", b"", secrets.token_hex(32).encode())


def check_job(job: object) -> None:
    """Raise UsageError unless ``job`` is a valid name of a job."""
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
