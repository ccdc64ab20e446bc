"""The server of a TCP store: a table, and the requests that wait for keys of it.

A blocking request whose keys are not all there is parked with its deadline; the request that brings
the last key wakes it.  Nothing is polled.
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
    HANDSHAKE_TIMEOUT,
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
        order: its place among all, in the order in which they were made; from 1.
        parked: the request that waits for its keys, if one does.
        line: of the writes that came on it, b"" before the first.
    """

    order = 0
    parked: Blocking[object] | None = None
    line = b""


class TCPStoreServer(Server[_StoreClient]):
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
        # Now: when clients have taken all that there are, the rest of the process has none either.
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
        """Begin to hold the data."""
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
        """Execute a request: its reply; None if it is parked."""
        request, line, number = asked
        if line:
            if session.line not in (b"", line):
                raise WireError("writes of two lines came on one connection")
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
            # The client must not send it again and again.
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
        """Answer those for whom ``key`` was the last one missing, after the one who set it."""
        if key not in self._table.values:
            return
        # Thousands may wait for the same: their answer is encoded once.
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
                    # A key that had appeared earlier has been deleted since.
                    self._waiting.add(session, error.keys)
                    continue
            self._unpark(session)
            self.send_later(session, reply)

    def _unpark(self, session: _StoreClient) -> None:
        session.parked = None
        self._waiting.remove(session)
        self.alarms.cancel(session)
