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
import secrets
import socket
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any
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
from ...net import Connection, Deadline
from .device_maps import DeviceMap, inverse
from .directory import Directory, Worker
from .line import WorkerConnection, WorkerHello, main_program
from .post import Endpoint

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
        agent: of this end, for decoding.
        endpoint: takes over established connections.
        secret: of the job.
        place: identity of job, epoch and namespace: workers of another place are refused.
        interface: address that the TCP listener binds to.
        restricted: whether the agent only sends and accepts plain values.
        device_maps: of the agent's calls, by callee.
        lost: called with a connection when it has ended.
    """

    def __init__(
        self,
        agent: Any,
        endpoint: Endpoint,
        *,
        secret: bytes,
        place: str,
        interface: str,
        restricted: bool,
        device_maps: dict[str, DeviceMap],
        lost: Callable[[WorkerConnection], None],
    ) -> None:
        self._agent = agent
        self._endpoint = endpoint
        self._secret = secret
        self._place = place
        self._restricted = restricted
        self._device_maps = device_maps
        self._lost = lost
        self._lock = threading.RLock()
        #: notified when a connection has ended
        self._over = threading.Condition(self._lock)
        self._introductions = itertools.count()
        #: name -> lock that is held while a connection to that worker is made; unused locks are collected
        self._making: WeakValueDictionary[str, threading.Lock] = WeakValueDictionary()
        self._out: dict[str, WorkerConnection] = {}
        self._lines: dict[int, WorkerConnection] = {}
        self._ended: list[int] = []
        self._closed = False
        self.unix = f"shoal-rpc-{secrets.token_hex(12)}"
        with contextlib.ExitStack() as undo:
            local = undo.enter_context(wire.listen_unix(self.unix))
            far = undo.enter_context(wire.listen(interface, secret=secret))
            self.port: int = far.getsockname()[1]
            self._acceptors = [
                undo.enter_context(wire.Acceptor(listener, secret=secret, purpose=_PURPOSE, plain=True))
                for listener in (local, far)
            ]
            undo.pop_all()
        self._threads: list[threading.Thread] = []

    def start(self, me: Worker) -> None:
        """Start to accept connections as ``me``."""
        self._me = me
        for acceptor in self._acceptors:
            thread = threading.Thread(
                target=self._accept, args=(acceptor,), name=f"shoal-rpc-accept-{me.name}", daemon=True
            )
            thread.start()
            self._threads.append(thread)

    def line(self, number: int) -> WorkerConnection:
        """Return the connection with this number in the endpoint; KeyError if it was discarded."""
        found = self._lines.get(number)
        if found is None:
            with self._lock:  # it may be being attached
                found = self._lines[number]
        return found

    def to(
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
            raise self._late(name, deadline)
        try:
            line = self.existing(name)
            return line if line is not None else self._make(name, directory, deadline, only)
        finally:
            making.release()

    def check(self, worker: Worker, only: Worker | None) -> None:
        """Raise WorkerLost if ``worker`` is another incarnation than ``only``, an owner of objects."""
        if only is not None and worker.incarnation != only.incarnation:
            raise WorkerLost(
                f"{self._who(only.name)} (process {only.pid}), which owned an object, has ended; its objects "
                "are lost",
                only.name,
            )

    def existing(self, name: str) -> WorkerConnection | None:
        """Return the connection for calls to ``name``, if there is one that is not lost."""
        line = self._out.get(name)
        if line is not None and self._endpoint.post.lost(line.number) is not None:
            with self._lock:  # _forget will be called, but has not been yet
                if self._out.get(name) is line:
                    del self._out[name]
            return None
        return line

    def connected(self, incarnation: str) -> bool:
        """Whether there is a connection to or from this incarnation of a worker."""
        with self._lock:
            lines = list(self._lines.values())
        return any(line.worker.incarnation == incarnation and not line.ended for line in lines)

    def with_worker(self, name: str) -> list[WorkerConnection]:
        """Return the connections to and from all incarnations of a worker."""
        with self._lock:
            return [line for line in self._lines.values() if line.worker.name == name and not line.ended]

    def ended(self, number: int) -> bool:
        """Whether the connection ``number`` is lost."""
        line = self._lines.get(number)
        return line is None or line.ended

    def close(self) -> None:
        """Stop accepting connections; the endpoint closes those that exist."""
        with self._lock:
            self._closed = True
        for acceptor in self._acceptors:
            acceptor.stop()
        for thread in self._threads:
            thread.join()
        for acceptor in self._acceptors:
            acceptor.close()

    # -- making a connection -------------------------------------------------------------------

    def _make(
        self, name: str, directory: Directory, deadline: Deadline, only: Worker | None
    ) -> WorkerConnection:
        if self._closed:
            raise AgentClosed(f"worker {self._me.name!r}: the agent is closed")
        try:
            worker = directory.find(name, 0.0, self._me.name)
        except UnknownWorker:
            held = directory.look(name)
            if held is None:
                raise
            raise WorkerLost(f"{self._who(name)} (process {held.pid}) has ended", name) from None
        self.check(worker, only)
        try:
            return self._connect(worker, deadline)
        except (AgentClosed, AuthenticationError, VersionMismatch):
            raise
        except (WireError, RpcError) as error:
            if deadline.expired:
                raise self._late(name, deadline) from error
            raise WorkerLost(
                f"{self._who(name)} (process {worker.pid}) cannot be reached: {error}", name
            ) from error

    def _connect(self, worker: Worker, deadline: Deadline) -> WorkerConnection:
        if worker.host == self._me.host:
            # A failure here only means that the two are in different network namespaces.
            with contextlib.suppress(WireError, WireTimeout):
                return self._introduce(
                    wire.connect_unix(
                        worker.unix, secret=self._secret, purpose=_PURPOSE, timeout=self._left(deadline)
                    ),
                    worker,
                    deadline,
                )
        connection = wire.connect(
            worker.address,
            worker.port,
            secret=self._secret,
            purpose=_PURPOSE,
            timeout=self._left(deadline),
            plain=True,  # the core takes over the bare socket
        )
        return self._introduce(connection, worker, deadline)

    def _left(self, deadline: Deadline) -> float:
        return max(deadline.remaining(), 0.001)

    def _introduce(self, connection: Connection, worker: Worker, deadline: Deadline) -> WorkerConnection:
        with contextlib.closing(connection):
            devices = self._device_maps.get(worker.name)
            mine = self._hello(worker.incarnation, {} if devices is None else devices.words())
            theirs = wire.introduce(connection, mine, self._left(deadline))
            if theirs.refused:
                raise UsageError(f"{self._who(worker.name)} refuses a connection: {theirs.refused}")
            if theirs.worker.incarnation != worker.incarnation:
                raise WireError(f"expected an answer of {worker.name!r}, got one of {theirs.worker.name!r}")
            line = self._attach(connection, theirs, devices, True, self._left(deadline))
            with self._lock:
                if not line.ended:
                    self._out[worker.name] = line
            return line

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
        self,
        connection: Connection,
        theirs: WorkerHello,
        devices: DeviceMap | None,
        calls: bool,
        timeout: float,
    ) -> WorkerConnection:
        """Pass the connection to the endpoint; if both ends lend memory, with that of the other end."""
        same = theirs.worker.process == self._me.process
        same = same or bool(theirs.main and theirs.main == main_program())
        plain = self._restricted or theirs.restricted
        line = WorkerConnection(
            self._agent, theirs.worker, same, plain, None if plain else devices, calls, theirs.nth
        )
        pid = wire.peer_pid(connection) if connection.socket.family == socket.AF_UNIX else 0
        lost = partial(self._forget, line)
        with contextlib.ExitStack() as undo:
            memory = self._exchange(connection, timeout) if theirs.lends and self._lends else None
            if memory is not None:
                undo.callback(memory.close)
            with self._lock:
                if not calls:
                    self._end_earlier(line)
                if self._closed:
                    raise AgentClosed(f"worker {self._me.name!r}: the agent is closed")
                undo.pop_all()
                fd = -1 if memory is None else memory.fd
                line.number = self._endpoint.attach(connection.detach(), pid, lost, fd)
                self._lines[line.number] = line
        return line

    def _exchange(self, connection: Connection, timeout: float) -> wire.SharedMemory | None:
        """Exchange descriptors of lent memory; return that of the other end, or None over TCP."""
        with open(self._endpoint.memory(), "rb", buffering=0) as mine:
            return wire.share_memory(connection, mine.fileno(), timeout)

    def _end_earlier(self, line: WorkerConnection) -> None:
        """End the earlier connections of a worker that now makes ``line``, and wait until they have ended.

        This end may not know yet that they are lost.  A message from one of them, handled after a message
        from ``line``, could be a method call out of order, or a ``hold`` after its ``drop``.
        """

        def others() -> list[WorkerConnection]:
            lines = [each for each in self._lines.values() if not each.calls]
            return [each for each in lines if each.worker.incarnation == line.worker.incarnation]

        while earlier := [each for each in others() if not each.ended and each.nth < line.nth]:
            for each in earlier:
                self._endpoint.post.disconnect(each.number)
            if not self._over.wait(wire.HANDSHAKE_TIMEOUT_S):
                raise WireError(f"an earlier connection of {line.worker.name!r} has not ended in time")
        if any(each.nth > line.nth for each in others()):
            raise WireError(f"{line.worker.name!r} has made a newer connection")

    def _forget(self, line: WorkerConnection) -> None:
        """Handle the end of a connection; messages received on it may still have to be handled."""
        with self._lock:
            line.ended = True
            self._over.notify_all()
            if self._out.get(line.worker.name) is line:
                del self._out[line.worker.name]
            self._ended.append(line.number)
            if len(self._ended) > _MAX_LOST_CONNECTIONS:
                self._lines.pop(self._ended.pop(0), None)
        self._lost(line)

    def _late(self, name: str, deadline: Deadline) -> CallTimeout:
        return CallTimeout(
            f"{self._who(name)} could not be reached within {format_seconds(deadline.timeout)}"
        )

    def _who(self, name: str) -> str:
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
            pool.submit(partial(self._be_introduced, connection))

    def _be_introduced(self, connection: Connection) -> None:
        def answer(theirs: WorkerHello) -> WorkerHello:
            if (theirs.place, theirs.to) != (self._place, self._me.incarnation):
                raise WireError(f"{theirs.worker.name!r} did not mean to connect to {self._me.name!r}")
            try:
                devices.append(inverse(theirs.devices, theirs.worker.name, self._me.name))
            except UsageError as error:
                return self._hello("", {}, str(error))
            return self._hello("", {})

        devices: list[DeviceMap | None] = []
        with contextlib.closing(connection), contextlib.suppress(ShoalError):
            theirs = wire.be_introduced(connection, WorkerHello, answer, wire.HANDSHAKE_TIMEOUT_S)
            if devices:
                self._attach(connection, theirs, devices[0], False, wire.HANDSHAKE_TIMEOUT_S)
