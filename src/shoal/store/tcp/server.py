"""The server of a TCP store: a table, and the requests that wait for its keys.

A blocking request with missing keys is parked with its deadline; the request that sets the last of the keys
wakes it. Nothing is polled.
"""

from __future__ import annotations

import itertools
import logging
import secrets
import time
from collections.abc import Hashable, Iterable, Mapping
from typing import Generic, TypeVar

import msgspec

from ... import config
from ...errors import StoreError, WireError
from ...net import (
    HANDSHAKE_TIMEOUT_S,
    ClientConnection,
    Deadline,
    Server,
    format_address,
    listen,
    raise_descriptor_limit,
)
from ..base import checked_key, checked_value
from ..requests import Blocking, KeysMissing, KeyTable
from .protocol import MAX_MESSAGE, PURPOSE, Numbered, Status, Welcome, decode_request, encode_reply
from .replies import StoredReplies

logger = logging.getLogger(__name__)

T = TypeVar("T", bound=Hashable)


class WaitIndex(Generic[T]):
    """Items that wait until all of their keys exist, indexed by key.

    The cost of a new key depends on the number of items that wait for it, not on that of all items.
    """

    def __init__(self) -> None:
        self._keys: dict[T, set[str]] = {}
        # A dict used as an ordered set: items are woken in the order in which they began to wait.
        self._items: dict[str, dict[T, None]] = {}

    def add(self, item: T, keys: Iterable[str]) -> None:
        """Let ``item`` wait for ``keys``, at least one."""
        self._keys[item] = set(keys)
        for key in self._keys[item]:
            self._items.setdefault(key, {})[item] = None

    def appeared(self, key: str) -> list[T]:
        """Record that ``key`` exists; remove and return the items that wait for no other key."""
        ready = []
        for item in self._items.pop(key, ()):
            keys = self._keys[item]
            keys.discard(key)
            if not keys:
                del self._keys[item]
                ready.append(item)
        return ready

    def remove(self, item: T) -> None:
        """Remove ``item`` if it waits."""
        for key in self._keys.pop(item, ()):
            items = self._items[key]
            del items[item]
            if not items:
                del self._items[key]

    def __len__(self) -> int:
        return len(self._keys)


class _StoreClient(ClientConnection):
    """One connection.

    Attributes:
        order: its position in the order of authentication, from 1.
        parked: the request that waits for keys, if any.
        channel: name of the write channel that uses the connection; b"" before the first write.
    """

    order = 0
    parked: Blocking[object] | None = None
    channel = b""


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
        secret: str | bytes = b"",
        *,
        records: Mapping[str, bytes] | None = None,
        handshake_timeout: float = HANDSHAKE_TIMEOUT_S,
    ) -> None:
        checked = {checked_key(key): checked_value(value) for key, value in (records or {}).items()}
        self._welcome = msgspec.msgpack.encode(self._create_table(checked))
        self._waiting: WaitIndex[_StoreClient] = WaitIndex()
        self._orders = itertools.count(1)
        key = config.encoded_secret(secret)
        listener = listen(host, port, secret=key)
        self.host = host
        self.port: int = listener.getsockname()[1]
        super().__init__(
            listener,
            secret=key,
            purpose=PURPOSE,
            limit=MAX_MESSAGE,
            kind="store",
            client_class=_StoreClient,
            handshake_timeout=handshake_timeout,
        )
        # Early: once clients have used up all descriptors, the rest of the process has none either.
        raise_descriptor_limit()

    @property
    def address(self) -> str:
        """``host:port``."""
        return format_address(self.host, self.port)

    @property
    def url(self) -> str:
        """The URL of this store, for :func:`~shoal.store.open_store`."""
        return f"tcp://{self.address}"

    @property
    def keys(self) -> int:
        """The number of keys."""
        return len(self._table.values)

    def on_authenticated(self, client: _StoreClient) -> None:
        client.order = next(self._orders)
        client.send(self._welcome)

    def _create_table(self, records: Mapping[str, bytes]) -> Welcome:
        """Create the table; return the welcome message."""
        self._table, self._replies = KeyTable(), StoredReplies()
        self._table.values.update(records)
        return Welcome(secrets.token_bytes(16))

    def on_message(self, client: _StoreClient, message: bytearray) -> None:
        self._refuse_second(client.parked is not None)
        reply = self._execute(client, decode_request(message))
        touched, self._table.touched = self._table.touched, []
        for key in touched:
            self._wake(key)
        if reply is not None:
            client.send(reply)

    def _refuse_second(self, waits: bool) -> None:
        """Raise WireError if the client still waits for a reply."""
        if waits:
            raise WireError("the client sent a request before the last one was answered")

    def _execute(self, client: _StoreClient, numbered: Numbered) -> bytes | bytearray | None:
        """Execute a request; return its reply, or None if it is parked."""
        request, channel, number = numbered
        if channel:
            if client.channel not in (b"", channel):
                raise WireError("writes of two channels arrived on one connection")
            client.channel = channel
            stored = self._replies.stored_reply(channel, client.order, number, request)
            if stored is not None:
                return stored
        before = len(self._table.touched)
        try:
            reply = encode_reply(Status.DONE, request.apply(self._table))
        except KeysMissing as error:
            assert isinstance(request, Blocking)
            deadline = Deadline(request.timeout)
            if not deadline.expired:
                client.parked = request
                self._waiting.add(client, error.keys)
                self.timers.set(client, deadline.at)
                return None
            reply = encode_reply(Status.MISSING, error.keys)
        except StoreError as error:
            reply = encode_reply(Status.FAILED, str(error))
        except Exception as error:
            # A reply keeps the client from sending the request again.
            logger.exception("store: a request of client %s", client.name)
            client.send(encode_reply(Status.FAILED, f"the store failed at the request: {error!r}"))
            raise WireError("an unexpected error") from error
        if len(self._table.touched) > before:
            self._replies.store(channel, number, reply, request)
        return reply

    def on_timer(self, client: _StoreClient) -> None:
        assert client.parked is not None
        keys = client.parked.keys
        self._unpark(client)
        self.send_later(client, encode_reply(Status.MISSING, self._table.missing(keys)))

    def on_dropped(self, client: _StoreClient) -> None:
        self._waiting.remove(client)
        if client.channel:
            self._replies.disconnected(client.channel, client.order, time.monotonic())

    def _wake(self, key: str) -> None:
        """Answer the requests for which ``key`` was the last missing key, after the request that set it."""
        if key not in self._table.values:
            return
        # Thousands may wait for the same keys: their reply is encoded once.
        replies: dict[tuple[object, ...], bytearray] = {}
        for client in self._waiting.appeared(key):
            request = client.parked
            assert request is not None
            same = (type(request), *request.keys)
            reply = replies.get(same)
            if reply is None:
                try:
                    reply = replies[same] = encode_reply(Status.DONE, request.apply(self._table))
                except KeysMissing as error:
                    # A key that appeared earlier has been deleted since.
                    self._waiting.add(client, error.keys)
                    continue
            self._unpark(client)
            self.send_later(client, reply)

    def _unpark(self, client: _StoreClient) -> None:
        client.parked = None
        self._waiting.remove(client)
        self.timers.cancel(client)
