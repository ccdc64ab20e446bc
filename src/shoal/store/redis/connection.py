"""Connections to a Redis server, over ``redis-py``, and the messages of their errors.

A call is sent again over a new connection until it is answered: it may be executed twice, because the scripts
recognize repetitions. A connection carries one call at a time, or one subscription.
"""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ...common.formatting import format_seconds
from ...errors import AuthenticationError, ConfigurationError, StoreError, StoreTimeout
from ...net import Deadline
from ..backing import Backoff
from ..external.tls import cause, raise_for_tls
from .scripts import Script

if TYPE_CHECKING:
    import redis

#: a command or its argument, as it is sent
Argument = bytes | str | int

#: seconds beyond a deadline for which a call still waits for an answer
_REPLY_MARGIN_S = 2.0
#: timeouts in seconds: for a connection, and for the first answer; doubled for each further attempt
_CONNECT_TIMEOUT_S, _ANSWER_TIMEOUT_S = 3.0, 10.0
#: number of idle connections kept
_MAX_IDLE_CONNECTIONS = 8
#: number of times in a row that a server of a cluster may redirect a call
_MAX_REDIRECTIONS = 8
#: a line of plain text, and the first bytes of the possible answers of Redis
_GREETING, _ANSWERS = b"PING\r\n", (b"+", b"-")
#: bytes per read
_READ_SIZE = 2**16

#: first words of the errors that mean: not executed, try again later
_RETRYABLE_ERRORS = (
    "LOADING",
    "BUSY",
    "TRYAGAIN",
    "CLUSTERDOWN",
    "MASTERDOWN",
    "ASK",
    "max number of clients",
)


#: exceptions of redis-py's parser for bytes that Redis never sends
_UNREADABLE = (ValueError, TypeError, AttributeError, OverflowError, RecursionError)


class ConnectionLost(Exception):
    """The connection was lost; the request may have been executed."""


class _Later(Exception):
    """The server cannot execute the request at the moment."""


class _Moved(Exception):
    """Another server of the cluster has the keys."""


class RedisClient:
    """One Redis server. All methods are thread-safe.

    Args:
        server: ``host:port``.
        database: number of the database.
        tls: TLS context; None: no encryption.
        user, password: None: no authentication.
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
        self._arguments = (server, database, tls, user, password)
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
        """Return another client of the same server, to be closed separately."""
        return RedisClient(*self._arguments)

    def close(self) -> None:
        """Close all idle connections now, and those in use when they are released."""
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
        """Execute ``script`` and return its result.

        Args:
            closed: set when the result is no longer needed.
            writes: called for each attempt without an answer, which may have been executed or be in transit.
                The first argument of the script is then the number of the attempt, from 0. None: the script
                changes nothing.

        Raises:
            StoreError: the server refused; nothing was executed.
            AuthenticationError: the server does not accept the user.
            StoreTimeout: there was no answer by the deadline; the message lists the failures.
        """

        def words(attempt: int, is_known: bool) -> Sequence[Argument]:
            program = ("EVALSHA", script.digest) if is_known else ("EVAL", script.text)
            return (*program, len(keys), *keys, *((attempt,) if writes else ()), *arguments)

        return self._call(words, deadline, closed, writes)

    def command(self, *words: Argument, deadline: Deadline, closed: threading.Event) -> Any:
        """Return the answer to a command that changes nothing; raises as :meth:`run` does."""
        return self._call(lambda *_: words, deadline, closed, None)

    def _call(
        self,
        words: Callable[[int, bool], Sequence[Argument]],
        deadline: Deadline,
        closed: threading.Event,
        writes: Callable[[], None] | None,
    ) -> Any:
        """Return the answer to ``words`` of an attempt; their second argument: the server has the script."""
        reply_deadline = Deadline(deadline.remaining() + _REPLY_MARGIN_S)
        backoff, tries, moves, attempt = Backoff(closed), 0, 0, -1
        failures: Counter[str] = Counter()
        refused = unclear = False
        while True:
            reused = began = False
            try:
                with self._connection(reply_deadline) as (connection, reused):
                    began = True
                    attempt += 1
                    seconds = min(reply_deadline.remaining(), _ANSWER_TIMEOUT_S * 2 ** min(tries, 4))
                    try:
                        return self._exchange(connection, words(attempt, True), seconds)
                    except self._redis.exceptions.NoScriptError:
                        return self._exchange(connection, words(attempt, False), seconds)
            except (StoreError, AuthenticationError) as error:
                if writes and unclear:  # an earlier attempt may have been executed or be in transit
                    raise StoreTimeout(f"{error}{_outcome_text(True, True)}") from error
                raise
            except _Moved as error:
                moves += 1
                if moves <= _MAX_REDIRECTIONS:
                    continue
                why, moves, refused = str(error), 0, True
            except _Later as error:
                why, refused = str(error), True
            except ConnectionLost as error:
                unclear = unclear or began
                if unclear and writes:
                    writes()
                if reused:  # it may have been closed long ago
                    continue
                why = str(error)
            failures[why] += 1
            tries += 1
            if deadline.expired:
                raise StoreTimeout(
                    f"{self} did not answer within {format_seconds(deadline.timeout)} "
                    f"({_failures_text(failures)})" + (_outcome_text(refused, unclear) if writes else "")
                )
            backoff.pause(reply_deadline.remaining())

    @contextlib.contextmanager
    def subscribed(self, channel: str, deadline: Deadline) -> Iterator[Subscription]:
        """Yield a connection that receives the messages of ``channel`` from now on.

        Raises ConnectionLost, or StoreError or AuthenticationError if the server refuses.
        """
        reply_deadline = Deadline(deadline.remaining() + _REPLY_MARGIN_S)
        with self._connection(reply_deadline) as (connection, _):
            try:
                self._exchange(
                    connection, ("SUBSCRIBE", channel), min(reply_deadline.remaining(), _CONNECT_TIMEOUT_S)
                )
                try:
                    yield Subscription(self, connection)
                except BaseException:
                    connection.disconnect()  # type: ignore[no-untyped-call]  # unusable for calls
                    raise
                if deadline.expired:
                    raise ConnectionLost("timed out")  # do not wait for a server that may be down
                ending = Deadline(min(deadline.remaining(), _CONNECT_TIMEOUT_S))
                reply = self._exchange(connection, ("UNSUBSCRIBE", channel), ending.remaining())
                while not ending.expired and _kind(reply) == b"message":
                    reply = self._read(connection, ending.remaining())
                if _kind(reply) != b"unsubscribe":
                    raise ConnectionLost("the server did not end the subscription")
            except (_Later, _Moved) as error:
                raise ConnectionLost(str(error)) from error

    # -- connections ---------------------------------------------------------------------------

    @contextlib.contextmanager
    def _connection(self, reply_deadline: Deadline) -> Iterator[tuple[redis.Connection, bool]]:
        """Yield a connection for one call, and whether it was used before."""
        with self._lock:
            connection = self._idle.pop() if self._idle else None
        if connection is not None and _ended(connection):
            connection.disconnect()  # type: ignore[no-untyped-call]
            connection = None
        reused = connection is not None
        if connection is None:
            try:
                connection = self._connected(min(reply_deadline.remaining(), _CONNECT_TIMEOUT_S))
            except ConnectionLost:
                self._server = self._named  # the server of the redirection may be down
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
            socket_timeout=max(seconds, 0.001), protocol=2, driver_info=None, socket_read_size=_READ_SIZE,
        )  # fmt: skip
        with self._translating_errors():
            connection.connect()  # type: ignore[no-untyped-call]
        return connection

    def _give_back(self, connection: redis.Connection) -> None:
        with self._lock:
            if (
                len(self._idle) < _MAX_IDLE_CONNECTIONS
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

    def _exchange(self, connection: redis.Connection, words: Sequence[Argument], seconds: float) -> Any:
        with self._translating_errors():
            if (sock := _socket(connection)) is not None:
                sock.settimeout(max(seconds, 0.001))
            connection.send_command(*words)  # type: ignore[no-untyped-call]
        return self._read(connection, seconds)

    def _read(self, connection: redis.Connection, seconds: float) -> Any:
        with self._translating_errors():
            answer = connection.read_response(timeout=max(seconds, 0.001))
            self._answered = True
            return answer

    # -- errors --------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _translating_errors(self) -> Iterator[None]:
        errors = self._redis.exceptions
        try:
            yield
        except errors.NoScriptError:
            raise
        except errors.MovedError as error:
            raise _Moved(f"{error.host or self.host}:{error.port}") from error
        except errors.AuthenticationError as error:
            raise _user_refused_error(str(self), self._user, str(error)) from error
        except (errors.ResponseError, errors.ConnectionError, errors.TimeoutError) as error:
            self._answered = self._answered or isinstance(error, errors.ResponseError)
            code = getattr(error, "status_code", None) or ""
            text = f"{code} {error}".strip()
            if text.startswith(_RETRYABLE_ERRORS) or text.removeprefix("ERR ").startswith(_RETRYABLE_ERRORS):
                raise _Later(text) from error
            if isinstance(error, errors.ResponseError):
                raise _request_error(str(self), self._user, text) from error
            raise_for_tls(
                "Redis", self._server, encrypted=self._tls is not None,
                greeting=_GREETING, answers=() if self._answered else _ANSWERS, error=error,
            )  # fmt: skip
            raise ConnectionLost(cause(error)) from error
        except (errors.RedisError, *_UNREADABLE) as error:
            raise StoreError(
                f"the server at {self._server} is not Redis, or is shutting down: "
                f"{type(error).__name__}: {error}"
            ) from error


class Subscription:
    """A connection that receives messages."""

    def __init__(self, client: RedisClient, connection: redis.Connection) -> None:
        self._client = client
        self._connection = connection

    def wait(self, seconds: float) -> None:
        """Return when a message has arrived or after ``seconds``; ConnectionLost if none can arrive."""
        try:
            self._connection.read_response(timeout=max(seconds, 0.001), disconnect_on_error=False)
        except self._client._redis.exceptions.TimeoutError:
            return
        except (self._client._redis.exceptions.RedisError, *_UNREADABLE) as error:
            raise ConnectionLost(cause(error)) from error

    def shutdown(self) -> None:
        """End the wait from another thread."""
        if (sock := _socket(self._connection)) is not None:
            with contextlib.suppress(OSError):  # it has ended already
                socket.socket.shutdown(sock, socket.SHUT_RDWR)  # not the TLS state: it belongs to its thread


def _connection_class(redis: Any, tls: ssl.SSLContext | None) -> Any:
    """Return a connection class for ``tls``; that of ``redis-py`` always trusts the system's authorities."""
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
    """Return whether the server has closed an idle connection, the only cause of input on it."""
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


def _failures_text(failures: Counter[str]) -> str:
    return "; ".join(why if times == 1 else f"{why}, {times} times" for why, times in failures.items())


def _outcome_text(refused: bool, unclear: bool) -> str:
    if unclear:
        return "; it is unknown whether the request was or will be done"
    return "; it did nothing" if refused else "; nothing was sent to it"


def _user_refused_error(name: str, user: str | None, text: str) -> AuthenticationError:
    """Return the error of a server that does not accept ``user`` (None: the default user)."""
    if "without any password" in text or "no password is set" in text:
        why = "asks for no password, and this process gives one"
    elif "required" in text:
        why = (
            "asks for a password: set SHOAL_STORE_PASSWORD (and SHOAL_STORE_USER), or put it into the URL, "
            "as in redis://user:password@host:6379"
        )
    else:
        why = f"does not accept user {user or 'default'!r} with this password"
    return AuthenticationError(f"{name} {why}: {text}")


def _request_error(name: str, user: str | None, text: str) -> StoreError:
    """Return the exception for the error ``text`` of a request; the server has executed nothing."""
    if any(each in text for each in ("NOPERM", "ACL failure", "user executing the script can't")):
        return StoreError(
            f"{name}: user {user or 'default'!r} lacks permission: {text}; docs/stores.md lists the keys, "
            "channels and commands that a job needs"
        )
    if "OOM " in text:
        return StoreError(
            f"{name}: its memory is full: nothing can be written before keys are removed or maxmemory is "
            f"raised ({text})"
        )
    if "READONLY" in text:
        return StoreError(f"{name} is a read-only replica: name its primary ({text})")
    return StoreError(f"{name}: {text}")


def _redis() -> Any:
    try:
        import redis
    except ImportError:
        raise ConfigurationError("stores in Redis need redis: pip install shoal[redis]") from None
    return redis
