"""Connections between all ranks of a job, which the native core takes over.

Every rank publishes its address, connects to the lower ranks and accepts the higher ones.  :mod:`shoal.net`
authenticates each connection before the two sides exchange their ranks and, on a unix socket, the descriptors
of their shared memory.  Two ranks count as on the same host if this succeeds, whatever their host names; a
pair that cannot share memory is connected by TCP.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import select
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

import msgspec

from ... import failure_report
from ... import net as wire
from ...common.decoding import MalformedMessage, from_msgpack
from ...common.formatting import format_seconds, ranks_named
from ...errors import (
    AuthenticationError,
    RendezvousError,
    RendezvousTimeout,
    StoreError,
    StoreTimeout,
    VersionMismatch,
    WireError,
    WireTimeout,
)
from ...net import Connection, Deadline
from ..base import Membership

_PURPOSE = "mesh"
_RESOURCE_ERRNOS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS)
_ACCEPT_POLL_INTERVAL_S = 0.02  # seconds between checks whether accepting is still needed
_PEER_CHECK_INTERVAL_S = 0.25  # seconds between checks whether the awaited ranks are still running
_LOSS_REASON_TIMEOUT_S = 1.0  # seconds to wait for the reason why a rank was lost


#: An offset or length in shared memory, in bytes.
_Offset = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class _Address(msgspec.Struct):
    """The addresses at which a rank listens."""

    host: str
    transport: str
    unix: str
    address: str
    port: int


class _Hello(msgspec.Struct):
    """The rank at the other end; ``ring`` and ``capacity`` describe its shared memory, if any."""

    rank: int
    job: str
    epoch: int
    ring: _Offset
    capacity: _Offset


@dataclass(frozen=True, slots=True)
class LocalPeer:
    """A rank that shares memory: its descriptors, and the offsets of the two rings in their arenas."""

    socket: int
    memory_fd: int
    capacity: int
    out: int
    in_: int
    pid: int


@dataclass(frozen=True, slots=True)
class _Arena(wire.SharedMemory):
    """The shared memory of another rank on this host, and the offset of the ring for this rank."""

    capacity: int
    ring: int


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
        """Close all descriptors that are still in the mesh; the core owns those that it removed."""
        for peer in self.local.values():
            os.close(peer.socket)
            os.close(peer.memory_fd)
        for fd in self.remote.values():
            os.close(fd)

    def __enter__(self) -> Mesh:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class OfferedMemory:
    """The shared memory of this rank, owned by the native core."""

    def __init__(self, fd: int, capacity: int, rings: list[int]) -> None:
        self.fd = fd
        self.capacity = capacity
        self.rings = rings  # the offset of the ring for each rank; unused rings cost nothing


def connect(membership: Membership, memory: OfferedMemory, *, transport: str, timeout: float) -> Mesh:
    """Connect this rank to all others.

    Raises:
        RendezvousTimeout: ranks were not connected within ``timeout`` seconds; the message names them.
        RendezvousError: the ranks' transports differ, or ``"shm"`` is not possible.
    """
    return _MeshBuilder(membership, memory, transport, Deadline(timeout)).run()


class _MeshBuilder:
    def __init__(
        self, membership: Membership, memory: OfferedMemory, transport: str, deadline: Deadline
    ) -> None:
        self._me = membership
        self._memory = memory
        self._transport = transport
        self._deadline = deadline
        self._connections: dict[int, Connection] = {}
        self._memories: dict[int, _Arena] = {}
        self._addresses: list[_Address] = []
        self._lock = threading.Lock()
        self._failure: BaseException | None = None

    def run(self) -> Mesh:
        me = self._me
        name = f"shoal-{secrets.token_hex(12)}"
        with wire.listen_unix(name) as unix, wire.listen(me.interface, secret=me.secret) as tcp:
            mine = _Address(me.host, self._transport, name, me.interface, tcp.getsockname()[1])
            self._addresses = self._exchange_addresses(mine)
            self._check_transports()
            acceptors = [
                threading.Thread(target=self._accept_all, args=(listener,), daemon=True)
                for listener in (unix, tcp)
            ]
            try:
                for acceptor in acceptors:
                    _start(acceptor)
                for rank in range(me.rank):
                    self._connect_to(rank)
            except BaseException as error:
                self._failure = error
            for acceptor in acceptors:
                if acceptor.ident is not None:
                    acceptor.join()
        try:
            if self._failure is not None:
                raise self._failure
            hosts = self._partition(self._exchange_shared_memory_ranks())
        except BaseException:
            self._close()
            raise
        return self._hand_over(hosts)

    def _hand_over(self, hosts: list[int]) -> Mesh:
        mesh = Mesh(hosts=hosts)
        for rank, link in self._connections.items():
            memory = self._memories.get(rank)
            if memory is None:
                mesh.remote[rank] = link.detach()
            else:
                mesh.local[rank] = LocalPeer(
                    link.detach(),
                    memory.fd,
                    memory.capacity,
                    self._memory.rings[rank],
                    memory.ring,
                    memory.pid,
                )
        return mesh

    def _close(self) -> None:
        for link in self._connections.values():
            link.close()
        for memory in self._memories.values():
            memory.close()

    # -- store ---------------------------------------------------------------------------------

    def _exchange_addresses(self, mine: _Address) -> list[_Address]:
        """Publish this rank's address and collect the others'.  The store is used for nothing else."""
        store = self._me.store
        keys = [f"mesh/{rank}" for rank in range(self._me.size)]
        try:
            store.set(f"mesh/{self._me.rank}", msgspec.msgpack.encode(mine))
            while True:
                with contextlib.suppress(StoreTimeout):
                    values = store.multi_get(keys, min(_PEER_CHECK_INTERVAL_S, self._deadline.remaining()))
                    return [self._address(rank, value) for rank, value in enumerate(values)]
                self._me.check()
                if self._deadline.expired:
                    missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
                    raise RendezvousTimeout(
                        f"rank {self._me.rank}: {ranks_named(missing)} did not connect within "
                        f"{format_seconds(self._deadline.timeout)}; they are late or hang"
                    )
        except StoreError:
            # The store may have been in a failed rank, whose sockets close shortly before its process ends.
            self._raise_known_cause(range(self._me.size))
            raise

    def _address(self, rank: int, raw: bytes) -> _Address:
        try:
            return from_msgpack(raw, _Address)
        except MalformedMessage as error:
            raise RendezvousError(
                f"rank {self._me.rank}: the address of rank {rank} in the store cannot be read ({error}); "
                "does another program use the same keys?"
            ) from error

    def _check_transports(self) -> None:
        for rank, address in enumerate(self._addresses):
            if address.transport != self._transport:
                raise RendezvousError(
                    f"rank {self._me.rank} uses transport={self._transport!r}, but rank {rank} "
                    f"{address.transport!r}: give all ranks the same (SHOAL_TRANSPORT)"
                )

    def _exchange_shared_memory_ranks(self) -> dict[int, set[int]]:
        """Return for each rank the ranks with which it shares memory, exchanged over the connections.

        This exchange is also the final barrier of connecting.  A rank sends its list when it no longer needs
        the store or another rank, and returns when all lists are here: from then on every rank can complete
        connecting even if this one fails.
        """
        mine = sorted(self._memories)
        self._me.connected()
        shared_memory_ranks = {self._me.rank: set(mine)}
        poll = select.poll()
        rank_of = {}
        for rank, link in self._connections.items():
            try:
                link.send(msgspec.msgpack.encode(mine), self._remaining(rank))
            except WireError as error:
                raise self._lost(rank) from error
            rank_of[link.fileno()] = rank
            poll.register(link.fileno(), select.POLLIN)
        while rank_of:
            for fd, _ in poll.poll(self._deadline.milliseconds()):
                rank = rank_of.pop(fd)
                poll.unregister(fd)
                try:
                    message = self._connections[rank].recv(self._deadline.remaining())
                    shared_memory_ranks[rank] = set(from_msgpack(message, list[int]))
                except (WireError, MalformedMessage) as error:
                    raise self._lost(rank) from error
            if rank_of and self._deadline.expired:
                raise RendezvousTimeout(
                    f"rank {self._me.rank}: {ranks_named([*rank_of.values()])} were not connected to all "
                    f"others within {format_seconds(self._deadline.timeout)}"
                )
        return shared_memory_ranks

    def _partition(self, shared: dict[int, set[int]]) -> list[int]:
        """Return the host index of each rank.  If a pair on a host cannot share memory, none there does."""
        hosts: dict[str, list[int]] = {}
        for rank, address in enumerate(self._addresses):
            hosts.setdefault(address.host, []).append(rank)
        indices = [-1] * self._me.size
        count = 0
        for members in hosts.values():
            whole = all(set(members) - {rank} <= shared[rank] for rank in members)
            if self._transport == "shm" and not whole:
                raise RendezvousError(f"{ranks_named(members)} are on one host but cannot share memory")
            for position, rank in enumerate(members):
                indices[rank] = count + (0 if whole else position)
            count += 1 if whole else len(members)
        if self._transport == "shm" and len(hosts) > 1:
            raise RendezvousError(f"transport='shm' needs all ranks on one host; they are on {len(hosts)}")
        return indices

    # -- connections ---------------------------------------------------------------------------

    def _local(self, rank: int) -> bool:
        return self._transport != "tcp" and self._addresses[rank].host == self._me.host

    def _connect_to(self, rank: int) -> None:
        address = self._addresses[rank]
        if self._local(rank):
            try:
                connection = wire.connect_unix(
                    address.unix, secret=self._me.secret, purpose=_PURPOSE, timeout=self._remaining(rank)
                )
                self._introduce_and_add(connection, rank)
                return
            except WireError as error:
                if resource_error(error):
                    raise
                # Otherwise the pair cannot share memory: use TCP.
        try:
            connection = wire.connect(
                address.address,
                address.port,
                secret=self._me.secret,
                purpose=_PURPOSE,
                timeout=self._remaining(rank),
                plain=True,
            )
            self._introduce_and_add(connection, rank)
        except (AuthenticationError, VersionMismatch):
            raise
        except WireTimeout as error:
            raise self._timeout_error() from error
        except WireError as error:
            if resource_error(error):
                raise
            raise self._lost(rank) from error

    def _accept_all(self, listener: socket.socket) -> None:
        """Accept the higher ranks on one of the two listeners, until all are connected through either."""
        looked = Deadline(_PEER_CHECK_INTERVAL_S)
        try:
            with wire.Acceptor(
                listener,
                secret=self._me.secret,
                purpose=_PURPOSE,
                most_pending=max(wire.MAX_PENDING, 2 * self._me.size),
                plain=True,  # the core takes over the bare sockets
            ) as acceptor:
                while self._missing_ranks(range(self._me.rank + 1, self._me.size)) and self._failure is None:
                    if self._deadline.remaining() <= 0:
                        raise self._timeout_error(acceptor.refused)
                    if looked.expired:
                        self._me.check()
                        looked = Deadline(_PEER_CHECK_INTERVAL_S)
                    try:
                        self._introduce_and_add(acceptor.accept(_ACCEPT_POLL_INTERVAL_S), None)
                    except WireError as error:
                        if resource_error(error):
                            raise
                        # Ignore strangers, and peers that will retry over the other transport.
        except BaseException as error:
            self._failure = self._failure or error

    def _missing_ranks(self, ranks: range) -> list[int]:
        with self._lock:
            return [rank for rank in ranks if rank not in self._connections]

    def _introduce_and_add(self, connection: Connection, expected: int | None) -> None:
        """Exchange ranks, and memory over a unix socket; then add the connection to the mesh."""
        try:
            peer_hello, memory = self._exchange_hellos(connection, expected)
        except BaseException:
            connection.close()
            raise
        self._add_connection(peer_hello, connection, memory)

    def _exchange_hellos(self, connection: Connection, expected: int | None) -> tuple[int, _Arena | None]:
        timeout = self._deadline.remaining()
        if expected is not None:
            peer_hello = wire.introduce(connection, self._hello(expected), timeout)
            self._check(connection, peer_hello, expected)
        else:
            timeout = min(timeout, wire.HANDSHAKE_TIMEOUT_S)  # others wait to be accepted

            def answer(peer_hello: _Hello) -> _Hello:
                self._check(connection, peer_hello, None)
                return self._hello(peer_hello.rank)

            peer_hello = wire.be_introduced(connection, _Hello, answer, timeout)
        memory = wire.share_memory(connection, self._memory.fd, timeout)
        if memory is None:
            return peer_hello.rank, None
        return peer_hello.rank, _Arena(memory.fd, memory.pid, peer_hello.capacity, peer_hello.ring)

    def _check(self, connection: Connection, peer_hello: _Hello, expected: int | None) -> None:
        """Raise WireError if the peer belongs to another job or epoch, or is not the expected rank."""
        me = self._me
        if (peer_hello.job, peer_hello.epoch) != (me.job, me.epoch):
            raise WireError(
                f"rank {peer_hello.rank} of job {peer_hello.job!r}, epoch {peer_hello.epoch}, came to "
                "another job"
            )
        if not 0 <= peer_hello.rank < me.size or (expected is not None and peer_hello.rank != expected):
            raise WireError(f"{connection.peer} says that it is rank {peer_hello.rank}")

    def _add_connection(self, rank: int, link: Connection, memory: _Arena | None) -> None:
        """Add a connection to the mesh.  If a rank connects twice, it failed to share memory: use TCP."""
        with self._lock:
            spare: tuple[Connection, _Arena | None] | None = None
            if rank not in self._connections or memory is None:
                if rank in self._connections:
                    spare = self._connections[rank], self._memories.pop(rank, None)
                self._connections[rank] = link
                if memory is not None:
                    self._memories[rank] = memory
            else:
                spare = link, memory
        if spare is not None:
            spare[0].close()
            if spare[1] is not None:
                spare[1].close()

    def _hello(self, to: int) -> _Hello:
        me = self._me
        return _Hello(me.rank, me.job, me.epoch, self._memory.rings[to], self._memory.capacity)

    def _lost(self, rank: int) -> RendezvousError:
        """Return the error for a ``rank`` lost before all were connected, or raise its known cause."""
        self._raise_known_cause([rank])
        failure_report.notified([rank], self._me.meeting)
        return RendezvousError(
            f"rank {self._me.rank}: rank {rank} went away before all ranks were connected; look at what it "
            f"prints, and {self._me.advice}"
        )

    def _raise_known_cause(self, ranks: Sequence[int]) -> None:
        """Raise the reason why one of the ranks was lost, if it is found in ``_LOSS_REASON_TIMEOUT_S``."""
        patience = Deadline(min(_LOSS_REASON_TIMEOUT_S, self._deadline.remaining()))
        while True:
            self._me.check(ranks)
            if patience.expired:
                return
            time.sleep(_ACCEPT_POLL_INTERVAL_S)

    def _remaining(self, rank: int) -> float:
        remaining = self._deadline.remaining()
        if remaining <= 0:
            raise self._timeout_error()
        return remaining

    def _timeout_error(self, refused: str = "") -> RendezvousTimeout:
        missing = [rank for rank in self._missing_ranks(range(self._me.size)) if rank != self._me.rank]
        return RendezvousTimeout(
            f"rank {self._me.rank}: {ranks_named(missing)} were not connected within "
            f"{format_seconds(self._deadline.timeout)}"
            + (f"; the last that tried was refused: {refused}" if refused else "")
        )


def resource_error(error: BaseException) -> OSError | None:
    """Return the system's error for a lack of descriptors or memory, if ``error`` is or was caused by one."""
    for cause in (error, error.__cause__):
        if isinstance(cause, OSError) and cause.errno in _RESOURCE_ERRNOS:
            return cause
    return None


def _start(thread: threading.Thread) -> None:
    try:
        thread.start()
    except RuntimeError as error:
        raise OSError(errno.EAGAIN, str(error)) from error
