"""``Acceptor``: accepts authenticated connections without waiting for silent or hostile peers."""

from __future__ import annotations

import errno
import selectors
import socket
import time
from collections import deque
from contextlib import ExitStack

from ..common.deadline import Deadline
from ..common.formatting import format_seconds
from ..errors import WireError, WireTimeout
from .authentication import PendingHandshake, encryption_for
from .connection import Connection
from .handshake import HANDSHAKE_TIMEOUT_S
from .sockets import configure_socket
from .stream import close_in_forked_child

#: default maximum of concurrent handshakes, so that unauthenticated peers cannot use up the descriptors
MAX_PENDING = 256


class Acceptor:
    """Returns authenticated connections; failing or silent peers do not delay others.

    It runs many handshakes concurrently and skips those that fail.  Beyond ``most_pending``, or when the
    process is out of descriptors, the oldest handshake is dropped: a peer only needs milliseconds for it.
    Only one thread at a time may use it.

    Args:
        listener: a listening socket, TCP or unix, owned by the acceptor.
        secret, purpose, plain: see ``connect``.
        most_pending: maximum of concurrent handshakes; must exceed the number of peers that connect at once.

    Attributes:
        refused: the reason of the last refusal, ``""`` if there was none.
    """

    def __init__(
        self,
        listener: socket.socket,
        *,
        secret: bytes,
        purpose: str,
        handshake_timeout: float = HANDSHAKE_TIMEOUT_S,
        most_pending: int = MAX_PENDING,
        plain: bool = False,
    ) -> None:
        self._tls = None if plain else encryption_for(listener, connecting=False)
        listener.setblocking(False)
        self._listener = listener
        self._secret = secret
        self._purpose = purpose
        self._handshake_timeout = handshake_timeout
        self._most_pending = most_pending
        # In the order of their arrival and of their deadlines.
        self._pending: dict[PendingHandshake, float] = {}
        self._ready: deque[Connection] = deque()
        self.refused = ""
        with ExitStack() as opened:
            self._selector = opened.enter_context(selectors.DefaultSelector())
            self._selector.register(listener, selectors.EVENT_READ)
            self._stop_out, self._stop_in = map(opened.enter_context, socket.socketpair())
            self._selector.register(self._stop_in, selectors.EVENT_READ, self._stop_in)
            opened.pop_all()
        for inherited in (self._selector, self._stop_out, self._stop_in):
            close_in_forked_child(inherited)

    def accept(self, timeout: float) -> Connection:
        """Return the next authenticated connection.

        Raises:
            WireTimeout: no peer authenticated in time; the message has the reason of the last refusal.
            WireError: the listener failed, or :meth:`stop` was called.
        """
        deadline = Deadline(timeout)
        while not self._ready:
            oldest = next(iter(self._pending.values()), deadline.at)
            for key, _ in self._selector.select(max(0.0, min(oldest, deadline.at) - time.monotonic())):
                if key.data is None:
                    self._begin_handshake()
                elif key.data is self._stop_in:
                    raise WireError("the acceptor has been stopped")
                else:
                    self._step(key.data)
            for pending in [each for each, at in self._pending.items() if at <= time.monotonic()]:
                self._refuse(pending, f"it stayed silent for {format_seconds(self._handshake_timeout)}")
            if deadline.expired and not self._ready:
                why = f"; the last that tried was refused: {self.refused}" if self.refused else ""
                raise WireTimeout(f"nobody connected within {format_seconds(timeout)}{why}")
        return self._ready.popleft()

    def stop(self) -> None:
        """Make running and later calls of :meth:`accept` raise.  May be called from any thread."""
        self._stop_out.close()

    def close(self) -> None:
        """Close the listener and all connections that :meth:`accept` did not return."""
        for pending in self._pending:
            pending.stream.close()
        self._pending.clear()
        for connection in self._ready:
            connection.close()
        self._ready.clear()
        self._selector.close()
        for sock in (self._listener, self._stop_out, self._stop_in):
            sock.close()

    def __enter__(self) -> Acceptor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _begin_handshake(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except BlockingIOError:
            return  # the client has already closed the connection
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE) and self._pending:
                self._refuse_oldest()
                return
            raise WireError(f"cannot accept a connection: {error.strerror or error}") from error
        try:
            configure_socket(sock)
            pending = PendingHandshake(sock, secret=self._secret, purpose=self._purpose, tls=self._tls)
        except OSError as error:
            sock.close()
            self.refused = str(error)
            return
        self._pending[pending] = time.monotonic() + self._handshake_timeout
        self._selector.register(pending.stream, pending.events, pending)
        if len(self._pending) > self._most_pending:
            self._refuse_oldest()

    def _refuse_oldest(self) -> None:
        self._refuse(next(iter(self._pending)), "it had not authenticated when too many others connected")

    def _step(self, pending: PendingHandshake) -> None:
        if pending not in self._pending:
            return  # dropped in favor of a newer one in the same round
        try:
            if pending.step():
                self._selector.unregister(pending.stream)
                del self._pending[pending]
                self._ready.append(Connection(pending.stream))
            elif self._selector.get_key(pending.stream).events != pending.events:
                self._selector.modify(pending.stream, pending.events, pending)
        except OSError as error:
            self._refuse(pending, str(error))

    def _refuse(self, pending: PendingHandshake, why: str) -> None:
        self.refused = why
        self._selector.unregister(pending.stream)
        del self._pending[pending]
        pending.stream.close()
