"""A server of authenticated connections: one thread serves any number of clients.

The thread only blocks in ``epoll``.  A slow, silent or hostile client does not delay the others: its
handshake has a deadline, the oldest unauthenticated client is dropped if there are too many, and an error of
a client only drops that client.
"""

from __future__ import annotations

import abc
import contextlib
import errno
import heapq
import itertools
import logging
import os
import resource
import select
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Hashable
from typing import Generic, TypeVar

from ..common.copy_refusal import refuses_copies
from ..errors import OutOfResources, UsageError, WireError
from .authentication import PendingHandshake, encryption_for
from .client_connection import ClientConnection
from .handshake import HANDSHAKE_TIMEOUT_S
from .sockets import configure_socket
from .stream import close_in_forked_child

logger = logging.getLogger(__name__)

#: maximum connections accepted before connected clients are served again
_ACCEPT_BATCH = 64

#: maximum number of unauthenticated clients; more than the ranks of a job that connect at the same time
_MAX_UNAUTHENTICATED = 4096

#: bytes; most messages are shorter, and are read with one system call
_SHORT_MESSAGE_BYTES = 2**11

#: maximum number of buffered messages of one client that are handled before the others are served
_MAX_MESSAGES_PER_TURN = 16

#: maximum number of events returned by one poll
_MAX_EVENTS_PER_POLL = 1024
#: the epoll masks for the events of a client
_MASKS = {selectors.EVENT_READ: select.EPOLLIN, selectors.EVENT_WRITE: select.EPOLLOUT}

#: maximum number of messages of :meth:`Server.send_later` that are sent before clients are served again
_MAX_ANSWERS_PER_TURN = 256


T = TypeVar("T", bound=Hashable)
S = TypeVar("S", bound=ClientConnection)


class Timers(Generic[T]):
    """A set of timers, at most one per item."""

    def __init__(self) -> None:
        self._at: dict[T, float] = {}
        self._heap: list[tuple[float, int, T]] = []
        self._count = itertools.count()

    def set(self, item: T, at: float) -> None:
        """Set the timer of ``item`` to the time ``at``, replacing an earlier one."""
        self._at[item] = at
        heapq.heappush(self._heap, (at, next(self._count), item))

    def cancel(self, item: T) -> None:
        """Cancel the timer of ``item``."""
        self._at.pop(item, None)
        # Cancelled entries stay in the heap until they are due, or until they are most of it.
        if len(self._heap) > 2 * len(self._at) + 256:
            self._heap = [entry for entry in self._heap if self._at.get(entry[2]) == entry[0]]
            heapq.heapify(self._heap)

    def next(self) -> float | None:
        """Return the time of the next timer, None if there is none."""
        while self._heap and self._at.get(self._heap[0][2]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def due(self, now: float) -> list[T]:
        """Remove the timers that have expired at ``now``; return their items in order of time."""
        items = []
        while (at := self.next()) is not None and at <= now:
            item = heapq.heappop(self._heap)[2]
            del self._at[item]
            items.append(item)
        return items


@refuses_copies(
    "a server",
    "sockets and a thread",
    "Keep it outside of the object that you copy; clients connect to its address",
)
class Server(abc.ABC, Generic[S]):
    """Serves the clients of a listener, in a daemon thread between :meth:`start` and :meth:`close`.

    As a context manager it does both.  A subclass handles messages (:meth:`on_message`); all methods that it
    overrides are called in the thread.  Connections over TCP are encrypted if ``SHOAL_TLS`` is set.

    Args:
        listener: a listening socket, owned by the server.
        secret, purpose: every client must prove the same.
        limit: maximum length of a message in bytes.
        kind: of server, for messages and the thread's name: ``"store"``.
        client_class: of the connections to clients.

    Raises:
        ConfigurationError: ``SHOAL_TLS`` is set, and the certificates cannot be used or made.
        OutOfResources: the process is out of file descriptors.
    """

    def __init__(
        self,
        listener: socket.socket,
        *,
        secret: bytes,
        purpose: str,
        limit: int,
        kind: str,
        client_class: type[S],
        handshake_timeout: float = HANDSHAKE_TIMEOUT_S,
    ) -> None:
        self._secret = secret
        self._purpose = purpose
        self._limit = limit
        self._kind = kind
        self._client_class = client_class
        self._handshake_timeout = handshake_timeout
        #: timers of authenticated clients; :meth:`on_timer` is called when one expires
        self.timers: Timers[S] = Timers()
        self._short = memoryview(bytearray(_SHORT_MESSAGE_BYTES))
        self._clients: dict[int, S] = {}  #: by descriptor
        self._unauthenticated: dict[S, None] = {}  # unauthenticated clients, the oldest first
        self._queued: deque[tuple[S, bytes | bytearray]] = deque()
        #: clients with further buffered messages after ``_MAX_MESSAGES_PER_TURN``
        self._with_buffered: dict[S, None] = {}
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._pid = os.getpid()
        self._listener = listener
        self._listener.setblocking(False)
        if listener.family != socket.AF_UNIX:
            configure_socket(listener)  # its connections inherit the options
        self._accepting = True
        with contextlib.ExitStack() as undo:
            undo.callback(self._listener.close)
            self._tls = encryption_for(listener, connecting=False)
            try:
                self._wake_in, self._wake_out = socket.socketpair()
                undo.callback(self._wake_in.close)
                undo.callback(self._wake_out.close)
                # Instead of a selector, whose look-up of keys took 5 % of the time of a large rendezvous.
                self._poll = _Poll()
            except OSError as error:
                raise OutOfResources(
                    f"cannot serve a {kind}: {error.strerror}; raise the limit of descriptors (ulimit -n)"
                ) from error
            undo.pop_all()
        self._wake_in.setblocking(False)
        self._poll.register(self._listener, select.EPOLLIN)
        self._poll.register(self._wake_in, select.EPOLLIN)
        for inherited in (self._wake_in, self._wake_out, self._poll):
            close_in_forked_child(inherited)

    # -- for subclasses ------------------------------------------------------------------------

    @abc.abstractmethod
    def on_message(self, client: S, message: bytearray) -> None:
        """Handle a message of an authenticated client; WireError, UsageError and OSError drop the client."""

    def on_authenticated(self, client: S) -> None:
        """Called when a client has authenticated.  Raises like :meth:`on_message`."""

    def on_round_end(self) -> None:
        """Called after each ready client was served once, to answer several clients together."""

    def on_timer(self, client: S) -> None:
        """Called when the timer of a client in :attr:`timers` has expired."""

    def on_dropped(self, client: S) -> None:
        """Called once for each client when its connection has ended."""

    # -- public --------------------------------------------------------------------------------

    @property
    def clients(self) -> int:
        """The number of open connections; one process may have several."""
        return len(self._clients)

    def start(self: _Self) -> _Self:
        """Start the thread and return the server.  May be called twice.

        Raises OutOfResources, and closes the server, if the thread cannot be started.
        """
        if self._thread is None and not self._stopping:
            thread = threading.Thread(target=self._run, name=f"shoal-{self._kind}", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                self.close()
                raise OutOfResources(
                    f"cannot serve a {self._kind}: {error}.  Raise the limit of threads of the process "
                    "(ulimit -u)"
                ) from error
            self._thread = thread
        return self

    def close(self) -> None:
        """Stop serving and drop all clients.  May be called twice, but not in the thread."""
        if os.getpid() != self._pid or self._stopping:
            return
        self._stopping = True
        if self._thread is None:
            self._release()
            return
        with contextlib.suppress(OSError):
            self._wake_out.send(b"x")
        self._thread.join()

    def __enter__(self: _Self) -> _Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- the thread ----------------------------------------------------------------------------

    def send(self, client: S, message: bytes | bytearray) -> None:
        """Send a message to a client; a failure drops only that client."""
        try:
            client.send(message)
            self._watch(client)
        except OSError as error:
            self.drop(client, str(error))

    def send_later(self, client: S, message: bytes | bytearray) -> None:
        """Queue a message, to be sent in batches between the service of clients.

        For an answer to many waiting clients, which should not delay the requests of others.
        """
        self._queued.append((client, message))

    def _send_queued(self) -> None:
        for _ in range(min(len(self._queued), _MAX_ANSWERS_PER_TURN)):
            client, message = self._queued.popleft()
            if not client.closed:
                self.send(client, message)

    def drop(self, client: S, reason: str) -> None:
        """Close the connection of a client."""
        if client.closed:
            return
        client.closed = True
        logger.info("%s: client %s dropped: %s", self._kind, client.name, reason)
        del self._clients[client.descriptor]
        self._unauthenticated.pop(client, None)
        self._with_buffered.pop(client, None)
        self.timers.cancel(client)
        with contextlib.suppress(OSError):
            self._poll.unregister(client.descriptor)
        # Before the client can detect it.
        self.on_dropped(client)
        client.stream.close()
        if not self._accepting and not self._stopping:
            self._poll.register(self._listener, select.EPOLLIN)
            self._accepting = True

    def drop_after(self, client: S, error: Exception) -> None:
        """Close the connection of a client whose request ended with ``error``."""
        if isinstance(error, (WireError, UsageError, OSError)):
            self.drop(client, str(error))
        else:
            logger.error("%s: dropping client %s", self._kind, client.name, exc_info=error)
            self.drop(client, "an unexpected error")

    def _run(self) -> None:
        try:
            while not self._stopping:
                at = 0.0 if self._queued or self._with_buffered else self.timers.next()
                # Look up all clients first: the descriptor of a dropped client may be reused for a new one.
                ready = [
                    (fd, self._clients.get(fd)) for fd, _ in self._poll.poll(_until(at), _MAX_EVENTS_PER_POLL)
                ]
                for descriptor, client in ready:
                    if client is not None:
                        self._serve(client)
                    elif descriptor == self._listener.fileno():
                        self._accept()
                for client in list(self._with_buffered):
                    del self._with_buffered[client]
                    self._serve(client)
                self.on_round_end()
                self._send_queued()
                for client in self.timers.due(time.monotonic()):
                    if client.authenticated:
                        self.on_timer(client)
                    else:
                        self.drop(client, "the client did not authenticate in time")
        finally:
            self._release()

    def _release(self) -> None:
        for client in list(self._clients.values()):
            self.drop(client, "the server closes")
        self._poll.close()
        for sock in (self._listener, self._wake_in, self._wake_out):
            sock.close()

    def _accept(self) -> None:
        for _ in range(_ACCEPT_BATCH):
            try:
                sock, address = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE) and not raise_descriptor_limit():
                    if self._unauthenticated:
                        self._drop_oldest_unauthenticated()
                        continue
                    logger.warning(
                        "%s: out of file descriptors, new clients wait until others leave", self._kind
                    )
                    self._poll.unregister(self._listener)
                    self._accepting = False
                    return
                continue  # the client left before it was accepted, or the limit was raised
            self._begin_handshake(
                sock, f"{address[0]}:{address[1]}" if isinstance(address, tuple) else "on this host"
            )

    def _begin_handshake(self, sock: socket.socket, name: str) -> None:
        try:
            if sock.family == socket.AF_UNIX:  # TCP sockets inherit the options of the listener
                configure_socket(sock)
            handshake = PendingHandshake(
                sock, secret=self._secret, purpose=self._purpose, tls=self._tls, defer_proof=True
            )
        except OSError:
            sock.close()
            return
        client = self._client_class(handshake, name, self._limit)
        self._clients[client.descriptor] = client
        self._poll.register(client.descriptor, _MASKS[client.watched])
        self.timers.set(client, time.monotonic() + self._handshake_timeout)
        self._unauthenticated[client] = None
        if len(self._unauthenticated) > _MAX_UNAUTHENTICATED:
            self._drop_oldest_unauthenticated()

    def _drop_oldest_unauthenticated(self) -> None:
        self.drop(
            next(iter(self._unauthenticated)), "it had not authenticated when too many others connected"
        )

    def _serve(self, client: S) -> None:
        """Serve one client until it would block; an error drops only that client."""
        if client.closed:
            return
        try:
            if not client.authenticated:
                if client.continue_handshake():
                    self.timers.cancel(client)
                    self._unauthenticated.pop(client, None)
                    self.on_authenticated(client)
                    client.flush()  # the proof, and messages of the subclass
            elif client.has_unsent:
                client.flush()
            elif (message := client.receive(self._short)) is not None:
                self.on_message(client, message)
            # Buffered bytes do not make the descriptor readable.  Those of an unauthenticated client are part
            # of its handshake.
            turns = 0
            while client.authenticated and client.pending and not (client.closed or client.has_unsent):
                if (turns := turns + 1) > _MAX_MESSAGES_PER_TURN:
                    self._with_buffered[client] = None
                    break
                if (message := client.receive(self._short)) is not None:
                    self.on_message(client, message)
            self._watch(client)
        except Exception as error:
            self.drop_after(client, error)

    def _watch(self, client: S) -> None:
        events = client.events
        if events != client.watched and not client.closed:
            client.watched = events
            self._poll.modify(client.descriptor, _MASKS[events])


class _Poll:
    """A wrapper of ``select.epoll``, which does not support weak references."""

    def __init__(self) -> None:
        epoll = select.epoll()
        self.register, self.modify, self.unregister = epoll.register, epoll.modify, epoll.unregister
        self.poll, self.close = epoll.poll, epoll.close


def _until(at: float | None) -> float | None:
    """Return the seconds until a time; None: no limit."""
    return None if at is None else max(0.0, at - time.monotonic())


_Self = TypeVar("_Self", bound=Server)  # type: ignore[type-arg]


def raise_descriptor_limit() -> bool:
    """Raise the soft limit of file descriptors to the hard limit; return whether it was lower."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == hard:
        return False
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return True
