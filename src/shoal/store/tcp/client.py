"""The client of a TCP store.

A request uses one write channel (see ``replies.py``) from its first byte to the reply. The store keeps idle
channels and creates another one when all are busy, so that several threads may block in it while others
work, and replies need not be matched with requests.

A channel uses one connection at a time. If it is lost, the channel reconnects as soon as the server can be
reached, and sends its request again until the deadline. It raises at once if the data is lost: if no server
listens there any more, unless the server had reported its data as durable, or if the server there has other
data.
"""

from __future__ import annotations

import os
import threading
import time
from typing import TypeVar

from msgspec.structs import replace

from ... import config
from ...common.formatting import format_seconds
from ...errors import AuthenticationError, StoreError, StoreTimeout, VersionMismatch, WireError, WireTimeout
from ...net import HANDSHAKE_TIMEOUT_S, Connection, Deadline, connect, format_address
from ..backing import Backoff, RequestExecutor
from ..base import Store, timed_out
from ..requests import Blocking, StoreRequest
from .protocol import MAX_MESSAGE, MAX_WELCOME, PURPOSE, Welcome, decode_reply, decode_welcome, encode_request
from .replies import CHANNEL_TTL_S

T = TypeVar("T")

#: seconds beyond a request's deadline for which the client waits for the server to name the missing keys
_REPLY_MARGIN_S = 2.0

#: number of idle connections kept
_MAX_IDLE_CONNECTIONS = 4

#: seconds after which a write is not sent again: the server may soon forget that it was executed
_MAX_REPEAT_S = CHANNEL_TTL_S - 60.0


class TCPStore(Store):
    """A client of the store that a :class:`~shoal.store.TCPStoreServer` hosts.

    Args:
        host, port: address of the server.
        secret: the job's secret.
        timeout: default deadline in seconds, also for connecting; None: ``SHOAL_TIMEOUT``.
        wait_for_server: if no server listens there, wait for one until the timeout.

    Raises:
        StoreError: no server listens there, and ``wait_for_server`` is False.
        AuthenticationError, VersionMismatch: the server has another secret, or another build.
        StoreTimeout: no server listened there in time.
        WireError: the server there is not a store.
    """

    _backing: _TcpBacking

    def __init__(
        self,
        host: str,
        port: int,
        secret: str | bytes = b"",
        *,
        timeout: float | None = None,
        wait_for_server: bool = True,
    ) -> None:
        timeout = config.TIMEOUT.get() if timeout is None else timeout
        key = config.encoded_secret(secret)
        super().__init__(_TcpBacking(host, port, key, timeout, wait_for_server=wait_for_server), timeout)

    @property
    def host(self) -> str:
        """Host of the server."""
        return self._backing.host

    @property
    def port(self) -> int:
        """Port of the server."""
        return self._backing.port

    @property
    def address(self) -> str:
        """``host:port`` of the server."""
        return self._backing.address

    @property
    def connections(self) -> int:
        """The number of open connections of this store."""
        return self._backing.connections


class _TcpWriteChannel:
    """A write channel, for one request at a time; ``connection`` is None while it is disconnected."""

    def __init__(self) -> None:
        self.name = os.urandom(16)
        self.number = 0
        self.connection: Connection | None = None


class _TcpBacking(RequestExecutor):
    """The write channels to one server, idle and busy."""

    host: str

    def __init__(
        self,
        host: str,
        port: int,
        secret: bytes,
        timeout: float,
        welcome: Welcome | None = None,
        *,
        wait_for_server: bool,
    ) -> None:
        super().__init__()
        self.host = host
        self.port = port
        self.address = format_address(host, port)
        self._secret = secret
        self._welcome = welcome
        self._lock = threading.Lock()
        self._idle: list[_TcpWriteChannel] = []
        #: idle channels without a connection; their names are used again, as the server stores each name
        self._disconnected: list[_TcpWriteChannel] = []
        self._busy: set[_TcpWriteChannel] = set()
        channel = _TcpWriteChannel()
        channel.connection = self._first_connection(Deadline(timeout), wait_for_server=wait_for_server)
        self._idle.append(channel)

    @property
    def connections(self) -> int:
        with self._lock:
            return len(self._idle) + sum(channel.connection is not None for channel in self._busy)

    def clone(self, timeout: float) -> _TcpBacking:
        return _TcpBacking(self.host, self.port, self._secret, timeout, self._welcome, wait_for_server=False)

    def clone_accepting_new_data(self, timeout: float) -> _TcpBacking:
        return _TcpBacking(self.host, self.port, self._secret, timeout, wait_for_server=False)

    def close(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
            for channel in self._busy:
                if channel.connection is not None:
                    channel.connection.shutdown()  # closed by the thread that uses it
        for channel in idle:
            assert channel.connection is not None
            channel.connection.close()

    def __str__(self) -> str:
        return f"connection to the store at {self.address}"

    def execute(self, request: StoreRequest[T], deadline: Deadline) -> T:
        channel = self._acquire()
        try:
            try:
                reply = self._ask(channel, request, deadline)
            except BaseException:
                self._disconnect(channel)
                raise
            try:
                return decode_reply(request, reply, deadline.timeout)
            except (ValueError, IndexError) as error:
                self._disconnect(channel)
                raise self._lost_error(error) from error
        finally:
            self._release(channel)

    def _ask(self, channel: _TcpWriteChannel, request: StoreRequest[T], deadline: Deadline) -> bytes:
        """Send the request, again after each loss of a connection, and return the reply."""
        if request.writes:
            channel.number += 1
        message = encode_request(request, channel.name, channel.number)
        first = time.monotonic()
        reply_deadline = Deadline(deadline.remaining() + _REPLY_MARGIN_S)
        losses = 0
        while True:
            connection = channel.connection
            if connection is None:
                connection = self._reconnect(channel, request, deadline, reply_deadline, losses)
                if losses and request.writes and time.monotonic() - first > _MAX_REPEAT_S:
                    raise self._no_reply_error(request, deadline)
                if losses and isinstance(request, Blocking):
                    message = encode_request(replace(request, timeout=deadline.remaining()))
            try:
                connection.send(message, deadline.remaining() + _REPLY_MARGIN_S)
                return connection.recv(deadline.remaining() + _REPLY_MARGIN_S)
            except WireTimeout as error:
                raise self._no_reply_error(request, deadline) from error
            except (WireError, OSError):
                self._disconnect(channel)
                losses += 1

    def _reconnect(
        self,
        channel: _TcpWriteChannel,
        request: StoreRequest[T],
        deadline: Deadline,
        reply_deadline: Deadline,
        losses: int,
    ) -> Connection:
        """Connect the channel as soon as the server can be reached, until ``reply_deadline`` expires."""
        # The first loss may be an accident: reconnect at once. After further losses, pause.
        backoff, failures = Backoff(self.closed, 0.01 * 2 ** min(losses, 6)), max(0, losses - 1)
        why = "its connections are lost again and again"
        while True:
            if failures:
                backoff.pause(reply_deadline.remaining())
            if losses + failures and reply_deadline.expired:
                raise self._no_reply_error(request, deadline, why, sent=losses > 0)
            try:
                connection = self._connect(min(reply_deadline.remaining(), HANDSHAKE_TIMEOUT_S))
            except (AuthenticationError, VersionMismatch) as error:
                raise self._lost_error(error) from error
            except WireError as error:
                if self._is_data_lost(error):
                    raise self._lost_error(error) from error
                failures += 1
                why = str(error)
                continue
            with self._lock:
                if not self.closed.is_set():
                    channel.connection = connection
                    return connection
            connection.close()
            raise StoreError("closed")  # Store replaces the message

    def _acquire(self) -> _TcpWriteChannel:
        with self._lock:
            if self.closed.is_set():
                raise StoreError("closed")  # Store replaces the message
            channel = (
                self._idle.pop()
                if self._idle
                else self._disconnected.pop()
                if self._disconnected
                else _TcpWriteChannel()
            )
            self._busy.add(channel)
            return channel

    def _release(self, channel: _TcpWriteChannel) -> None:
        with self._lock:
            self._busy.discard(channel)
            if (
                channel.connection is not None
                and not self.closed.is_set()
                and len(self._idle) < _MAX_IDLE_CONNECTIONS
            ):
                self._idle.append(channel)
                return
            connection, channel.connection = channel.connection, None
            self._disconnected.append(channel)
        if connection is not None:
            connection.close()

    def _disconnect(self, channel: _TcpWriteChannel) -> None:
        with self._lock:
            connection, channel.connection = channel.connection, None
        if connection is not None:
            connection.close()

    def _connect(self, timeout: float) -> Connection:
        """Connect to the server; StoreError if it has other data than before."""
        deadline = Deadline(timeout)
        connection = connect(
            self.host, self.port, secret=self._secret, purpose=PURPOSE, timeout=timeout, limit=MAX_WELCOME
        )
        try:
            welcome = decode_welcome(connection.recv(deadline.remaining()))
            if self._welcome is None:
                self._welcome = welcome
            elif welcome.state != self._welcome.state:
                raise StoreError(
                    f"lost the store at {self.address}: the server there has restarted without its data.  "
                    "Start the job again"
                )
            connection.limit = MAX_MESSAGE
        except BaseException:
            connection.close()
            raise
        return connection

    def _first_connection(self, deadline: Deadline, *, wait_for_server: bool) -> Connection:
        """Connect to the server; ``wait_for_server``: also if it starts later."""
        backoff = Backoff(self.closed)
        while True:
            try:
                return self._connect(deadline.remaining())
            except (AuthenticationError, VersionMismatch):
                raise
            except WireError as error:
                if not wait_for_server and self._is_data_lost(error):
                    raise self._lost_error(error) from error
                if isinstance(error, WireTimeout) or deadline.remaining() <= backoff.seconds:
                    raise StoreTimeout(
                        f"no store at {self.address} within {format_seconds(deadline.timeout)} ({error}); "
                        "is it running there, and is the address right?"
                    ) from None  # the message contains the cause
                if self._welcome is None and not isinstance(error.__cause__, OSError):
                    raise  # the server there is not a store
            # Many ranks start at the same time: spread their attempts.
            backoff.pause(deadline.remaining())

    def _is_data_lost(self, error: WireError) -> bool:
        """Return whether the data is lost: no server listens, and the data was in memory."""
        refused = isinstance(error.__cause__, ConnectionRefusedError)
        return refused and not (self._welcome is not None and self._welcome.durable)

    def _no_reply_error(
        self, request: StoreRequest[T], deadline: Deadline, why: str = "", *, sent: bool = True
    ) -> StoreTimeout:
        """Return the error of a request without a reply; ``why``: why there is no connection."""
        silence = f"the store at {self.address} did not answer"
        if why:
            silence += f": {why}"
        if isinstance(request, Blocking):
            missing = timed_out(request.keys, deadline.timeout)
            return StoreTimeout(f"{missing} (as far as known: {silence})")
        if not why:
            silence += f" within {format_seconds(deadline.timeout)}"
        if request.writes:
            done = (
                "it is unknown whether the request was or will be done" if sent else "nothing was sent to it"
            )
            silence += f"; {done}"
        return StoreTimeout(silence)

    def _lost_error(self, error: Exception) -> StoreError:
        return StoreError(f"{'no' if self._welcome is None else 'lost the'} store at {self.address}: {error}")
