"""Connections to a server of Redis, over ``redis-py``, and what goes wrong with them, in words.

A call is sent again over a new connection until it is answered: each of them may be done twice, because the
scripts know what they have done.  A connection carries one call at a time, or one subscription.
"""

from __future__ import annotations

import contextlib
import random
import select
import socket
import ssl
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ...common.wording import in_seconds
from ...errors import AuthenticationError, ConfigurationError, StoreError, StoreTimeout
from ...net import Deadline
from ..external.tls import cause
from .errors import not_taken, refuse_tls, refused
from .scripts import Script

if TYPE_CHECKING:
    import redis

#: a command or its argument, as it is sent
Argument = bytes | str | int

#: seconds beyond a deadline in which the server may still answer
_GRACE = 2.0
#: seconds until another try: for a connection, and for the first answer; every further try has twice as long
_CONNECTING, _ANSWERING = 3.0, 10.0
#: seconds between two tries, before they are varied
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.01, 0.5
#: idle connections that are kept
_KEPT = 8
#: so often in a row a server of a cluster may name another one
_MOVES = 8
#: bytes that are read at once
_READING = 2**16

#: how answers begin that say: not now, and nothing was done
_LATER = ("LOADING", "BUSY", "TRYAGAIN", "CLUSTERDOWN", "MASTERDOWN", "ASK", "max number of clients")


#: what the parser of redis-py raises for bytes that no Redis sends
_UNREADABLE = (ValueError, TypeError, AttributeError, OverflowError, RecursionError)


class ConnectionLost(Exception):
    """There is no connection any more; what was sent may have been done."""


class _Later(Exception):
    """The server does nothing at the moment."""


class _Moved(Exception):
    """Another server of a cluster has the keys."""


class RedisClient:
    """One server of Redis.  All methods may be called from several threads at once.

    Args:
        server: ``host:port``.
        database: number of the database.
        tls: how to talk to it; None: without encryption.
        user, password: who asks; None: nobody in particular.
    """

    def __init__(
        self,
        server: str,
        database: int = 0,
        tls: ssl.SSLContext | None = None,
        user: str | None = None,
        password: str | None = None,
    ) -> None:
        self._redis = _redis()
        self._given = (server, database, tls, user, password)
        self._named = self._server = server
        self._user, self._password = user, password
        self._tls = tls
        self._database = database
        self._lock = threading.Lock()
        self._idle: list[redis.Connection] = []
        self._closed = False
        self._answered = False
        self._class = _connection_class(self._redis, tls)

    def __str__(self) -> str:
        return f"Redis at {self._named}"

    @property
    def host(self) -> str:
        """Name or address of the server."""
        return _host_and_port(self._server)[0]

    def clone(self) -> RedisClient:
        """Another one to the same server, which is closed by itself."""
        return RedisClient(*self._given)

    def close(self) -> None:
        """Close all idle connections, and those in use when they are given back."""
        with self._lock:
            self._closed = True
        self._drop_idle()

    def run(
        self,
        script: Script,
        keys: Sequence[str],
        arguments: Sequence[Argument],
        deadline: Deadline,
        closed: threading.Event,
        *,
        writes: Callable[[], None] | None = None,
    ) -> Any:
        """What ``script`` returns.

        Args:
            closed: set when nobody waits for the answer any more.
            writes: called when an attempt gets no answer, which may be done or still be on the way; None: the
                script changes nothing.  Else the first argument that it gets is the number of the attempt,
                from 0.

        Raises:
            StoreError: the server refuses; nothing was done.
            AuthenticationError: it does not take this user.
            StoreTimeout: there was no answer by the deadline; the error says what the tries met.
        """

        def words(attempt: int, *program: Argument) -> tuple[Argument, ...]:
            return (*program, len(keys), *keys, *((attempt,) if writes else ()), *arguments)

        def known(attempt: int) -> tuple[Argument, ...]:
            return words(attempt, "EVALSHA", script.digest)

        def unknown(attempt: int) -> tuple[Argument, ...]:
            return words(attempt, "EVAL", script.text)

        return self._call(known, unknown, deadline, closed, writes)

    def command(self, *words: Argument, deadline: Deadline, closed: threading.Event) -> Any:
        """What the server answers to a command that changes nothing; raises as :meth:`run` does."""
        return self._call(lambda _: words, lambda _: words, deadline, closed, None)

    def _call(
        self,
        words: Callable[[int], tuple[Argument, ...]],
        unknown: Callable[[int], tuple[Argument, ...]],
        deadline: Deadline,
        closed: threading.Event,
        writes: Callable[[], None] | None,
    ) -> Any:
        """What the server answers to ``words`` of an attempt.

        A server that has not heard of a script is sent ``unknown`` in their place.
        """
        patience = Deadline(deadline.remaining() + _GRACE)
        pause, tries, moves, attempt = _SHORTEST_PAUSE, 0, 0, -1
        met: Counter[str] = Counter()
        refused = unclear = False
        while True:
            reused = began = False
            try:
                with self._connection(patience) as (connection, reused):
                    began = True
                    attempt += 1
                    seconds = min(patience.remaining(), _ANSWERING * 2 ** min(tries, 4))
                    try:
                        return self._exchange(connection, words(attempt), seconds)
                    except self._redis.exceptions.NoScriptError:
                        return self._exchange(connection, unknown(attempt), seconds)
            except (StoreError, AuthenticationError) as error:
                if writes and unclear:  # an earlier attempt may have been done, or be on the way
                    raise StoreTimeout(f"{error}{_fate(True, True)}") from error
                raise
            except _Moved as error:
                moves += 1
                if moves <= _MOVES:
                    continue
                why, moves, refused = str(error), 0, True
            except _Later as error:
                why, refused = str(error), True
            except ConnectionLost as error:
                unclear = unclear or began
                if unclear and writes:
                    writes()
                if reused:  # it may have ended long ago
                    continue
                why = str(error)
            met[why] += 1
            tries += 1
            if deadline.expired:
                raise StoreTimeout(
                    f"{self} did not answer within {in_seconds(deadline.timeout)} ({_tries(met)})"
                    + (_fate(refused, unclear) if writes else "")
                )
            if closed.wait(min(pause * random.uniform(0.5, 1.0), patience.remaining())):
                raise StoreError("closed")  # the store says which
            pause = min(2 * pause, _LONGEST_PAUSE)

    @contextlib.contextmanager
    def subscribed(self, channel: str, deadline: Deadline) -> Iterator[Subscription]:
        """A connection on which the messages of ``channel`` come from now on.

        Raises:
            Broken: there is none.
            StoreError, AuthenticationError: the server refuses.
        """
        patience = Deadline(deadline.remaining() + _GRACE)
        with self._connection(patience) as (connection, _):
            try:
                self._exchange(connection, ("SUBSCRIBE", channel), min(patience.remaining(), _CONNECTING))
                try:
                    yield Subscription(self, connection)
                except BaseException:
                    connection.disconnect()  # type: ignore[no-untyped-call]  # it carries no calls
                    raise
                if deadline.expired:
                    raise ConnectionLost("given up")  # rather than wait for a server that may be gone
                ending = Deadline(min(deadline.remaining(), _CONNECTING))
                reply = self._exchange(connection, ("UNSUBSCRIBE", channel), ending.remaining())
                while not ending.expired and _kind(reply) == b"message":
                    reply = self._read(connection, ending.remaining())
                if _kind(reply) != b"unsubscribe":
                    raise ConnectionLost("the subscription does not end")
            except (_Later, _Moved) as error:
                raise ConnectionLost(str(error)) from error

    # -- connections ---------------------------------------------------------------------------

    @contextlib.contextmanager
    def _connection(self, patience: Deadline) -> Iterator[tuple[redis.Connection, bool]]:
        """A connection for one call, and whether it has carried others."""
        with self._lock:
            connection = self._idle.pop() if self._idle else None
        if connection is not None and _ended(connection):
            connection.disconnect()  # type: ignore[no-untyped-call]
            connection = None
        reused = connection is not None
        if connection is None:
            try:
                connection = self._connected(min(patience.remaining(), _CONNECTING))
            except ConnectionLost:
                self._server = self._named  # one that had the keys may be dead
                raise
        try:
            yield connection, reused
        except (StoreError, AuthenticationError, _Later, self._redis.exceptions.NoScriptError):
            self._give_back(connection)
            raise
        except BaseException as error:
            connection.disconnect()  # type: ignore[no-untyped-call]
            self._drop_idle()  # they lead to the same server
            if isinstance(error, _Moved):
                self._server = str(error)
            elif isinstance(error, ConnectionLost):
                self._server = self._named
            raise
        self._give_back(connection)

    def _connected(self, seconds: float) -> redis.Connection:
        host, port = _host_and_port(self._server)
        connection: redis.Connection = self._class(
            host=host, port=port, db=self._database, username=self._user, password=self._password,
            socket_timeout=max(seconds, 0.001), protocol=2, driver_info=None, socket_read_size=_READING,
        )  # fmt: skip
        with self._in_words():
            connection.connect()  # type: ignore[no-untyped-call]
        return connection

    def _give_back(self, connection: redis.Connection) -> None:
        with self._lock:
            if (
                len(self._idle) < _KEPT
                and not self._closed
                and connection.is_connected
                and (connection.host, connection.port) == _host_and_port(self._server)
            ):
                self._idle.append(connection)
                return
        connection.disconnect()  # type: ignore[no-untyped-call]

    def _drop_idle(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.disconnect()  # type: ignore[no-untyped-call]

    def _exchange(self, connection: redis.Connection, words: tuple[Argument, ...], seconds: float) -> Any:
        """What the server answers to one command."""
        with self._in_words():
            if (sock := _socket(connection)) is not None:
                sock.settimeout(max(seconds, 0.001))
            connection.send_command(*words)  # type: ignore[no-untyped-call]
        return self._read(connection, seconds)

    def _read(self, connection: redis.Connection, seconds: float) -> Any:
        with self._in_words():
            answer = connection.read_response(timeout=max(seconds, 0.001))
            self._answered = True
            return answer

    # -- errors --------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _in_words(self) -> Iterator[None]:
        errors = self._redis.exceptions
        try:
            yield
        except errors.NoScriptError:
            raise
        except errors.MovedError as error:
            raise _Moved(f"{error.host or self.host}:{error.port}") from error
        except errors.AuthenticationError as error:
            raise not_taken(str(self), self._user, str(error)) from error
        except (errors.ResponseError, errors.ConnectionError) as error:
            self._answered = self._answered or isinstance(error, errors.ResponseError)
            code = getattr(error, "status_code", None) or ""
            text = f"{code} {error}".strip()
            if text.startswith(_LATER) or text.removeprefix("ERR ").startswith(_LATER):
                raise _Later(text) from error
            if isinstance(error, errors.ResponseError):
                raise refused(str(self), self._user, text) from error
            refuse_tls(self._server, self._tls is not None, self._answered, error)
            raise ConnectionLost(cause(error)) from error
        except errors.TimeoutError as error:
            refuse_tls(self._server, self._tls is not None, self._answered, error)
            raise ConnectionLost(cause(error)) from error
        except (errors.RedisError, *_UNREADABLE) as error:
            raise StoreError(
                f"what answers at {self._server} is no Redis, or closes: {type(error).__name__}: {error}"
            ) from error


class Subscription:
    """A connection on which messages come."""

    def __init__(self, link: RedisClient, connection: redis.Connection) -> None:
        self._link = link
        self._connection = connection

    def wait(self, seconds: float) -> None:
        """Return when a message has come, or after that time.

        Raises:
            Broken: none will come.
        """
        try:
            self._connection.read_response(timeout=max(seconds, 0.001), disconnect_on_error=False)
        except self._link._redis.exceptions.TimeoutError:
            return
        except (self._link._redis.exceptions.RedisError, *_UNREADABLE) as error:
            raise ConnectionLost(cause(error)) from error

    def shutdown(self) -> None:
        """End it from another thread."""
        if (sock := _socket(self._connection)) is not None:
            with contextlib.suppress(OSError):  # it has ended
                socket.socket.shutdown(sock, socket.SHUT_RDWR)  # and leave the state of TLS to its thread


def _connection_class(redis: Any, tls: ssl.SSLContext | None) -> Any:
    """Connections within ``tls``: those of ``redis-py`` would trust the system's authorities in any case."""
    if tls is None:
        return redis.Connection
    context = tls

    class Encrypted(redis.Connection):  # type: ignore[misc]
        def _connect(self) -> socket.socket:
            plain: socket.socket = super()._connect()
            try:
                plain.settimeout(self.socket_timeout)
                return context.wrap_socket(plain, server_hostname=self.host)
            except BaseException:
                plain.close()
                raise

    return Encrypted


def _socket(connection: redis.Connection) -> socket.socket | None:
    found: socket.socket | None = connection._sock
    return found


def _ended(connection: redis.Connection) -> bool:
    """Whether the server has ended an idle connection: it says nothing unasked."""
    sock = _socket(connection)
    if sock is None:
        return True
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(0))


def _kind(reply: object) -> object:
    return reply[0] if isinstance(reply, list) and reply else None


def _host_and_port(server: str) -> tuple[str, int]:
    host, _, port = server.rpartition(":")
    return host.strip("[]"), int(port)


def _tries(met: Counter[str]) -> str:
    """What the tries have met."""
    return "; ".join(why if times == 1 else f"{why}, {times} times" for why, times in met.items())


def _fate(refused: bool, unclear: bool) -> str:
    if unclear:
        return "; it is unknown whether the request was or will be done"
    return "; it did nothing" if refused else "; nothing was sent to it"


def _redis() -> Any:
    try:
        import redis
    except ImportError:
        raise ConfigurationError("stores in Redis need redis: pip install shoal[redis]") from None
    return redis
