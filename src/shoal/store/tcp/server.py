"""The server of a TCP store: a table, and the requests that wait for its keys.

A blocking request with missing keys is parked with its deadline; the request that sets the last of the keys
wakes it. Nothing is polled.
"""

from __future__ import annotations

import itertools
import logging
import secrets
import time
from collections.abc import Mapping

import msgspec

from ...errors import StoreError, WireError
from ...net import (
    HANDSHAKE_TIMEOUT_S,
    ClientConnection,
    Deadline,
    PendingHandshake,
    Server,
    listen,
    raise_descriptor_limit,
)
from ..base import checked_key, checked_value
from ..operations import KeysMissing, KeyTable
from ..requests import Blocking
from .protocol import MAX_MESSAGE, PURPOSE, Numbered, Status, Welcome, decode_request, encode_reply
from .replies import Replies
from .waiting import WaitIndex

logger = logging.getLogger(__name__)


class _StoreClient(ClientConnection):
    """One connection.

    Attributes:
        order: its position in the order of creation, from 1.
        parked: the request that waits for keys, if any.
        line: name of the write channel that uses the connection; b"" before the first write.
    """

    order = 0
    parked: Blocking[object] | None = None
    line = b""


class TCPStoreServer(Server[_StoreClient]):
    """Hosts a store on a TCP port, in a daemon thread.

    The constructor binds the port, so that :attr:`port` is known; the server runs from :meth:`start` to
    :meth:`close`. As a context manager it calls both.

    Args:
        host: interface to listen on; default: loopback.
        port: 0 lets the kernel choose.
        secret: every client must prove to know it.
        records: initial keys and values.
        handshake_timeout: seconds within which a client must authenticate.

    Raises:
        UsageError: ``host`` is reachable from other hosts and ``secret`` is empty.
        WireError: the address is in use, or does not belong to this host.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        secret: bytes = b"",
        *,
        records: Mapping[str, bytes] | None = None,
        handshake_timeout: float = HANDSHAKE_TIMEOUT_S,
    ) -> None:
        checked = {checked_key(key): checked_value(value) for key, value in (records or {}).items()}
        self._welcome = msgspec.msgpack.encode(self._hold(checked))
        self._waiting: WaitIndex[_StoreClient] = WaitIndex()
        self._orders = itertools.count(1)
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
        # Early: once clients have used up all descriptors, the rest of the process has none either.
        raise_descriptor_limit()

    @property
    def address(self) -> str:
        """``host:port``."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def url(self) -> str:
        """The URL of this store, for :func:`~shoal.store.open_store`."""
        return f"tcp://{self.address}"

    def session(self, handshake: PendingHandshake, name: str, limit: int) -> _StoreClient:
        session = _StoreClient(handshake, name, limit)
        session.order = next(self._orders)
        return session

    def greeted(self, session: _StoreClient) -> None:
        session.send(self._welcome)

    def _hold(self, records: Mapping[str, bytes]) -> Welcome:
        """Create the table; return the welcome message."""
        self._table, self._replies = KeyTable(), Replies()
        self._table.values.update(records)
        return Welcome(secrets.token_bytes(16))

    def received(self, session: _StoreClient, message: bytearray) -> None:
        self._refuse_second(session)
        reply = self._execute(session, decode_request(message))
        touched, self._table.touched = self._table.touched, []
        for key in touched:
            self._wake(key)
        if reply is not None:
            session.send(reply)

    def _refuse_second(self, session: _StoreClient) -> None:
        """Raise WireError if the client still waits for a reply."""
        if session.parked is not None:
            raise WireError("the client sent a request before the last one was answered")

    def _execute(self, session: _StoreClient, asked: Numbered) -> bytes | bytearray | None:
        """Execute a request; return its reply, or None if it is parked."""
        request, line, number = asked
        if line:
            if session.line not in (b"", line):
                raise WireError("writes of two channels arrived on one connection")
            session.line = line
            kept = self._replies.repeated(line, session.order, number, request)
            if kept is not None:
                return kept
        before = len(self._table.touched)
        try:
            reply = encode_reply(Status.DONE, request.apply(self._table))
        except KeysMissing as error:
            assert isinstance(request, Blocking)
            deadline = Deadline(request.timeout)
            if not deadline.expired:
                session.parked = request
                self._waiting.add(session, error.keys)
                self.alarms.set(session, deadline.at)
                return None
            reply = encode_reply(Status.MISSING, error.keys)
        except StoreError as error:
            reply = encode_reply(Status.FAILED, str(error))
        except Exception as error:
            # A reply keeps the client from sending the request again.
            logger.exception("store: a request of client %s", session.name)
            session.send(encode_reply(Status.FAILED, f"the store failed at the request: {error!r}"))
            raise WireError("an unexpected error") from error
        if len(self._table.touched) > before:
            self._replies.keep(line, number, reply, request)
        return reply

    def overdue(self, session: _StoreClient) -> None:
        assert session.parked is not None
        keys = session.parked.keys
        self._unpark(session)
        self.send_later(session, encode_reply(Status.MISSING, self._table.missing(keys)))

    def dropped(self, session: _StoreClient) -> None:
        self._waiting.remove(session)
        if session.line:
            self._replies.gone(session.line, session.order, time.monotonic())

    def _wake(self, key: str) -> None:
        """Answer the requests for which ``key`` was the last missing key, after the request that set it."""
        if key not in self._table.values:
            return
        # Thousands may wait for the same keys: their reply is encoded once.
        replies: dict[tuple[object, ...], bytearray] = {}
        for session in self._waiting.appeared(key):
            request = session.parked
            assert request is not None
            same = (type(request), *request.keys)
            reply = replies.get(same)
            if reply is None:
                try:
                    reply = replies[same] = encode_reply(Status.DONE, request.apply(self._table))
                except KeysMissing as error:
                    # A key that appeared earlier has been deleted since.
                    self._waiting.add(session, error.keys)
                    continue
            self._unpark(session)
            self.send_later(session, reply)

    def _unpark(self, session: _StoreClient) -> None:
        session.parked = None
        self._waiting.remove(session)
        self.alarms.cancel(session)
