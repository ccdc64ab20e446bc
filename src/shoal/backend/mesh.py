"""Connecting the ranks of a job to one another, before the native core takes over.

Every rank publishes where it listens, connects to the ranks below it and accepts those above it.  Each
connection is authenticated by :mod:`shoal.wire`; only then do the two sides say who they are, and on a
unix socket hand over the descriptor of their shared memory.  *Same host* means that this succeeded, not
that names match: a pair that cannot share memory is connected by TCP.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from .. import wire
from ..errors import RendezvousError, RendezvousTimeout, StoreTimeout, UsageError, WireError
from ..wire import Connection, Deadline
from .base import Membership

#: how a rank may be told to reach others on its host
TRANSPORTS = ("auto", "shm", "tcp")

T = TypeVar("T")

_PURPOSE = "mesh"
_ATTEMPT = 0.02  # seconds between looks at whether accepting is still needed


class _Address(msgspec.Struct):
    """Where a rank listens."""

    host: str
    transport: str
    unix: str
    address: str
    port: int


class _Hello(msgspec.Struct):
    """Who is at the other end; ``ring`` and ``capacity`` describe its shared memory, if it is handed over."""

    rank: int
    job: str
    epoch: int
    ring: int
    capacity: int


@dataclass(frozen=True, slots=True)
class LocalPeer:
    """A rank whose memory is mapped: descriptors, and where the two rings lie in their arenas."""

    socket: int
    memory_fd: int
    capacity: int
    out: int
    in_: int
    pid: int


@dataclass(slots=True)
class Mesh:
    """The connections of one rank, ready for the core.

    Attributes:
        local: ranks that share memory with this one.
        remote: descriptors of TCP connections to the others.
        hosts: for each rank the index of its host; ranks with equal indices all share memory.
    """

    local: dict[int, LocalPeer] = field(default_factory=dict)
    remote: dict[int, int] = field(default_factory=dict)
    hosts: list[int] = field(default_factory=list)

    def close(self) -> None:
        """Close every descriptor (after a failure; else the core owns them)."""
        for peer in self.local.values():
            os.close(peer.socket)
            os.close(peer.memory_fd)
        for fd in self.remote.values():
            os.close(fd)


class Memory:
    """What this rank offers to share; implemented by the native core."""

    def __init__(self, fd: int, capacity: int, rings: list[int]) -> None:
        self.fd = fd
        self.capacity = capacity
        self.rings = rings  # one for each rank, its offset; unused ones cost nothing


def connect(membership: Membership, memory: Memory, *, transport: str, timeout: float) -> Mesh:
    """Connect this rank to all others.

    Raises:
        RendezvousTimeout: names the ranks that were not connected in time.
        RendezvousError: ranks disagree on the transport, or ``shm`` was asked for and is not possible.
    """
    if transport not in TRANSPORTS:
        raise UsageError(f"transport={transport!r}: expected one of {', '.join(TRANSPORTS)}")
    return _Builder(membership, memory, transport, Deadline(timeout)).run()


class _Builder:
    def __init__(self, membership: Membership, memory: Memory, transport: str, deadline: Deadline) -> None:
        self._me = membership
        self._memory = memory
        self._transport = transport
        self._deadline = deadline
        self._mesh = Mesh()
        self._addresses: list[_Address] = []
        self._lock = threading.Lock()
        self._failure: BaseException | None = None

    def run(self) -> Mesh:
        me = self._me
        name = f"shoal-{secrets.token_hex(12)}"
        with wire.listen_unix(name) as unix, wire.listen(me.interface, secret=me.secret) as tcp:
            mine = _Address(me.host, self._transport, name, me.interface, tcp.getsockname()[1])
            self._addresses = self._share("mesh", mine, _Address)
            self._check_transports()
            acceptors = [
                threading.Thread(target=self._accept_all, args=(listener,), daemon=True)
                for listener in (unix, tcp)
            ]
            for acceptor in acceptors:
                acceptor.start()
            try:
                for rank in range(me.rank):
                    self._reach(rank)
            except BaseException as error:
                self._failure = error
            for acceptor in acceptors:
                acceptor.join()
        if self._failure is not None:
            self._mesh.close()
            raise self._failure
        try:
            self._mesh.hosts = self._partition()
        except BaseException:
            self._mesh.close()
            raise
        return self._mesh

    # -- store ---------------------------------------------------------------------------------

    def _share(self, key: str, value: object, kind: type[T]) -> list[T]:
        """Publish ``value`` and collect everybody's, in two store operations."""
        store = self._me.store
        store.set(f"{key}/{self._me.rank}", msgspec.msgpack.encode(value))
        keys = [f"{key}/{rank}" for rank in range(self._me.size)]
        try:
            values = store.multi_get(keys, max(self._deadline.remaining(), 0.001))
        except StoreTimeout as error:
            missing = [rank for rank, k in enumerate(keys) if not store.check([k])]
            raise RendezvousTimeout(
                f"rank {self._me.rank}: ranks {_names(missing)} did not connect within "
                f"{self._deadline.timeout:g} s; they are late or have died"
            ) from error
        return [msgspec.msgpack.decode(value, type=kind) for value in values]

    def _check_transports(self) -> None:
        for rank, address in enumerate(self._addresses):
            if address.transport != self._transport:
                raise RendezvousError(
                    f"rank {self._me.rank} uses transport={self._transport!r}, but rank {rank} "
                    f"{address.transport!r}: give all ranks the same (SHOAL_TRANSPORT)"
                )

    def _partition(self) -> list[int]:
        """Which ranks share a host; all of a host's pairs must have succeeded, or none counts."""
        mine = sorted(self._mesh.local)
        shared = [set(ranks) for ranks in self._share("mesh-local", mine, list[int])]
        hosts: dict[str, list[int]] = {}
        for rank, address in enumerate(self._addresses):
            hosts.setdefault(address.host, []).append(rank)
        indices = [-1] * self._me.size
        count = 0
        for members in hosts.values():
            whole = all(set(members) - {rank} <= shared[rank] for rank in members)
            if self._transport == "shm" and not whole:
                raise RendezvousError(f"ranks {_names(members)} are on one host but cannot share memory")
            for position, rank in enumerate(members):
                indices[rank] = count + (0 if whole else position)
            count += 1 if whole else len(members)
        if self._transport == "shm" and len(hosts) > 1:
            raise RendezvousError(f"transport='shm' needs all ranks on one host; they are on {len(hosts)}")
        return indices

    # -- connections ---------------------------------------------------------------------------

    def _local(self, rank: int) -> bool:
        return self._transport != "tcp" and self._addresses[rank].host == self._me.host

    def _reach(self, rank: int) -> None:
        address = self._addresses[rank]
        if self._local(rank):
            # A failure here only means that memory cannot be shared.
            with contextlib.suppress(WireError):
                connection = wire.connect_unix(
                    address.unix, secret=self._me.secret, purpose=_PURPOSE, timeout=self._remaining(rank)
                )
                self._introduce(connection, rank)
                return
        connection = wire.connect(
            address.address,
            address.port,
            secret=self._me.secret,
            purpose=_PURPOSE,
            timeout=self._remaining(rank),
        )
        self._introduce(connection, rank)

    def _accept_all(self, listener: socket.socket) -> None:
        """Take in the ranks above, on one of the two listeners, until all have come on either."""
        acceptor = wire.Acceptor(
            listener,
            secret=self._me.secret,
            purpose=_PURPOSE,
            most_pending=max(wire.MOST_PENDING, 2 * self._me.size),
        )
        try:
            while self._absent(range(self._me.rank + 1, self._me.size)) and self._failure is None:
                if self._deadline.remaining() <= 0:
                    raise self._late(acceptor.refused)
                # Strangers, and peers that will try another way, are passed over.
                with contextlib.suppress(WireError, msgspec.MsgspecError):
                    self._introduce(acceptor.accept(_ATTEMPT), None)
        except BaseException as error:
            self._failure = self._failure or error
        finally:
            acceptor.close()

    def _absent(self, ranks: range) -> list[int]:
        with self._lock:
            return [rank for rank in ranks if rank not in self._mesh.local and rank not in self._mesh.remote]

    def _introduce(self, connection: Connection, expected: int | None) -> None:
        """Exchange names, and memory over a unix socket; then the connection belongs to the mesh."""
        with connection:
            me, timeout = self._me, self._deadline.remaining()
            unix = connection.socket.family == socket.AF_UNIX
            if expected is not None:
                self._say_hello(connection, expected)
            else:
                timeout = min(timeout, wire.HANDSHAKE_TIMEOUT)  # others wait to be accepted
            theirs = msgspec.msgpack.decode(connection.recv(timeout), type=_Hello)
            if (theirs.job, theirs.epoch) != (me.job, me.epoch):
                raise WireError(
                    f"rank {theirs.rank} of job {theirs.job!r}, epoch {theirs.epoch}, came to another job"
                )
            if not 0 <= theirs.rank < me.size or (expected is not None and theirs.rank != expected):
                raise WireError(f"{connection.peer} says that it is rank {theirs.rank}")
            if expected is None:
                self._say_hello(connection, theirs.rank)
            if not unix:
                with self._lock:
                    self._mesh.remote[theirs.rank] = connection.detach()
                return
            pid = wire.peer_pid(connection)
            wire.send_fds(connection, [self._memory.fd], timeout)
            (memory_fd,) = wire.recv_fds(connection, 1, timeout)
            peer = LocalPeer(
                connection.detach(),
                memory_fd,
                theirs.capacity,
                self._memory.rings[theirs.rank],
                theirs.ring,
                pid,
            )
            with self._lock:
                self._mesh.local[theirs.rank] = peer

    def _say_hello(self, connection: Connection, to: int) -> None:
        me = self._me
        hello = _Hello(me.rank, me.job, me.epoch, self._memory.rings[to], self._memory.capacity)
        connection.send(msgspec.msgpack.encode(hello), self._deadline.remaining())

    def _remaining(self, rank: int) -> float:
        remaining = self._deadline.remaining()
        if remaining <= 0:
            raise self._late()
        return remaining

    def _late(self, refused: str = "") -> RendezvousTimeout:
        missing = [rank for rank in self._absent(range(self._me.size)) if rank != self._me.rank]
        return RendezvousTimeout(
            f"rank {self._me.rank}: ranks {_names(missing)} were not connected within "
            f"{self._deadline.timeout:g} s"
            + (f"; the last that tried was refused: {refused}" if refused else "")
        )


def _names(ranks: list[int]) -> str:
    return ", ".join(str(rank) for rank in ranks)
