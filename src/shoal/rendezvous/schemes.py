"""The handlers of ``env://``, ``tcp://`` and ``file://``, and of third-party servers.

Rank 0 of a ``tcp://`` rendezvous starts a server if none listens; if one listens but ends before rank 0 has
connected, rank 0 tries both again. Further worlds of the process at the same address use its server too, so
it runs until the last of them is closed.
"""

from __future__ import annotations

import ipaddress
import os
import random
import socket
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from urllib.parse import unquote, urlunsplit

from .. import config
from ..common.formatting import format_seconds
from ..errors import (
    AuthenticationError,
    ConfigurationError,
    RendezvousError,
    RendezvousTimeout,
    StoreError,
    StoreTimeout,
    UsageError,
    WireError,
)
from ..store import FileStore, MemoryStore, TCPStore, TCPStoreServer
from ..store.urls import open_external
from .addresses import address_on_route_to, is_local_address, is_loopback, loopback_error, resolve
from .launcher_variables import Launch, read
from .user_files import SET_A_SECRET, PrivateFile, user_secret
from .venue import Request, Venue, open_venue, parse_url, store_address

#: seconds between two lookups of a name that is not known yet
_NAME_RETRY_INTERVAL_S = 0.5
#: seconds between two attempts to start a server or connect to one
_SERVE_RETRY_INTERVAL_S = 0.02
#: ranks that may connect to a store server in a second, and the job size from which this limit applies
_CONNECTIONS_PER_S, _STAGGER_MIN_SIZE = 2500, 500


def env(request: Request) -> Venue:
    """``env://``: the venue that the launcher's environment names; a group of one without a launcher."""
    launch = read(request.environ)
    if launch is None:
        if request.size not in (None, 1) or request.rank not in (None, 0):
            raise ConfigurationError(
                f"env:// with rank={request.rank} and size={request.size}: the environment has no variables "
                "of a launcher, so no store is known; give shoal.init a url, or start with `shoal run`"
            )
        return Venue(MemoryStore(), 0, 1)
    if request.job is not None:
        launch = replace(launch, job=request.job)
    rank = launch.rank if request.rank is None else request.rank
    size = launch.size if request.size is None else request.size
    if (rank, size) != (launch.rank, launch.size):
        launch = replace(launch, local_rank=None, local_size=None)  # they are of another group
    try:
        venue = _launched(launch, replace(request, rank=rank, size=size))
    except ConfigurationError as error:
        raise ConfigurationError(f"{launch.launcher}: {error}") from None
    return replace(
        venue, local_rank=launch.local_rank, local_size=launch.local_size, job=launch.job, epoch=launch.epoch
    )


def _launched(launch: Launch, request: Request) -> Venue:
    if launch.url is not None:
        url = parse_url(launch.url)
        if url.scheme == "env":
            raise ConfigurationError("SHOAL_STORE must be the URL of a store, not env://")
        return open_venue(replace(request, url=url, job=launch.job))
    if request.size == 1:
        return Venue(MemoryStore(), 0, 1)
    meeting_file = PrivateFile(launch.job, launch.rank_variable)
    return Venue(
        meeting_file.store(request.deadline.timeout),
        request.rank,
        request.size,
        private=True,
        on_complete=meeting_file.unlink,
        close=meeting_file.close,
    )


def file(request: Request) -> Venue:
    """``file:///path``: a file that all ranks can lock, on a local or a shared disk."""
    if request.url.netloc not in ("", "localhost") or not request.url.path.startswith("/"):
        raise UsageError(f"rendezvous url {urlunsplit(request.url)!r}: expected file:///absolute/path")
    path = Path(unquote(request.url.path))
    if not path.parent.is_dir():
        raise UsageError(f"rendezvous file {str(path)!r}: there is no directory {str(path.parent)!r}")
    store = FileStore(path, timeout=request.deadline.timeout)
    return Venue(store, request.rank, request.size, private=True)


def tcp(request: Request) -> Venue:
    """``tcp://host:port``: a store server, which rank 0 starts if none listens there.

    If the size is given and ranks are not, the first process that can bind the address starts it.
    Over loopback, a job without a secret uses that of its user.
    """
    host, port = _host_and_port(request)
    address = _address(host, port, request)
    if is_loopback(address) and (trouble := loopback_error()):
        raise RendezvousError(f"rendezvous at {host}:{port}: {trouble}")
    secret = request.secret or user_secret()
    may_serve = request.serves and request.rank in (0, None) and request.size is not None
    serves = may_serve and is_local_address(address)
    if not serves:
        time.sleep(_before_first_try(request))
    while True:
        hosted = share(address, port, secret, start=serves)
        try:
            timeout = request.deadline.remaining()
            store = TCPStore(address, port, secret, timeout=timeout, wait_for_server=not serves)
            break
        except BaseException as error:
            if hosted is not None:
                hosted.close()
            if isinstance(error, StoreTimeout):
                raise RendezvousTimeout(
                    f"rendezvous: {_server_of(request)} is late or has ended: {error}"
                ) from None  # the message contains the cause
            if isinstance(error, AuthenticationError) and not request.secret:
                raise AuthenticationError(
                    f"{error}. This process was given no secret, so it used the one that the processes of "
                    "its user share on this host; the store was started by another user, with a secret, or "
                    f"with another TMPDIR: {SET_A_SECRET}"
                ) from error
            if not isinstance(error, StoreError):
                raise
        # The port was in use, but no server listens there: it is the local port of a connection, which will
        # be closed, or that of a server that has ended since.
        if request.deadline.expired:
            raise RendezvousTimeout(
                f"rendezvous: {'this process' if request.rank is None else 'rank 0'} cannot serve the store "
                f"at {host}:{port}: another socket has used the port for "
                f"{format_seconds(request.deadline.timeout)} without listening on it; choose a port outside "
                "of the range in /proc/sys/net/ipv4/ip_local_port_range"
            )
        time.sleep(_SERVE_RETRY_INTERVAL_S)
    venue = Venue(store, request.rank, request.size, secret=secret, address=address)
    if hosted is None:
        return venue
    return replace(venue, others_disconnected=partial(hosted.others_disconnected, store), close=hosted.close)


def _server_of(request: Request) -> str:
    if request.rank is None and request.size is not None:
        return "the process on the store's host that would serve the store"
    if request.rank == 0 and request.size is None:
        return "the process that starts the store (rank 0 does, if it is given size=)"
    return "rank 0, or the process that starts the store,"


def external(request: Request) -> Venue:
    """``etcd://``, ``redis://`` and the like: third-party servers, which cannot check shoal's secret."""
    if not request.secret:
        raise ConfigurationError(
            f"a job with a store at {request.url.scheme}:// needs a secret, because others may have access "
            "to the store: set the same one for every process, SHOAL_SECRET=$(openssl rand -hex 16) (or "
            "SHOAL_SECRET_FILE, the path of a file), or give secret="
        )
    job = config.JOB.get(request.environ) if request.job is None else request.job
    try:
        store = open_external(request.url, job=job, timeout=request.deadline.remaining())
    except StoreTimeout as error:
        raise RendezvousTimeout(f"rendezvous: {error}") from None  # the message contains the cause
    return Venue(store, request.rank, request.size, address=store_address(store))


def _before_first_try(request: Request) -> float:
    """Return the seconds until this rank connects, which spread the connections of a large job."""
    size = request.size or 0
    if size < _STAGGER_MIN_SIZE:
        return 0.0
    rank = random.randrange(size) if request.rank is None else request.rank
    return min(rank / _CONNECTIONS_PER_S, request.deadline.remaining() / 4)


def _host_and_port(request: Request) -> tuple[str, int]:
    text = urlunsplit(request.url)
    try:
        host, port = request.url.hostname, request.url.port
    except ValueError as error:
        raise UsageError(f"rendezvous url {text!r}: {error}") from None
    if not host or not port or request.url.path not in ("", "/"):
        raise UsageError(f"rendezvous url {text!r}: expected tcp://host:port with a port from 1 to 65535")
    return host, port


def _address(host: str, port: int, request: Request) -> str:
    """Return the numeric address to serve at and to connect to."""
    address, secret = _resolved(host, port, request), request.secret
    if secret and is_loopback(address) and not means_loopback(host):
        # Many systems map their own name to loopback in /etc/hosts, where other hosts cannot reach it.
        return address_on_route_to(address)
    if not secret and not is_loopback(address):
        raise ConfigurationError(
            f"rendezvous at {host}:{port} is beyond this host and the job has no secret: set the same one "
            "for every process, SHOAL_SECRET=$(openssl rand -hex 16) (or SHOAL_SECRET_FILE, the path of a "
            "file), or give secret="
        )
    return address


def _resolved(host: str, port: int, request: Request) -> str:
    """Return the first address of ``host``. In Kubernetes a pod starts before its name is known."""
    while True:
        try:
            return resolve(host, port)[0]
        except OSError as error:
            passes = isinstance(error, socket.gaierror) and error.errno == socket.EAI_AGAIN
            if not (passes or request.environ.get("KUBERNETES_SERVICE_HOST")):
                raise RendezvousError(
                    f"rendezvous: host {host!r} of the store is unknown: {error}"
                ) from error
            if request.deadline.expired:
                raise RendezvousTimeout(
                    f"rendezvous: for {format_seconds(request.deadline.timeout)} the name of the store's "
                    f"host, {host!r}, has been unknown: {error}.  In Kubernetes pods have names through a "
                    "headless Service with publishNotReadyAddresses: true, which the Job names as its "
                    "subdomain"
                ) from error
        time.sleep(min(_NAME_RETRY_INTERVAL_S, request.deadline.remaining()))


def means_loopback(host: str) -> bool:
    """Return whether ``host`` is a loopback address or localhost, not a name that maps to one here."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


_Address = tuple[int, str, int]

_lock = threading.Lock()
_shares: dict[_Address, list[ServerShare]] = {}


class ServerShare:
    """One world's reference to a server of this process."""

    def __init__(self, address: _Address, server: TCPStoreServer) -> None:
        self._address = address
        self._leaving = False
        self.server = server

    def others_disconnected(self, store: TCPStore) -> bool:
        """Return whether no other world or client needs the server; ``store``: this world's client."""
        with _lock:
            if any(share is not self and not share._leaving for share in _shares[self._address]):
                self._leaving = True  # another world keeps the server running
                return True
        return self.server.clients <= store.connections

    def close(self) -> None:
        """Release the server; the last release closes it."""
        with _lock:
            shares = _shares[self._address]
            shares.remove(self)
            if shares:
                return
            del _shares[self._address]
        self.server.close()


def share(address: str, port: int, secret: bytes, *, start: bool) -> ServerShare | None:
    """Return a reference to this process's server at the address, or None if it has none there.

    With ``start``, first start a server if neither this nor another process has one there.
    """
    # A forked child has its parent's table but not its threads.
    key = (os.getpid(), address, port)
    with _lock:
        if key in _shares:
            found = ServerShare(key, _shares[key][0].server)
        elif start:
            try:
                found = ServerShare(key, TCPStoreServer(address, port, secret).start())
            except WireError:
                return None  # another process listens there: a server that was started for the job
        else:
            return None
        _shares.setdefault(key, []).append(found)
        return found


def _after_fork_in_child() -> None:
    global _lock
    _lock = threading.Lock()  # a thread of the parent may hold the old lock


os.register_at_fork(after_in_child=_after_fork_in_child)
