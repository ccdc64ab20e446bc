"""The handler of ``mpi://``: ranks that one mpiexec started learn over MPI where their store is.

Rank and size are those of ``MPI.COMM_WORLD``.  Rank 0 serves a store as for ``tcp://``.  All ranks first
exchange their addresses, and rank 0 then broadcasts the address of the store and a new secret.  This happens
once in a process: later rendezvous use the same address without MPI, so they also work after a rank was lost.
"""

from __future__ import annotations

import contextlib
import os
import random
import secrets
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import Annotated, Any, TypeVar
from urllib.parse import urlsplit, urlunsplit

import msgspec

from ..common.decoding import MalformedMessage, from_msgpack
from ..common.formatting import format_seconds
from ..common.mpi_library import check_world, mark_broken, mpi
from ..common.process_identity import machine_id
from ..errors import ConfigurationError, RendezvousError, RendezvousTimeout, ShoalError, UsageError
from ..net import Deadline
from ..store import MemoryStore
from .addresses import LOOPBACK, address_on_route_to, is_local_address, is_loopback, resolve
from .launcher_variables import DERIVED_PORTS, read_mpi, tcp_url
from .point import named_interface
from .schemes import ServerShare, share, tcp
from .venue import Request, Venue

M = TypeVar("M", bound=msgspec.Struct)

#: size in bytes of every message, which includes padding
_MESSAGE_SIZE = 512
#: seconds between two tests of a request; the first ones follow without a pause
_MIN_INTERVAL_S, _MAX_INTERVAL_S = 1e-5, 1e-3
#: number of ports that rank 0 tries
_PORTS_TRIED = 100

_Address = Annotated[str, msgspec.Meta(max_length=100)]


class MpiRank(msgspec.Struct, frozen=True):
    """The message of each rank to all others.

    Attributes:
        machine: hash of the identity of its machine.
        address: a numeric network address of it that other machines can reach, if known; else "".
        has_secret: whether it was given a secret.
    """

    machine: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
    address: _Address
    has_secret: bool


class MpiStore(msgspec.Struct, frozen=True):
    """The message of rank 0, which serves the store.

    Attributes:
        address, port: of the store.
        secret: for ranks that were not given one.
        error: why there is no store; "": there is one.
    """

    address: _Address = ""
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 0
    secret: Annotated[bytes, msgspec.Meta(max_length=64)] = b""
    error: Annotated[str, msgspec.Meta(max_length=400)] = ""


_lock = threading.Lock()
#: result of the exchange; an error: it failed, and cannot be repeated
_found: MpiStore | BaseException | None = None
#: requests that did not complete, with their buffers, which MPI may still write to
_incomplete: list[Any] = []


def mpi_world(request: Request) -> Venue:
    """Open the venue of ``mpi://``: the store that rank 0 of ``MPI.COMM_WORLD`` serves."""
    if urlunsplit(request.url._replace(scheme="")).strip("/"):
        raise UsageError(f"rendezvous url {urlunsplit(request.url)!r}: expected mpi:// and nothing else")
    if not request.serves:
        raise UsageError("mpi:// is only for ranks that mpiexec started")
    if (launch := read_mpi(request.environ)) is not None:
        check_world(launch.rank, launch.size, launch.launcher)
    check_world(request.rank, request.size, "the caller of shoal.init")
    rank, size = mpi().COMM_WORLD.rank, mpi().COMM_WORLD.size
    if size == 1:
        return Venue(MemoryStore(), 0, 1)
    with _first_share(request) as store:
        return tcp(
            replace(
                request, url=urlsplit(tcp_url(store.address, store.port)), rank=rank, size=size,
                secret=request.secret or store.secret,
            )
        )  # fmt: skip


@contextlib.contextmanager
def _first_share(request: Request) -> Iterator[MpiStore]:
    """Yield the result of the exchange; on rank 0 the server of the first one runs for the block at least."""
    global _found
    if not _lock.acquire(timeout=request.deadline.remaining()):
        raise RendezvousTimeout("mpi://: another thread of this process was still exchanging addresses")
    hosted = None
    try:
        if _found is None:
            try:
                _found, hosted = _exchange(request)
            except BaseException as error:
                _found = error
                mark_broken()
                raise
    finally:
        _lock.release()
    if isinstance(_found, BaseException):
        raise RendezvousError(
            f"mpi://: the exchange of addresses failed before in this process ({_found}), and MPI cannot "
            "repeat it; start the job again"
        )
    try:
        yield _found
    finally:
        if hosted is not None:
            hosted.close()


def _exchange(request: Request) -> tuple[MpiStore, ServerShare | None]:
    """Exchange addresses over MPI; return the store, and on rank 0 its server."""
    module = mpi()
    deadline, rank = request.deadline, module.COMM_WORLD.rank
    try:
        # A communicator of its own, so that no message of the program is mistaken for one of these.
        comm, duplication = module.COMM_WORLD.Idup()
        _complete(duplication, comm, deadline, "called shoal.init with mpi://")
        ranks = _gather(comm, _describe(request), deadline)
        _check_secrets(ranks)
        hosted = None
        message = bytearray(_MESSAGE_SIZE)
        if rank == 0:
            store, hosted = _serve(request, ranks)
            _pack(store, message)
        try:
            _complete(comm.Ibcast([message, module.BYTE], 0), message, deadline, "received its address")
            return _checked(_unpack(message, 0, MpiStore), rank), hosted
        except BaseException:
            if hosted is not None:
                hosted.close()
            raise
    except module.Exception as error:
        raise RendezvousError(f"rank {rank}: MPI failed in the rendezvous at mpi://: {error}") from error


def _complete(request: Any, keep: Any, deadline: Deadline, done: str) -> None:
    """Wait for an MPI request; ``done``: what all ranks have then done, for the message of a timeout."""
    interval = 0.0
    _incomplete.append((request, keep))
    while not request.Test():
        if deadline.expired:
            raise RendezvousTimeout(
                f"mpi://: after {format_seconds(deadline.timeout)}, not all ranks of MPI.COMM_WORLD have "
                f"{done}; read the output of the other ranks"
            )
        time.sleep(interval)
        interval = min(max(2 * interval, _MIN_INTERVAL_S), _MAX_INTERVAL_S)
    _incomplete.pop()


def _gather(comm: Any, mine: MpiRank, deadline: Deadline) -> list[MpiRank]:
    message, table = bytearray(_MESSAGE_SIZE), bytearray(_MESSAGE_SIZE * comm.size)
    _pack(mine, message)
    byte = mpi().BYTE
    gathering = comm.Iallgather([message, byte], [table, byte])
    _complete(gathering, (message, table), deadline, "sent their addresses")
    parts = (table[start : start + _MESSAGE_SIZE] for start in range(0, len(table), _MESSAGE_SIZE))
    return [_unpack(part, rank, MpiRank) for rank, part in enumerate(parts)]


def _pack(value: msgspec.Struct, message: bytearray) -> None:
    data = msgspec.msgpack.encode(value)
    assert len(data) + 2 <= len(message)
    message[: len(data) + 2] = len(data).to_bytes(2, "big") + data


def _unpack(message: bytearray, sender: int, kind: type[M]) -> M:
    size = int.from_bytes(message[:2], "big")
    try:
        return from_msgpack(bytes(message[2 : 2 + size]), kind)
    except MalformedMessage as error:
        raise RendezvousError(
            f"mpi://: the message of rank {sender} is malformed ({error}); do all ranks run the same version "
            "of shoal?"
        ) from error


def _describe(request: Request) -> MpiRank:
    machine = blake2b(machine_id().encode(), digest_size=16).digest()
    return MpiRank(machine, _own_address(request), bool(request.secret))


def _own_address(request: Request) -> str:
    """Return the address of this machine that ranks on other machines would use; "" if there is none."""
    if (configured := named_interface(request.environ)) is not None:
        return configured
    candidates = [address_on_route_to(LOOPBACK)]  # of the default route
    with contextlib.suppress(OSError):
        candidates += resolve(socket.gethostname(), 0)
    usable = (each for each in candidates if not is_loopback(each) and is_local_address(each))
    return next(usable, "")


def _check_secrets(ranks: Sequence[MpiRank]) -> None:
    without = [str(number) for number, each in enumerate(ranks) if not each.has_secret]
    if without and len(without) < len(ranks):
        raise ConfigurationError(
            f"mpi://: rank{'s' * (len(without) > 1)} {', '.join(without)} of {len(ranks)} were given no "
            "secret, but the others were: give the same one to all (secret=, SHOAL_SECRET or "
            "SHOAL_SECRET_FILE), or to none"
        )


def _serve(request: Request, ranks: Sequence[MpiRank]) -> tuple[MpiStore, ServerShare | None]:
    """Start the store; an error is part of the message, since the other ranks wait for it."""
    try:
        secret = secrets.token_hex(32).encode()
        address = _address_for(request, ranks)
        # Below the ports of outgoing connections, so that later rendezvous can serve there again.
        for port in random.SystemRandom().sample(DERIVED_PORTS, _PORTS_TRIED):
            hosted = share(address, port, request.secret or secret, start=True)
            if hosted is not None:
                return MpiStore(address, port, secret), hosted
        first, last = DERIVED_PORTS[0], DERIVED_PORTS[-1]
        raise RendezvousError(
            f"no port from {first} to {last} of {address} could be used, out of {_PORTS_TRIED} tried"
        )
    except (OSError, ShoalError) as error:
        return MpiStore(error=str(error).encode()[:400].decode(errors="ignore")), None


def _address_for(request: Request, ranks: Sequence[MpiRank]) -> str:
    """Return the address at which rank 0 serves the store, so that all ranks can reach it."""
    others = [each for each in ranks if each.machine != ranks[0].machine]
    if not others:
        return LOOPBACK
    if (configured := named_interface(request.environ)) is not None:
        return configured
    targets = [each.address for each in others if each.address]
    address = address_on_route_to(targets[0]) if targets else ranks[0].address
    if not address or is_loopback(address):
        raise ConfigurationError(
            f"no network address of {socket.gethostname()} is known that the ranks on other hosts can "
            "reach: set SHOAL_INTERFACE there"
        )
    return address


def _checked(store: MpiStore, rank: int) -> MpiStore:
    if store.error:
        raise RendezvousError(f"mpi://: rank 0 cannot serve the store: {store.error}")
    try:
        is_loopback(store.address)
    except ValueError:
        raise RendezvousError(f"mpi://: rank 0 sent {store.address!r} as an address to rank {rank}") from None
    if not store.port or not store.secret:
        raise RendezvousError(f"mpi://: rank 0 sent no port or no secret to rank {rank}")
    return store


def _after_fork_in_child() -> None:
    global _lock
    _lock = threading.Lock()  # a thread of the parent may hold the old lock


os.register_at_fork(after_in_child=_after_fork_in_child)
