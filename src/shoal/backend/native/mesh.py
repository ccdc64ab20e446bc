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
import select
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
from ...net import Connection, Deadline, PeerConnection, PeerTransport, resource_error
from ...rendezvous.membership import Membership

_PURPOSE = "mesh"
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
    """The rank at the other end; ``ring`` and ``capacity`` describe its shared memory, if any.

    ``sends_process``: the rank is another process than the one that connects, and its pidfd follows its
    memory.
    """

    rank: int
    job: str
    epoch: int
    ring: _Offset
    capacity: _Offset
    sends_process: bool


@dataclass(frozen=True, slots=True)
class LocalPeer:
    """A rank that shares memory: its descriptors, and the offsets of the two rings in their arenas."""

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


@dataclass(frozen=True, slots=True)
class OfferedMemory:
    """The shared memory of this rank, owned by the native core.

    ``rings`` has the offset of the ring for each rank; unused rings cost nothing.  ``process_fd`` is a pidfd
    of the rank, if that is not this process.
    """

    fd: int
    capacity: int
    rings: list[int]
    process_fd: int | None = None

    @property
    def descriptors(self) -> list[int]:
        """The descriptors that the peers get."""
        return [self.fd] if self.process_fd is None else [self.fd, self.process_fd]


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
        self._membership = membership
        self._rank, self._size = membership.rank, membership.size
        self._memory = memory
        self._transport = transport
        self._deadline = deadline
        self._peers: dict[int, PeerConnection[_Hello]] = {}
        self._addresses: list[_Address] = []
        self._lock = threading.Lock()
        self._failure: BaseException | None = None

    def run(self) -> Mesh:
        me = self._membership
        max_pending = max(wire.MAX_PENDING, 2 * self._size)
        with PeerTransport(
            me.interface, secret=me.secret, purpose=_PURPOSE, max_pending=max_pending
        ) as transport:
            mine = _Address(me.host, self._transport, transport.unix, me.interface, transport.port)
            self._addresses = self._exchange_addresses(mine)
            self._check_transports()
            threads = [
                threading.Thread(target=self._accept_all, args=(acceptor,), daemon=True)
                for acceptor in transport.acceptors
            ]
            try:
                for thread in threads:
                    _start(thread)
                for rank in range(me.rank):
                    self._connect_to(rank, transport)
            except BaseException as error:
                self._failure = error
            for thread in threads:
                if thread.ident is not None:
                    thread.join()
        try:
            if self._failure is not None:
                raise self._failure
            hosts = self._partition(self._exchange_shared_memory_ranks())
        except BaseException:
            for peer in self._peers.values():
                peer.close()
            raise
        mesh = Mesh(hosts=hosts)
        for rank, peer in self._peers.items():
            fd, memory_fd = peer.detach()
            if memory_fd < 0:
                mesh.remote[rank] = fd
            else:
                mesh.local[rank] = LocalPeer(
                    fd, memory_fd, peer.hello.capacity, self._memory.rings[rank], peer.hello.ring, peer.pid
                )
        return mesh

    # -- store ---------------------------------------------------------------------------------

    def _exchange_addresses(self, mine: _Address) -> list[_Address]:
        """Publish this rank's address and collect the others'.  The store is used for nothing else."""
        store = self._membership.store
        keys = [f"mesh/{rank}" for rank in range(self._size)]
        try:
            store.set(f"mesh/{self._rank}", msgspec.msgpack.encode(mine))
            while True:
                with contextlib.suppress(StoreTimeout):
                    values = store.multi_get(keys, min(_PEER_CHECK_INTERVAL_S, self._deadline.remaining()))
                    return [self._address(rank, value) for rank, value in enumerate(values)]
                self._membership.check()
                if self._deadline.expired:
                    missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
                    raise RendezvousTimeout(
                        f"rank {self._rank}: {ranks_named(missing)} did not connect within "
                        f"{format_seconds(self._deadline.timeout)}; they are late or hang"
                    )
        except StoreError:
            # The store may have been in a failed rank, whose sockets close shortly before its process ends.
            self._raise_known_cause(range(self._size))
            raise

    def _address(self, rank: int, raw: bytes) -> _Address:
        try:
            return from_msgpack(raw, _Address)
        except MalformedMessage as error:
            raise RendezvousError(
                f"rank {self._rank}: the address of rank {rank} in the store cannot be read ({error}); "
                "does another program use the same keys?"
            ) from error

    def _check_transports(self) -> None:
        for rank, address in enumerate(self._addresses):
            if address.transport != self._transport:
                raise RendezvousError(
                    f"rank {self._rank} uses transport={self._transport!r}, but rank {rank} "
                    f"{address.transport!r}: give all ranks the same (SHOAL_TRANSPORT)"
                )

    def _exchange_shared_memory_ranks(self) -> dict[int, set[int]]:
        """Return for each rank the ranks with which it shares memory, exchanged over the connections.

        This exchange is also the final barrier of connecting.  A rank sends its list when it no longer needs
        the store or another rank, and returns when all lists are here: from then on every rank can complete
        connecting even if this one fails.
        """
        mine = sorted(rank for rank, peer in self._peers.items() if peer.memory_fd >= 0)
        self._membership.connected()
        shared_memory_ranks = {self._rank: set(mine)}
        poll = select.poll()
        rank_of = {}
        for rank, peer in self._peers.items():
            if self._deadline.expired:
                raise self._timeout_error()
            try:
                peer.connection.send(msgspec.msgpack.encode(mine), self._deadline.remaining())
            except WireError as error:
                raise self._lost(rank) from error
            rank_of[peer.connection.fileno()] = rank
            poll.register(peer.connection.fileno(), select.POLLIN)
        while rank_of:
            for fd, _ in poll.poll(self._deadline.milliseconds()):
                rank = rank_of.pop(fd)
                poll.unregister(fd)
                try:
                    message = self._peers[rank].connection.recv(self._deadline.remaining())
                    shared_memory_ranks[rank] = set(from_msgpack(message, list[int]))
                except (WireError, MalformedMessage) as error:
                    raise self._lost(rank) from error
            if rank_of and self._deadline.expired:
                raise RendezvousTimeout(
                    f"rank {self._rank}: {ranks_named([*rank_of.values()])} were not connected to all "
                    f"others within {format_seconds(self._deadline.timeout)}"
                )
        return shared_memory_ranks

    def _partition(self, shared: dict[int, set[int]]) -> list[int]:
        """Return the host index of each rank.  If a pair on a host cannot share memory, none there does."""
        hosts: dict[str, list[int]] = {}
        for rank, address in enumerate(self._addresses):
            hosts.setdefault(address.host, []).append(rank)
        indices = [-1] * self._size
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

    def _connect_to(self, rank: int, transport: PeerTransport) -> None:
        address = self._addresses[rank]
        try:
            transport.connect(
                address.unix,
                address.address,
                address.port,
                local=self._transport != "tcp" and address.host == self._membership.host,
                deadline=self._deadline,
                establish=lambda connection: self._introduce(connection, rank),
            )
        except (AuthenticationError, VersionMismatch):
            raise
        except WireTimeout as error:
            raise self._timeout_error() from error
        except WireError as error:
            if resource_error(error):
                raise
            raise self._lost(rank) from error

    def _accept_all(self, acceptor: wire.Acceptor) -> None:
        """Accept the higher ranks on one of the two listeners, until all are connected through either."""
        looked = Deadline(_PEER_CHECK_INTERVAL_S)
        try:
            while self._missing_ranks(range(self._rank + 1, self._size)) and self._failure is None:
                if self._deadline.expired:
                    raise self._timeout_error(acceptor.refused)
                if looked.expired:
                    self._membership.check()
                    looked = Deadline(_PEER_CHECK_INTERVAL_S)
                try:
                    self._introduce(acceptor.accept(_ACCEPT_POLL_INTERVAL_S), None)
                except WireError as error:
                    if resource_error(error):
                        raise
                    # Ignore strangers, and peers that will retry over the other transport.
        except BaseException as error:
            self._failure = self._failure or error

    def _missing_ranks(self, ranks: range) -> list[int]:
        with self._lock:
            return [rank for rank in ranks if rank not in self._peers]

    def _introduce(self, connection: Connection, expected: int | None) -> None:
        """Exchange ranks, and memory over a unix socket; then add the connection to the mesh."""
        timeout = self._deadline.remaining()
        if expected is not None:
            peer = wire.send_hello(connection, self._hello(expected), timeout)
        else:
            timeout = min(timeout, wire.HANDSHAKE_TIMEOUT_S)  # others wait to be accepted

            def answer(hello: _Hello) -> _Hello:
                self._check(hello, None, connection.peer)
                return self._hello(hello.rank)

            peer = wire.receive_hello(connection, _Hello, answer, timeout)
        try:
            self._check(peer.hello, expected, connection.peer)
            if peer.is_local:
                peer.share_memory(self._memory.descriptors, timeout, with_process=peer.hello.sends_process)
        except BaseException:
            peer.close()
            raise
        with self._lock:  # a rank that connects twice could not share memory at first: it uses TCP
            spare = self._peers.get(peer.hello.rank)
            if spare is None or peer.memory_fd < 0:
                self._peers[peer.hello.rank] = peer
            else:
                spare = peer
        if spare is not None:
            spare.close()

    def _check(self, hello: _Hello, expected: int | None, peer: str) -> None:
        """Raise WireError if the peer belongs to another job or epoch, or is not the expected rank."""
        me = self._membership
        if (hello.job, hello.epoch) != (me.job, me.epoch):
            raise WireError(
                f"rank {hello.rank} of job {hello.job!r}, epoch {hello.epoch}, came to another job"
            )
        if not 0 <= hello.rank < me.size or (expected is not None and hello.rank != expected):
            raise WireError(f"{peer} says that it is rank {hello.rank}")

    def _hello(self, to: int) -> _Hello:
        me = self._membership
        ring, memory = self._memory.rings[to], self._memory
        return _Hello(me.rank, me.job, me.epoch, ring, memory.capacity, memory.process_fd is not None)

    def _lost(self, rank: int) -> RendezvousError:
        """Return the error for a ``rank`` lost before all were connected, or raise its known cause."""
        self._raise_known_cause([rank])
        failure_report.notified([rank], self._membership.meeting)
        return RendezvousError(
            f"rank {self._rank}: rank {rank} went away before all ranks were connected; look at what it "
            f"prints, and {self._membership.advice}"
        )

    def _raise_known_cause(self, ranks: Sequence[int]) -> None:
        """Raise the reason why one of the ranks was lost, if it is found in ``_LOSS_REASON_TIMEOUT_S``."""
        patience = Deadline(min(_LOSS_REASON_TIMEOUT_S, self._deadline.remaining()))
        while True:
            self._membership.check(ranks)
            if patience.expired:
                return
            time.sleep(_ACCEPT_POLL_INTERVAL_S)

    def _timeout_error(self, refused: str = "") -> RendezvousTimeout:
        missing = [rank for rank in self._missing_ranks(range(self._size)) if rank != self._rank]
        return RendezvousTimeout(
            f"rank {self._rank}: {ranks_named(missing)} were not connected within "
            f"{format_seconds(self._deadline.timeout)}"
            + (f"; the last that tried was refused: {refused}" if refused else "")
        )


def _start(thread: threading.Thread) -> None:
    try:
        thread.start()
    except RuntimeError as error:
        raise OSError(errno.EAGAIN, str(error)) from error
