"""The connections of one agent.

A connection is made by the caller at its first call.  It carries the calls of this end and their replies; the
other end makes another connection for its calls, so there are never two connections to choose from.  Workers
of one host use a unix socket if possible; otherwise workers use TCP.  Both ends prove knowledge of the job's
secret before any other message is read, and then exchange hellos.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from ... import net as wire
from ...common.formatting import format_seconds
from ...errors import (
    AgentClosed,
    AuthenticationError,
    CallTimeout,
    RpcError,
    ShoalError,
    UnknownWorker,
    UsageError,
    VersionMismatch,
    WireError,
    WireTimeout,
    WorkerLost,
)
from ...future import pool
from ...net import Connection, Deadline, PeerConnection
from .device_maps import DeviceMap, inverse
from .directory import Directory, Worker
from .worker_connection import WorkerConnection, WorkerHello, main_program

if TYPE_CHECKING:
    from ..agent import Agent

_logger = logging.getLogger("shoal")

_PURPOSE = "rpc"
#: maximum number of lost connections that are remembered, for their messages that are not handled yet
_MAX_LOST_CONNECTIONS = 1024
#: maximum seconds that a listener's thread waits for a connection
_ACCEPT_TIMEOUT_S = 3600.0
#: seconds before accepting is retried after a failure
_ACCEPT_RETRY_DELAY_S = 0.1


class ConnectionManager:
    """Accepts and makes connections, and keeps a table of them.

    Args:
        agent: of this end; its endpoint takes over established connections.
        place: identity of job, epoch and namespace: workers of another place are refused.
        restricted: whether the agent only sends and accepts plain values.
        device_maps: of the agent's calls, by callee.
        lost: called with a connection when it has ended, and with whether it was the last one of its worker.
    """

    def __init__(
        self,
        agent: Agent,
        place: str,
        restricted: bool,
        device_maps: dict[str, DeviceMap],
        lost: Callable[[WorkerConnection, bool], None],
    ) -> None:
        self._agent = agent
        self._endpoint = agent.endpoint
        self._place = place
        self._restricted = restricted
        self._device_maps = device_maps
        self._lost = lost
        self._lock = threading.RLock()
        #: notified when a connection has ended
        self._connection_ended = threading.Condition(self._lock)
        self._introductions = itertools.count()
        #: name -> lock that is held while a connection to that worker is made; unused locks are collected
        self._making: WeakValueDictionary[str, threading.Lock] = WeakValueDictionary()
        self._out: dict[str, WorkerConnection] = {}
        self._by_number: dict[int, WorkerConnection] = {}
        self._ended: list[int] = []
        self._closed = False
        self._transport = wire.PeerTransport(agent.interface, secret=agent.secret, purpose=_PURPOSE)
        self.unix, self.port = self._transport.unix, self._transport.port
        self._threads: list[threading.Thread] = []

    def start(self, me: Worker) -> None:
        """Start to accept connections as ``me``."""
        self._me = me
        for acceptor in self._transport.acceptors:
            thread = threading.Thread(
                target=self._accept, args=(acceptor,), name=f"shoal-rpc-accept-{me.name}", daemon=True
            )
            thread.start()
            self._threads.append(thread)

    def by_number(self, number: int) -> WorkerConnection:
        """Return the connection with this number in the endpoint; KeyError if it was discarded."""
        found = self._by_number.get(number)
        if found is None:
            with self._lock:  # it may be being attached
                found = self._by_number[number]
        return found

    def connect_to(
        self, name: str, directory: Directory, timeout: float, only: Worker | None = None
    ) -> WorkerConnection:
        """Return the connection for calls to ``name``; make it if there is none.

        Args:
            timeout: seconds to connect.
            only: the only incarnation to connect to.

        Raises:
            WorkerLost: the worker has ended, or cannot be reached.
            CallTimeout: timed out.
            UnknownWorker: no worker has joined under the name.
        """
        with self._lock:
            making = self._making.setdefault(name, threading.Lock())
        deadline = Deadline(timeout)
        if not making.acquire(timeout=max(0.0, min(timeout, threading.TIMEOUT_MAX))):
            raise self._timeout_error(name, deadline)
        try:
            connection = self.existing(name)
            return connection if connection is not None else self._connect_to(name, directory, deadline, only)
        finally:
            making.release()

    def check_incarnation(self, worker: Worker, only: Worker | None) -> None:
        """Raise WorkerLost if ``worker`` is another incarnation than ``only``, an owner of objects."""
        if only is not None and worker.incarnation != only.incarnation:
            raise WorkerLost(
                f"{self._described(only.name)} (process {only.pid}), which owned an object, has ended; its "
                "objects are lost",
                only.name,
            )

    def existing(self, name: str) -> WorkerConnection | None:
        """Return the connection for calls to ``name``, if there is one that is not lost."""
        connection = self._out.get(name)
        if connection is not None and self._endpoint.post.lost(connection.number) is not None:
            with self._lock:  # _forget will be called, but has not been yet
                if self._out.get(name) is connection:
                    del self._out[name]
            return None
        return connection

    def is_connected(self, incarnation: str) -> bool:
        """Whether there is a connection to or from this incarnation of a worker."""
        with self._lock:
            connections = list(self._by_number.values())
        return any(
            connection.worker.incarnation == incarnation and not connection.ended
            for connection in connections
        )

    def connections_of(self, name: str) -> list[WorkerConnection]:
        """Return the connections to and from all incarnations of a worker."""
        with self._lock:
            return [
                connection
                for connection in self._by_number.values()
                if connection.worker.name == name and not connection.ended
            ]

    def ended(self, number: int) -> bool:
        """Whether the connection ``number`` is lost."""
        connection = self._by_number.get(number)
        return connection is None or connection.ended

    def close(self) -> None:
        """Stop accepting connections; the endpoint closes those that exist."""
        with self._lock:
            self._closed = True
        for acceptor in self._transport.acceptors:
            acceptor.stop()
        for thread in self._threads:
            thread.join()
        self._transport.close()

    # -- making a connection -------------------------------------------------------------------

    def _connect_to(
        self, name: str, directory: Directory, deadline: Deadline, only: Worker | None
    ) -> WorkerConnection:
        if self._closed:
            raise AgentClosed(f"worker {self._me.name!r}: the agent is closed")
        try:
            worker = directory.find(name, Deadline(0.0), self._me.name)
        except UnknownWorker:
            held = directory.look(name)
            if held is None:
                raise
            raise WorkerLost(f"{self._described(name)} (process {held.pid}) has ended", name) from None
        self.check_incarnation(worker, only)
        try:
            return self._transport.connect(
                worker.unix,
                worker.address,
                worker.port,
                local=worker.host == self._me.host,
                deadline=deadline,
                establish=lambda connection: self._introduce(connection, worker, deadline),
            )
        except (AgentClosed, AuthenticationError, VersionMismatch):
            raise
        except (WireError, RpcError) as error:
            if deadline.expired:
                raise self._timeout_error(name, deadline) from error
            raise WorkerLost(
                f"{self._described(name)} (process {worker.pid}) cannot be reached: {error}", name
            ) from error

    def _introduce(self, connection: Connection, worker: Worker, deadline: Deadline) -> WorkerConnection:
        devices = self._device_maps.get(worker.name)
        mine = self._hello(worker.incarnation, {} if devices is None else devices.as_text())
        with contextlib.closing(wire.send_hello(connection, mine, deadline.remaining())) as peer:
            if peer.hello.refused:
                raise UsageError(f"{self._described(worker.name)} refuses a connection: {peer.hello.refused}")
            name, incarnation = peer.hello.worker.name, peer.hello.worker.incarnation
            if incarnation != worker.incarnation:
                raise WireError(f"expected an answer of {worker.name!r}, got one of {name!r}")
            attached = self._attach(peer, devices, True, deadline.remaining())
            with self._lock:
                if not attached.ended:
                    self._out[worker.name] = attached
            return attached

    def _hello(self, to: str, devices: dict[str, str], refused: str = "") -> WorkerHello:
        nth, restricted = next(self._introductions), self._restricted
        return WorkerHello(
            self._me, self._place, to, main_program(), restricted, nth, self._lends, devices, refused
        )

    @property
    def _lends(self) -> bool:
        """Whether this worker shares memory; a restricted one does not, as it does not trust the others."""
        return self._endpoint.post.lends and not self._restricted

    def _attach(
        self, peer: PeerConnection[WorkerHello], devices: DeviceMap | None, is_caller: bool, timeout: float
    ) -> WorkerConnection:
        """Pass the connection to the endpoint; if both ends lend memory, with that of the other end."""
        hello = peer.hello
        same = hello.worker.process == self._me.process
        same = same or bool(hello.main and hello.main == main_program())
        plain = self._restricted or hello.restricted
        connection = WorkerConnection(
            self._agent, hello.worker, same, plain, None if plain else devices, is_caller, hello.nth
        )
        if peer.is_local and hello.lends and self._lends:
            with open(self._endpoint.memory(), "rb", buffering=0) as mine:
                peer.share_memory([mine.fileno()], timeout)
        with self._lock:
            if not is_caller:
                self._end_older(connection)
            if self._closed:
                raise AgentClosed(f"worker {self._me.name!r}: the agent is closed")
            fd, memory_fd = peer.detach()
            connection.number = self._endpoint.attach(
                fd, peer.pid, partial(self._on_lost, connection), memory_fd
            )
            self._by_number[connection.number] = connection
        return connection

    def _end_older(self, connection: WorkerConnection) -> None:
        """End the earlier connections of a worker that now makes ``connection``, and wait for their end.

        This end may not know yet that they are lost.  A message from one of them, handled after a message
        from ``connection``, could be a method call out of order, or a ``hold`` after its ``drop``.
        """

        def others() -> list[WorkerConnection]:
            connections = [each for each in self._by_number.values() if not each.is_caller]
            return [each for each in connections if each.worker.incarnation == connection.worker.incarnation]

        number = connection.hello_number
        while earlier := [each for each in others() if not each.ended and each.hello_number < number]:
            for each in earlier:
                self._endpoint.post.disconnect(each.number)
            if not self._connection_ended.wait(wire.HANDSHAKE_TIMEOUT_S):
                raise WireError(f"an earlier connection of {connection.worker.name!r} has not ended in time")
        if any(each.hello_number > number for each in others()):
            raise WireError(f"{connection.worker.name!r} has made a newer connection")

    def _on_lost(self, connection: WorkerConnection) -> None:
        """Handle the end of a connection; messages received on it may still have to be handled."""
        with self._lock:
            connection.ended = True
            self._connection_ended.notify_all()
            if self._out.get(connection.worker.name) is connection:
                del self._out[connection.worker.name]
            self._ended.append(connection.number)
            if len(self._ended) > _MAX_LOST_CONNECTIONS:
                self._by_number.pop(self._ended.pop(0), None)
            is_last = not self.is_connected(connection.worker.incarnation)
        self._lost(connection, is_last)

    def _timeout_error(self, name: str, deadline: Deadline) -> CallTimeout:
        return CallTimeout(
            f"{self._described(name)} could not be reached within {format_seconds(deadline.timeout)}"
        )

    def _described(self, name: str) -> str:
        return f"worker {self._me.name!r}: {name!r}"

    # -- accepting -----------------------------------------------------------------------------

    def _accept(self, acceptor: wire.Acceptor) -> None:
        while not self._closed:
            try:
                connection = acceptor.accept(_ACCEPT_TIMEOUT_S)
            except WireTimeout:
                continue
            except WireError as error:
                if not self._closed:
                    # Probably out of file descriptors: retry after a pause.
                    _logger.warning("worker %r: %s", self._me.name, error)
                    time.sleep(_ACCEPT_RETRY_DELAY_S)
                continue
            # In another thread, as the peer may send nothing.
            pool.submit(partial(self._receive_hello, connection))

    def _receive_hello(self, connection: Connection) -> None:
        def answer(hello: WorkerHello) -> WorkerHello:
            if (hello.place, hello.to) != (self._place, self._me.incarnation):
                raise WireError(f"{hello.worker.name!r} did not mean to connect to {self._me.name!r}")
            try:
                devices.append(inverse(hello.devices, hello.worker.name, self._me.name))
            except UsageError as error:
                return self._hello("", {}, str(error))
            return self._hello("", {})

        devices: list[DeviceMap | None] = []
        timeout = wire.HANDSHAKE_TIMEOUT_S
        with (
            contextlib.suppress(ShoalError),
            contextlib.closing(wire.receive_hello(connection, WorkerHello, answer, timeout)) as peer,
        ):
            if devices:
                self._attach(peer, devices[0], False, timeout)
