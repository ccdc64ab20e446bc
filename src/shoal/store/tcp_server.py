"""The server of a TCP store: one thread, one table, any number of clients.

The thread never blocks but in ``select``: a client that is slow, silent or hostile costs the
others nothing.  A blocking request whose keys are not all there is parked with its deadline; the
request that brings the last key wakes it.  Nothing is polled.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import resource
import selectors
import socket
import threading
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any

import msgspec

from ..errors import OutOfResources, StoreError, UsageError, WireError
from ..wire import HANDSHAKE_TIMEOUT, Deadline, PendingHandshake, close_in_forked_child, listen
from ..wire.sockets import prepare
from .base import checked_key, checked_value
from .operations import KeysMissing, Table
from .protocol import MAX_MESSAGE, PURPOSE, Status, encode_reply
from .requests import Blocking, Request, decode
from .session import Session
from .waiting import Alarms, Waiting

logger = logging.getLogger(__name__)

#: connections accepted in one go before the clients that are there get their turn
_ACCEPT_BATCH = 64

#: clients kept that have not proved themselves yet; more than a job's ranks that come at one moment
_MOST_STRANGERS = 4096


class TCPStoreServer:
    """Hosts a store on a TCP port, in a daemon thread.

    Binds at once, so that :attr:`port` is known; serves between :meth:`start` and :meth:`close`.
    As a context manager it does both.

    Args:
        host: interface to listen on; loopback unless given.
        port: 0 lets the kernel choose.
        secret: what every client must prove to hold.
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
        self._secret = secret
        self._handshake_timeout = handshake_timeout
        self._table = Table()
        for key, value in (records or {}).items():
            self._table.set(checked_key(key), checked_value(value))
        self._table.touched.clear()
        self._waiting: Waiting[Session] = Waiting()
        self._alarms: Alarms[Session] = Alarms()
        self._sessions: set[Session] = set()
        self._strangers: dict[Session, None] = {}  # those that have not proved themselves, the oldest first
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._pid = os.getpid()
        self._listener = listen(host, port, secret=secret)
        self._listener.setblocking(False)
        self.host = host
        self.port: int = self._listener.getsockname()[1]
        self._accepting = True
        with contextlib.ExitStack() as undo:
            undo.callback(self._listener.close)
            try:
                self._wake_in, self._wake_out = socket.socketpair()
                undo.callback(self._wake_in.close)
                undo.callback(self._wake_out.close)
                self._selector = selectors.DefaultSelector()
            except OSError as error:
                raise OutOfResources(
                    f"cannot serve a store: {error.strerror}; raise the limit of descriptors (ulimit -n)"
                ) from error
            undo.pop_all()
        self._wake_in.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wake_in, selectors.EVENT_READ)
        for inherited in (self._wake_in, self._wake_out, self._selector):
            close_in_forked_child(inherited)

    @property
    def address(self) -> str:
        """``host:port``."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def url(self) -> str:
        """What :func:`~shoal.store.open_store` takes."""
        return f"tcp://{self.address}"

    @property
    def clients(self) -> int:
        """The number of connections that are open now; a store of one process may have several."""
        return len(self._sessions)

    def start(self) -> TCPStoreServer:
        """Begin to serve; returns the server.  Starting twice is harmless.

        Raises:
            OutOfResources: the process cannot have one more thread; the server is closed.
        """
        if self._thread is None and not self._stopping:
            thread = threading.Thread(target=self._run, name="shoal-store", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                self.close()
                raise OutOfResources(
                    f"cannot serve a store: {error}.  Raise the number of threads that the process may have "
                    "(ulimit -u)"
                ) from error
            self._thread = thread
        return self

    def close(self) -> None:
        """Stop serving and drop all clients, whose calls raise ``StoreError``.  May be called twice."""
        if os.getpid() != self._pid or self._stopping:
            return
        self._stopping = True
        if self._thread is None:
            self._release()
            return
        with contextlib.suppress(OSError):
            self._wake_out.send(b"x")
        self._thread.join()

    def __enter__(self) -> TCPStoreServer:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # -- the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopping:
                at = self._alarms.next()
                timeout = None if at is None else max(0.0, at - time.monotonic())
                for key, _ in self._selector.select(timeout):
                    if isinstance(key.data, Session):
                        self._serve(key.data)
                    elif key.fileobj is self._listener:
                        self._accept()
                for session in self._alarms.due(time.monotonic()):
                    self._overdue(session)
        finally:
            self._release()

    def _release(self) -> None:
        for session in list(self._sessions):
            self._drop(session, "the server closes")
        self._selector.close()
        for sock in (self._listener, self._wake_in, self._wake_out):
            sock.close()

    def _accept(self) -> None:
        for _ in range(_ACCEPT_BATCH):
            try:
                sock, address = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE) and not _raise_descriptor_limit():
                    if self._strangers:
                        self._drop_oldest_stranger()
                        continue
                    logger.warning("store: no descriptors left, new clients wait until others leave")
                    self._selector.unregister(self._listener)
                    self._accepting = False
                    return
                continue  # a client that left before it was accepted, or a limit that was raised
            self._greet(sock, f"{address[0]}:{address[1]}")

    def _greet(self, sock: socket.socket, name: str) -> None:
        try:
            prepare(sock)
            handshake = PendingHandshake(sock, secret=self._secret, purpose=PURPOSE)
        except OSError:
            sock.close()
            return
        session = Session(handshake, name, MAX_MESSAGE)
        self._sessions.add(session)
        self._selector.register(sock, selectors.EVENT_READ, session)
        self._alarms.set(session, time.monotonic() + self._handshake_timeout)
        self._strangers[session] = None
        if len(self._strangers) > _MOST_STRANGERS:
            self._drop_oldest_stranger()

    def _drop_oldest_stranger(self) -> None:
        self._drop(next(iter(self._strangers)), "it had not proved itself when too many others came")

    def _serve(self, session: Session) -> None:
        """Do what can be done for one client; whatever it did wrong ends that client alone."""
        if session.closed:
            return
        try:
            if session.clogged:
                session.flush()
            else:
                self._receive(session)
            self._watch(session)
        except (WireError, UsageError, OSError, msgspec.MsgspecError) as error:
            self._drop(session, str(error))
        except Exception:
            logger.exception("store: dropping client %s", session.name)
            self._drop(session, "an unexpected error")

    def _receive(self, session: Session) -> None:
        fresh = not session.authenticated
        message = session.receive()
        if fresh and session.authenticated:
            self._alarms.cancel(session)
            self._strangers.pop(session, None)
        if message is not None:
            self._handle(session, decode(message))

    def _handle(self, session: Session, request: Request[Any]) -> None:
        try:
            reply = encode_reply(Status.DONE, request.apply(self._table))
        except KeysMissing as error:
            assert isinstance(request, Blocking)
            deadline = Deadline(request.timeout)
            if not deadline.expired:
                session.parked = request
                self._waiting.add(session, error.keys)
                self._alarms.set(session, deadline.at)
                return
            reply = encode_reply(Status.MISSING, error.keys)
        except StoreError as error:
            reply = encode_reply(Status.FAILED, str(error))
        touched, self._table.touched = self._table.touched, []
        for key in touched:
            self._wake(key)
        session.reply(reply)

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

    def _overdue(self, session: Session) -> None:
        if session.parked is None:
            self._drop(session, "the client did not prove itself in time")
            return
        self._waiting.remove(session)
        self._unpark(session, Status.MISSING, self._table.missing(session.parked.keys))

    def _unpark(self, session: Session, status: Status, body: object) -> None:
        """Answer a client that is not the one being served: its failure must not be the other's."""
        session.parked = None
        self._alarms.cancel(session)
        try:
            session.reply(encode_reply(status, body))
            self._watch(session)
        except OSError as error:
            self._drop(session, str(error))

    def _watch(self, session: Session) -> None:
        """Wait for room to write while a reply is stuck, and take no further request meanwhile."""
        events = selectors.EVENT_WRITE if session.clogged else selectors.EVENT_READ
        if self._selector.get_key(session.sock).events != events:
            self._selector.modify(session.sock, events, session)

    def _drop(self, session: Session, reason: str) -> None:
        if session.closed:
            return
        session.closed = True
        logger.info("store: client %s dropped: %s", session.name, reason)
        self._sessions.discard(session)
        self._strangers.pop(session, None)
        self._waiting.remove(session)
        self._alarms.cancel(session)
        self._selector.unregister(session.sock)
        session.sock.close()
        if not self._accepting and not self._stopping:
            self._selector.register(self._listener, selectors.EVENT_READ)
            self._accepting = True


def _raise_descriptor_limit() -> bool:
    """Raise this process's soft limit of descriptors as far as it may; whether that was possible."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == hard:
        return False
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return True
