"""A server of authenticated connections: one thread, and any number of clients that never wait for others.

The thread never blocks but in ``select``.  A client that is slow, silent or hostile costs the others
nothing: its handshake has a deadline, the oldest of those that have not proved themselves is dropped
where too many come, and whatever a client does wrong ends that client alone.
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
from .handshake import HANDSHAKE_TIMEOUT
from .inherit import close_in_forked_child
from .pending import PendingHandshake
from .session import ClientConnection
from .sockets import prepare
from .tls.encryption import encryption

logger = logging.getLogger(__name__)

#: connections accepted in one go before the clients that are there get their turn
_ACCEPT_BATCH = 64

#: clients kept that have not proved themselves yet; more than a job's ranks that come at one moment
_MOST_STRANGERS = 4096

#: most messages of clients are shorter, and then taken with one call of the system
_SHORT = 2**11

#: most times that it is served before the others get their turn, where its stream holds more
_TURNS = 16

#: most events that are taken from the kernel at once
_EVENTS = 1024
#: what epoll calls the events of a session
_MASKS = {selectors.EVENT_READ: select.EPOLLIN, selectors.EVENT_WRITE: select.EPOLLOUT}

#: answers that are sent to those who waited, before the clients that ask get their turn again
_ANSWERS_AT_ONCE = 256


S = TypeVar("S", bound=ClientConnection)


@refuses_copies(
    "a server",
    "sockets and a thread",
    "Keep it outside of the object that you copy; clients connect to its address",
)
class Server(abc.ABC, Generic[S]):
    """Serves the connections to a listener, in a daemon thread between :meth:`start` and :meth:`close`.

    As a context manager it does both.  A subclass says what a message means (:meth:`received`);
    everything that it overrides is called in the thread.

    Args:
        listener: a listening socket; the server owns it from now on.
        secret, purpose: what every client must prove.
        limit: longest message in bytes.
        what: is served, for messages and the thread's name: ``"store"``.
        handshake_timeout: seconds that a client gets to prove itself.

    Connections over TCP are encrypted if ``SHOAL_TLS`` says so.

    Raises:
        ConfigurationError: they are to be, and the certificates cannot be used or made.
        OutOfResources: the process has no descriptors left.
    """

    def __init__(
        self,
        listener: socket.socket,
        *,
        secret: bytes,
        purpose: str,
        limit: int,
        what: str,
        handshake_timeout: float = HANDSHAKE_TIMEOUT,
    ) -> None:
        self._secret = secret
        self._purpose = purpose
        self._limit = limit
        self._what = what
        self._handshake_timeout = handshake_timeout
        #: one moment for each session that has proved itself; :meth:`overdue` is called then
        self.alarms: Alarms[S] = Alarms()
        self._short = memoryview(bytearray(_SHORT))
        self._sessions: dict[int, S] = {}  #: by descriptor
        self._strangers: dict[S, None] = {}  # those that have not proved themselves, the oldest first
        self._later: deque[tuple[S, bytes | bytearray]] = deque()
        #: those whose streams hold more than they were served in their turn
        self._eager: dict[S, None] = {}
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._pid = os.getpid()
        self._listener = listener
        self._listener.setblocking(False)
        if listener.family != socket.AF_UNIX:
            prepare(listener)  # its connections inherit all of that
        self._accepting = True
        with contextlib.ExitStack() as undo:
            undo.callback(self._listener.close)
            self._tls = encryption(listener, connecting=False)
            try:
                self._wake_in, self._wake_out = socket.socketpair()
                undo.callback(self._wake_in.close)
                undo.callback(self._wake_out.close)
                # Not one of selectors: looking up its keys took a twentieth of the time of a large meeting.
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

    # -- what a subclass says ------------------------------------------------------------------

    @abc.abstractmethod
    def session(self, handshake: PendingHandshake, name: str, limit: int) -> S:
        """A new session."""

    @abc.abstractmethod
    def received(self, session: S, message: bytearray) -> None:
        """A message came from a client that has proved itself.

        Raises:
            WireError, UsageError, OSError: this client is dropped.
        """

    def greeted(self, session: S) -> None:
        """A client has proved itself.  Raises as :meth:`received`."""

    def turned(self) -> None:
        """All clients that had sent something were heard once: the place to answer them together."""

    def overdue(self, session: S) -> None:
        """The moment has come that :attr:`alarms` has for a session."""

    def dropped(self, session: S) -> None:
        """A session has ended; called once for each."""

    # -- what others call ----------------------------------------------------------------------

    @property
    def clients(self) -> int:
        """The number of connections that are open now; a store of one process may have several."""
        return len(self._sessions)

    def start(self: _Self) -> _Self:
        """Begin to serve; returns the server.  Starting twice is harmless.

        Raises:
            OutOfResources: the process cannot have one more thread; the server is closed.
        """
        if self._thread is None and not self._stopping:
            thread = threading.Thread(target=self._run, name=f"shoal-{self._what}", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                self.close()
                raise OutOfResources(
                    f"cannot serve a {self._what}: {error}.  Raise the number of threads that the process "
                    "may have (ulimit -u)"
                ) from error
            self._thread = thread
        return self

    def close(self) -> None:
        """Stop serving and drop all clients.  May be called twice, not in the thread."""
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
        """Send to a client that is not the one whose message is handled: its failure ends it alone."""
        try:
            session.send(message)
            self._watch(session)
        except OSError as error:
            self.drop(session, str(error))

    def send_later(self, session: S, message: bytes | bytearray) -> None:
        """As :meth:`send`, after the client whose message is handled and in turn with those that ask now.

        For an answer that many wait for: the one who brought it, and everybody else, need not wait until all
        have it.
        """
        self._later.append((session, message))

    def _send_some(self) -> None:
        for _ in range(min(len(self._later), _ANSWERS_AT_ONCE)):
            session, message = self._later.popleft()
            if not session.closed:
                self.send(session, message)

    def drop(self, session: S, reason: str) -> None:
        """End a session."""
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
        # Before the client can see it.
        self.dropped(session)
        session.stream.close()
        if not self._accepting and not self._stopping:
            self._poll.register(self._listener, select.EPOLLIN)
            self._accepting = True

    def _run(self) -> None:
        try:
            while not self._stopping:
                at = 0.0 if self._later or self._eager else self.alarms.next()
                # The descriptor of a client that is dropped may be that of the next one.
                ready = [(fd, self._sessions.get(fd)) for fd, _ in self._poll.poll(_until(at), _EVENTS)]
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
                        self.drop(session, "the client did not prove itself in time")
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
                    logger.warning("%s: no descriptors left, new clients wait until others leave", self._what)
                    self._poll.unregister(self._listener)
                    self._accepting = False
                    return
                continue  # a client that left before it was accepted, or a limit that was raised
            self._greet(sock, f"{address[0]}:{address[1]}" if isinstance(address, tuple) else "on this host")

    def _greet(self, sock: socket.socket, name: str) -> None:
        try:
            if sock.family == socket.AF_UNIX:  # the others have what their listener has
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
        if len(self._strangers) > _MOST_STRANGERS:
            self._drop_oldest_stranger()

    def _drop_oldest_stranger(self) -> None:
        self.drop(next(iter(self._strangers)), "it had not proved itself when too many others came")

    def _serve(self, session: S) -> None:
        """Serve one client until it blocks; any error of it ends that client alone."""
        if session.closed:
            return
        try:
            if not session.authenticated:
                if session.shake_hands():
                    self.alarms.cancel(session)
                    self._strangers.pop(session, None)
                    self.greeted(session)
                    session.flush()  # what the subclass said, behind the proof
            elif session.clogged:
                session.flush()
            elif (message := session.receive(self._short)) is not None:
                self.received(session, message)
            # Bytes that the stream holds already do not make its descriptor readable.  A stranger's are
            # part of its handshake: nothing else is read before it has proved itself.
            turns = 0
            while session.authenticated and session.pending and not (session.closed or session.clogged):
                if (turns := turns + 1) > _TURNS:
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
    """``select.epoll``, which takes no weak reference by itself."""

    def __init__(self) -> None:
        epoll = select.epoll()
        self.register, self.modify, self.unregister = epoll.register, epoll.modify, epoll.unregister
        self.poll, self.close = epoll.poll, epoll.close


def _until(at: float | None) -> float | None:
    """The seconds until a moment; None: without an end."""
    return None if at is None else max(0.0, at - time.monotonic())


_Self = TypeVar("_Self", bound=Server)  # type: ignore[type-arg]


def raise_descriptor_limit() -> bool:
    """Raise this process's soft limit of descriptors as far as it may; whether that was possible."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == hard:
        return False
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return True
