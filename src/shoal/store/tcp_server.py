"""The server of a TCP store: a table, and the requests that wait for keys of it.

A blocking request whose keys are not all there is parked with its deadline; the request that brings
the last key wakes it.  Nothing is polled.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from ..errors import StoreError, WireError
from ..wire import HANDSHAKE_TIMEOUT, Deadline, PendingHandshake, Server, Session, listen
from .base import checked_key, checked_value
from .operations import KeysMissing, Table
from .protocol import MAX_MESSAGE, PURPOSE, Status, encode_reply
from .requests import Blocking, Request, decode
from .waiting import Waiting


class _Client(Session):
    """One connection; ``parked``: the request that waits for its keys, if one does."""

    parked: Blocking[object] | None = None


class TCPStoreServer(Server[_Client]):
    """Hosts a store on a TCP port, in a daemon thread.

    Binds at once, so that :attr:`port` is known; serves between :meth:`start` and :meth:`close`.
    As a context manager it does both.

    Args:
        host: interface to listen on; loopback unless given.
        port: 0 lets the kernel choose.
        secret: the one that every client must prove to hold.
        records: keys and values that are there from the beginning.
        handshake_timeout: seconds that a client gets to prove itself.

    Raises:
        UsageError: ``host`` can be reached from elsewhere and ``secret`` is empty.
        WireError: the address is in use, or not this host's.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        secret: bytes = b"",
        *,
        records: Mapping[str, bytes] | None = None,
        handshake_timeout: float = HANDSHAKE_TIMEOUT,
    ) -> None:
        self._table = Table()
        for key, value in (records or {}).items():
            self._table.set(checked_key(key), checked_value(value))
        self._table.touched.clear()
        self._waiting: Waiting[_Client] = Waiting()
        listener = listen(host, port, secret=secret)
        self.host = host
        self.port: int = listener.getsockname()[1]
        super().__init__(
            listener,
            secret=secret,
            purpose=PURPOSE,
            limit=MAX_MESSAGE,
            what="store",
            handshake_timeout=handshake_timeout,
        )

    @property
    def address(self) -> str:
        """``host:port``."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def url(self) -> str:
        """The URL of this store, for :func:`~shoal.store.open_store`."""
        return f"tcp://{self.address}"

    def session(self, handshake: PendingHandshake, name: str, limit: int) -> _Client:
        return _Client(handshake, name, limit)

    def received(self, session: _Client, message: bytearray) -> None:
        if session.parked is not None:
            raise WireError("the client sent a request before the last one was answered")
        try:
            request: Request[Any] = decode(message)
        except msgspec.MsgspecError as error:
            raise WireError(str(error)) from error
        try:
            reply = encode_reply(Status.DONE, request.apply(self._table))
        except KeysMissing as error:
            assert isinstance(request, Blocking)
            deadline = Deadline(request.timeout)
            if not deadline.expired:
                session.parked = request
                self._waiting.add(session, error.keys)
                self.alarms.set(session, deadline.at)
                return
            reply = encode_reply(Status.MISSING, error.keys)
        except StoreError as error:
            reply = encode_reply(Status.FAILED, str(error))
        touched, self._table.touched = self._table.touched, []
        for key in touched:
            self._wake(key)
        session.send(reply)

    def overdue(self, session: _Client) -> None:
        assert session.parked is not None
        self._waiting.remove(session)
        self._unpark(session, Status.MISSING, self._table.missing(session.parked.keys))

    def dropped(self, session: _Client) -> None:
        self._waiting.remove(session)

    def _wake(self, key: str) -> None:
        """Answer those for whom ``key`` was the last one missing."""
        if key not in self._table.values:
            return
        for session in self._waiting.appeared(key):
            request = session.parked
            assert request is not None
            try:
                result = request.apply(self._table)
            except KeysMissing as error:
                # A key that had appeared earlier has been deleted since.
                self._waiting.add(session, error.keys)
                continue
            self._unpark(session, Status.DONE, result)

    def _unpark(self, session: _Client, status: Status, body: object) -> None:
        session.parked = None
        self.alarms.cancel(session)
        self.send(session, encode_reply(status, body))
