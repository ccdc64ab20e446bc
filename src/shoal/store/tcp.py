"""The client of a TCP store.

A request occupies one connection from its first byte to the reply.  A store keeps the connections
that are idle and opens another when all are occupied, so that several threads may block in it
while others work, and a reply needs no sorting.
"""

from __future__ import annotations

import random
import threading
import time
from typing import TypeVar

import msgspec

from .. import config
from ..errors import AuthenticationError, StoreError, StoreTimeout, VersionMismatch, WireError, WireTimeout
from ..wire import Connection, Deadline, connect
from ..wording import in_seconds
from .backing import Executor
from .base import Store, timed_out
from .protocol import MAX_MESSAGE, PURPOSE, decode_reply, encode_request
from .requests import Blocking, Request

T = TypeVar("T")

#: seconds beyond a request's deadline in which the server may still say which keys were missing
_GRACE = 2.0

#: idle connections that are kept
_KEPT = 4


class TCPStore(Store):
    """A connection to the store that a :class:`~shoal.store.TCPStoreServer` hosts.

    Args:
        host, port: where the server listens.  It may start later: connecting is tried again
            until the timeout.
        secret: the job's secret.
        timeout: default deadline in seconds, for connecting too; ``SHOAL_TIMEOUT`` unless given.

    Raises:
        AuthenticationError, VersionMismatch: the server holds another secret, or is another build.
        StoreTimeout: nobody listened there in time.
        WireError: the listener there is no store.
    """

    _backing: _Client

    def __init__(self, host: str, port: int, secret: bytes = b"", *, timeout: float | None = None) -> None:
        timeout = config.TIMEOUT.get() if timeout is None else timeout
        super().__init__(_Client(host, port, secret, timeout), timeout)

    @property
    def host(self) -> str:
        """Where the server listens."""
        return self._backing.host

    @property
    def port(self) -> int:
        """Where the server listens."""
        return self._backing.port

    @property
    def address(self) -> str:
        """``host:port`` of the server."""
        return self._backing.address

    @property
    def connections(self) -> int:
        """The number of connections that this store has open now."""
        return self._backing.connections


class _Client(Executor):
    """Connections to one server, idle and busy ones."""

    host: str

    def __init__(self, host: str, port: int, secret: bytes, timeout: float) -> None:
        super().__init__()
        self.host = host
        self.port = port
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._secret = secret
        self._lock = threading.Lock()
        self._idle: list[Connection] = []
        self._busy: set[Connection] = set()
        self._idle.append(self._first_connection(Deadline(timeout)))

    @property
    def connections(self) -> int:
        with self._lock:
            return len(self._idle) + len(self._busy)

    def clone(self, timeout: float) -> _Client:
        return _Client(self.host, self.port, self._secret, timeout)

    def close(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
            for connection in self._busy:
                connection.shutdown()  # closed by the thread that uses it
        for connection in idle:
            connection.close()

    def __str__(self) -> str:
        return f"connection to the store at {self.address}"

    def execute(self, request: Request[T], deadline: Deadline) -> T:
        message = encode_request(request)
        connection = self._take(deadline)
        try:
            connection.send(message, deadline.remaining() + _GRACE)
            reply = connection.recv(deadline.remaining() + _GRACE)
            result = decode_reply(request, reply, deadline.timeout)
        except StoreError:
            self._put_back(connection)  # the server's own answer
            raise
        except BaseException as error:
            self._discard(connection)
            if isinstance(error, WireTimeout):
                raise self._silent(request, deadline) from error
            if isinstance(error, (WireError, OSError, msgspec.MsgspecError, ValueError)):
                raise self._lost(error) from error
            raise
        self._put_back(connection)
        return result

    def _take(self, deadline: Deadline) -> Connection:
        with self._lock:
            if self._idle:
                connection = self._idle.pop()
                self._busy.add(connection)
                return connection
        try:
            connection = self._connect(deadline.remaining() + _GRACE)
        except WireTimeout as error:
            raise StoreTimeout(f"the store at {self.address} did not answer: {error}") from error
        except WireError as error:
            raise self._lost(error) from error
        with self._lock:
            if not self.closed.is_set():
                self._busy.add(connection)
                return connection
        connection.close()
        raise StoreError("closed")  # the store says which

    def _put_back(self, connection: Connection) -> None:
        with self._lock:
            self._busy.discard(connection)
            if not self.closed.is_set() and len(self._idle) < _KEPT:
                self._idle.append(connection)
                return
        connection.close()

    def _discard(self, connection: Connection) -> None:
        with self._lock:
            self._busy.discard(connection)
        connection.close()

    def _connect(self, timeout: float) -> Connection:
        return connect(
            self.host, self.port, secret=self._secret, purpose=PURPOSE, timeout=timeout, limit=MAX_MESSAGE
        )

    def _first_connection(self, deadline: Deadline) -> Connection:
        pause = 0.01
        while True:
            try:
                return self._connect(deadline.remaining())
            except (AuthenticationError, VersionMismatch):
                raise
            except WireError as error:
                if isinstance(error, WireTimeout) or deadline.remaining() <= pause:
                    raise StoreTimeout(
                        f"no store at {self.address} within {in_seconds(deadline.timeout)} ({error}); "
                        "is it running there, and is the address right?"
                    ) from None  # the message says it all
                if not isinstance(error.__cause__, OSError):
                    raise  # the listener there is no store
            # Many ranks start at once: spread them out.
            time.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(2 * pause, 0.5)

    def _silent(self, request: Request[T], deadline: Deadline) -> StoreTimeout:
        if isinstance(request, Blocking):
            missing = timed_out(request.keys, deadline.timeout)
            return StoreTimeout(f"{missing} (as far as known: the store at {self.address} did not answer)")
        return StoreTimeout(
            f"the store at {self.address} did not answer within {in_seconds(deadline.timeout)}"
        )

    def _lost(self, error: Exception) -> StoreError:
        return StoreError(f"lost the store at {self.address}: {error}")
