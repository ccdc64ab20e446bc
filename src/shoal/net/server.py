"""A server of authenticated connections: one thread serves any number of clients.

The thread only blocks in ``epoll``.  A slow, silent or hostile client does not delay the others: its
handshake has a deadline, the oldest unauthenticated client is dropped if there are too many, and an error of
a client only drops that client.
"""

from __future__ import annotations

import abc
import contextlib
import errno
import logging
import os
import resource
import select
import selectors
import socket
import threading
import time
from collections import deque
from types import TracebackType
from typing import Generic, TypeVar

from ..common.copy_refusal import refuses_copies
from ..errors import OutOfResources, UsageError, WireError
from .alarms import Alarms
from .handshake import HANDSHAKE_TIMEOUT_S
from .inherit import close_in_forked_child
from .pending import PendingHandshake
from .session import ClientConnection
from .sockets import prepare
from .tls.encryption import encryption

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
#: the epoll masks for the events of a session
_MASKS = {selectors.EVENT_READ: select.EPOLLIN, selectors.EVENT_WRITE: select.EPOLLOUT}

#: maximum number of messages of :meth:`Server.send_later` that are sent before clients are served again
_MAX_ANSWERS_PER_TURN = 256


S = TypeVar("S", bound=ClientConnection)


@refuses_copies(
    "a server",
    "sockets and a thread",
    "Keep it outside of the object that you copy; clients connect to its address",
)
class Server(abc.ABC, Generic[S]):
    """Serves the clients of a listener, in a daemon thread between :meth:`start` and :meth:`close`.

    As a context manager it does both.  A subclass handles messages (:meth:`received`); all methods that it
    overrides are called in the thread.

    Args:
        listener: a listening socket, owned by the server.
        secret, purpose: every client must prove the same.
        limit: maximum length of a message in bytes.
        what: the kind of server, for messages and the thread's name: ``"store"``.
        handshake_timeout: seconds for the handshake of a client.

    Connections over TCP are encrypted if ``SHOAL_TLS`` is set.

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
        what: str,
        handshake_timeout: float = HANDSHAKE_TIMEOUT_S,
    ) -> None:
        self._secret = secret
        self._purpose = purpose
        self._limit = limit
        self._what = what
        self._handshake_timeout = handshake_timeout
        #: timers of authenticated sessions; :meth:`overdue` is called when one expires
        self.alarms: Alarms[S] = Alarms()
        self._short = memoryview(bytearray(_SHORT_MESSAGE_BYTES))
        self._sessions: dict[int, S] = {}  #: by descriptor
        self._strangers: dict[S, None] = {}  # unauthenticated sessions, the oldest first
        self._later: deque[tuple[S, bytes | bytearray]] = deque()
        #: sessions with further buffered messages after ``_MAX_MESSAGES_PER_TURN``
        self._eager: dict[S, None] = {}
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._pid = os.getpid()
        self._listener = listener
        self._listener.setblocking(False)
        if listener.family != socket.AF_UNIX:
            prepare(listener)  # its connections inherit the options
        self._accepting = True
        with contextlib.ExitStack() as undo:
            undo.callback(self._listener.close)
            self._tls = encryption(listener, connecting=False)
            try:
                self._wake_in, self._wake_out = socket.socketpair()
                undo.callback(self._wake_in.close)
                undo.callback(self._wake_out.close)
                # Instead of a selector, whose look-up of keys took 5 % of the time of a large rendezvous.
                self._poll = _Poll()
            except OSError as error:
                raise OutOfResources(
                    f"cannot serve a {what}: {error.strerror}; raise the limit of descriptors (ulimit -n)"
                ) from error
            undo.pop_all()
        self._wake_in.setblocking(False)
        self._poll.register(self._listener, select.EPOLLIN)
        self._poll.register(self._wake_in, select.EPOLLIN)
        for inherited in (self._wake_in, self._wake_out, self._poll):
            close_in_forked_child(inherited)

    # -- for subclasses ------------------------------------------------------------------------

    @abc.abstractmethod
    def session(self, handshake: PendingHandshake, name: str, limit: int) -> S:
        """Return a new session."""

    @abc.abstractmethod
    def received(self, session: S, message: bytearray) -> None:
        """Handle a message of an authenticated client; WireError, UsageError and OSError drop the client."""

    def greeted(self, session: S) -> None:
        """Called when a client has authenticated.  Raises like :meth:`received`."""

    def turned(self) -> None:
        """Called after each ready client was served once, to answer several clients together."""

    def overdue(self, session: S) -> None:
        """Called when the timer of a session in :attr:`alarms` has expired."""

    def dropped(self, session: S) -> None:
        """Called once for each session when it has ended."""

    # -- public --------------------------------------------------------------------------------

    @property
    def clients(self) -> int:
        """The number of open connections; one process may have several."""
        return len(self._sessions)

    def start(self: _Self) -> _Self:
        """Start the thread and return the server.  May be called twice.

        Raises OutOfResources, and closes the server, if the thread cannot be started.
        """
        if self._thread is None and not self._stopping:
            thread = threading.Thread(target=self._run, name=f"shoal-{self._what}", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                self.close()
                raise OutOfResources(
                    f"cannot serve a {self._what}: {error}.  Raise the limit of threads of the process "
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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # -- the thread ----------------------------------------------------------------------------

    def send(self, session: S, message: bytes | bytearray) -> None:
        """Send a message to a client; a failure drops only that client."""
        try:
            session.send(message)
            self._watch(session)
        except OSError as error:
            self.drop(session, str(error))

    def send_later(self, session: S, message: bytes | bytearray) -> None:
        """Queue a message, to be sent in batches between the service of clients.

        For an answer to many waiting clients, which should not delay the requests of others.
        """
        self._later.append((session, message))

    def _send_some(self) -> None:
        for _ in range(min(len(self._later), _MAX_ANSWERS_PER_TURN)):
            session, message = self._later.popleft()
            if not session.closed:
                self.send(session, message)

    def drop(self, session: S, reason: str) -> None:
        """Close a session."""
        if session.closed:
            return
        session.closed = True
        logger.info("%s: client %s dropped: %s", self._what, session.name, reason)
        del self._sessions[session.descriptor]
        self._strangers.pop(session, None)
        self._eager.pop(session, None)
        self.alarms.cancel(session)
        with contextlib.suppress(OSError):
            self._poll.unregister(session.descriptor)
        # Before the client can detect it.
        self.dropped(session)
        session.stream.close()
        if not self._accepting and not self._stopping:
            self._poll.register(self._listener, select.EPOLLIN)
            self._accepting = True

    def _run(self) -> None:
        try:
            while not self._stopping:
                at = 0.0 if self._later or self._eager else self.alarms.next()
                # Look up all sessions first: the descriptor of a dropped client may be reused for a new one.
                ready = [
                    (fd, self._sessions.get(fd))
                    for fd, _ in self._poll.poll(_until(at), _MAX_EVENTS_PER_POLL)
                ]
                for descriptor, session in ready:
                    if session is not None:
                        self._serve(session)
                    elif descriptor == self._listener.fileno():
                        self._accept()
                for session in list(self._eager):
                    del self._eager[session]
                    self._serve(session)
                self.turned()
                self._send_some()
                for session in self.alarms.due(time.monotonic()):
                    if session.authenticated:
                        self.overdue(session)
                    else:
                        self.drop(session, "the client did not authenticate in time")
        finally:
            self._release()

    def _release(self) -> None:
        for session in list(self._sessions.values()):
            self.drop(session, "the server closes")
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
                    if self._strangers:
                        self._drop_oldest_stranger()
                        continue
                    logger.warning(
                        "%s: out of file descriptors, new clients wait until others leave", self._what
                    )
                    self._poll.unregister(self._listener)
                    self._accepting = False
                    return
                continue  # the client left before it was accepted, or the limit was raised
            self._greet(sock, f"{address[0]}:{address[1]}" if isinstance(address, tuple) else "on this host")

    def _greet(self, sock: socket.socket, name: str) -> None:
        try:
            if sock.family == socket.AF_UNIX:  # TCP sockets inherit the options of the listener
                prepare(sock)
            handshake = PendingHandshake(
                sock, secret=self._secret, purpose=self._purpose, tls=self._tls, leaves_proof=True
            )
        except OSError:
            sock.close()
            return
        session = self.session(handshake, name, self._limit)
        self._sessions[session.descriptor] = session
        self._poll.register(session.descriptor, _MASKS[session.watched])
        self.alarms.set(session, time.monotonic() + self._handshake_timeout)
        self._strangers[session] = None
        if len(self._strangers) > _MAX_UNAUTHENTICATED:
            self._drop_oldest_stranger()

    def _drop_oldest_stranger(self) -> None:
        self.drop(next(iter(self._strangers)), "it had not authenticated when too many others connected")

    def _serve(self, session: S) -> None:
        """Serve one client until it would block; an error drops only that client."""
        if session.closed:
            return
        try:
            if not session.authenticated:
                if session.shake_hands():
                    self.alarms.cancel(session)
                    self._strangers.pop(session, None)
                    self.greeted(session)
                    session.flush()  # the proof, and messages of the subclass
            elif session.clogged:
                session.flush()
            elif (message := session.receive(self._short)) is not None:
                self.received(session, message)
            # Buffered bytes do not make the descriptor readable.  Those of an unauthenticated client are part
            # of its handshake.
            turns = 0
            while session.authenticated and session.pending and not (session.closed or session.clogged):
                if (turns := turns + 1) > _MAX_MESSAGES_PER_TURN:
                    self._eager[session] = None
                    break
                if (message := session.receive(self._short)) is not None:
                    self.received(session, message)
            self._watch(session)
        except (WireError, UsageError, OSError) as error:
            self.drop(session, str(error))
        except Exception:
            logger.exception("%s: dropping client %s", self._what, session.name)
            self.drop(session, "an unexpected error")

    def _watch(self, session: S) -> None:
        events = session.events
        if events != session.watched and not session.closed:
            session.watched = events
            self._poll.modify(session.descriptor, _MASKS[events])


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
