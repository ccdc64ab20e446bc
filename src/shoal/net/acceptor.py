"""Accepting from a listener that strangers can reach too, without waiting for any of them."""

from __future__ import annotations

import errno
import selectors
import socket
import time
from collections import deque
from contextlib import ExitStack

from ..common.deadline import Deadline
from ..common.wording import in_seconds
from ..errors import WireError, WireTimeout
from .connection import Connection
from .handshake import HANDSHAKE_TIMEOUT
from .inherit import close_in_forked_child
from .pending import PendingHandshake
from .sockets import prepare
from .tls.encryption import encryption

#: handshakes that an acceptor keeps at once: strangers must not use up the process's descriptors
MOST_PENDING = 256


class Acceptor:
    """Gives out authenticated connections; a stranger that fails or stays silent delays nobody.

    Unlike :func:`~shoal.net.accept` it runs many handshakes side by side and passes over those that fail.
    If one more comes than it keeps, or than the process has descriptors for, the oldest is dropped: a peer
    needs milliseconds for its handshake.  One thread may use it at a time.

    Args:
        listener: a listening socket, TCP or unix; the acceptor owns it from now on.
        secret, purpose: as of ``accept``.
        handshake_timeout: seconds that each stranger gets to prove itself.
        most_pending: how many of them are kept at once; more than the peers that may come at one moment.
        plain: as of ``accept``.
    """

    def __init__(
        self,
        listener: socket.socket,
        *,
        secret: bytes,
        purpose: str,
        handshake_timeout: float = HANDSHAKE_TIMEOUT,
        most_pending: int = MOST_PENDING,
        plain: bool = False,
    ) -> None:
        self._tls = None if plain else encryption(listener, connecting=False)
        listener.setblocking(False)
        self._listener = listener
        self._secret = secret
        self._purpose = purpose
        self._handshake_timeout = handshake_timeout
        self._most_pending = most_pending
        # In the order in which they came, which is that of their deadlines.
        self._pending: dict[PendingHandshake, float] = {}
        self._ready: deque[Connection] = deque()
        self._refused = ""
        with ExitStack() as opened:
            self._selector = opened.enter_context(selectors.DefaultSelector())
            self._selector.register(listener, selectors.EVENT_READ)
            self._stop_out, self._stop_in = map(opened.enter_context, socket.socketpair())
            self._selector.register(self._stop_in, selectors.EVENT_READ, self._stop_in)
            opened.pop_all()
        for inherited in (self._selector, self._stop_out, self._stop_in):
            close_in_forked_child(inherited)

    def accept(self, timeout: float) -> Connection:
        """The next connection whose other side has proved itself.

        Raises:
            WireTimeout: nobody did in time; the message says why the last stranger was refused.
            WireError: nothing can be accepted, or :meth:`stop` was called.
        """
        deadline = Deadline(timeout)
        while not self._ready:
            oldest = next(iter(self._pending.values()), deadline.at)
            for key, _ in self._selector.select(max(0.0, min(oldest, deadline.at) - time.monotonic())):
                if key.data is None:
                    self._greet()
                elif key.data is self._stop_in:
                    raise WireError("nothing is accepted any more")
                else:
                    self._step(key.data)
            for pending in [each for each, at in self._pending.items() if at <= time.monotonic()]:
                self._refuse(pending, f"it stayed silent for {in_seconds(self._handshake_timeout)}")
            if deadline.expired and not self._ready:
                why = f"; the last that tried was refused: {self._refused}" if self._refused else ""
                raise WireTimeout(f"nobody connected within {in_seconds(timeout)}{why}")
        return self._ready.popleft()

    @property
    def refused(self) -> str:
        """Why the last stranger was refused, ``""`` if none was."""
        return self._refused

    def stop(self) -> None:
        """Let :meth:`accept` raise from now on; any thread may call it while another one is in there."""
        self._stop_out.close()

    def close(self) -> None:
        """Close the listener and all connections that were not given out."""
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

    def _greet(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except BlockingIOError:
            return  # the client has left already
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE) and self._pending:
                self._refuse_oldest()
                return
            raise WireError(f"cannot accept a connection: {error.strerror or error}") from error
        try:
            prepare(sock)
            pending = PendingHandshake(sock, secret=self._secret, purpose=self._purpose, tls=self._tls)
        except OSError as error:
            sock.close()
            self._refused = str(error)
            return
        self._pending[pending] = time.monotonic() + self._handshake_timeout
        self._selector.register(pending.stream, pending.events, pending)
        if len(self._pending) > self._most_pending:
            self._refuse_oldest()

    def _refuse_oldest(self) -> None:
        self._refuse(next(iter(self._pending)), "it had not proved itself when too many others came")

    def _step(self, pending: PendingHandshake) -> None:
        if pending not in self._pending:
            return  # dropped for a newer one in the same round
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
        self._refused = why
        self._selector.unregister(pending.stream)
        del self._pending[pending]
        pending.stream.close()
