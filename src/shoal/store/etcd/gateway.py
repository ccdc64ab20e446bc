"""Calls of etcd v3 through the JSON gateway of its servers.

A call tries the servers in turn, beginning with the one that answered last, until one answers. A read is
repeated as often as necessary. A write without an answer may have been executed, or may be executed later:
:meth:`Gateway.call` raises :class:`OutcomeUnknown`, and the caller must find out.

Keys and values are bytes; msgspec converts them to and from base64.
"""

from __future__ import annotations

import contextlib
import ssl
import threading
from collections.abc import Iterator, Mapping, Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from ...common.decoding import MalformedMessage, from_json
from ...common.formatting import format_seconds
from ...errors import AuthenticationError, ConfigurationError, StoreError, StoreTimeout
from ...net import Deadline
from ..backing import Backoff
from ..external.tls import cause, raise_for_tls

if TYPE_CHECKING:
    import urllib3

T = TypeVar("T")
_Self = TypeVar("_Self", bound="JsonStream")

#: a request to etcd, encoded as JSON
Body = Mapping[str, object]

#: seconds beyond a deadline for which a call still waits for an answer
_REPLY_MARGIN_S = 2.0
#: timeouts in seconds of one server: for a connection, and for an answer. A server that is cut off from the
#: others reports that after 7.
_CONNECT_TIMEOUT_S, _ANSWER_TIMEOUT_S = 3.0, 9.0
#: the answer timeout in seconds of the first attempt at a read, if there are several servers
_FIRST_READ_TIMEOUT_S = 2.0
#: number of times in a row that a new token may be refused
_MAX_TOKEN_REFUSALS = 3
#: number of idle connections kept for each server
_MAX_IDLE_CONNECTIONS = 8

# Status codes of gRPC.
_DENIED, _FAILED, _UNAUTHENTICATED = 7, 9, 16
#: codes after which a write may have been executed: cancelled, unknown, deadline exceeded, aborted,
#: internal, unavailable
_UNCLEAR = {1, 2, 4, 10, 13, 14}

#: a request that every HTTP server answers
_GREETING = b"GET /version HTTP/1.0\r\n\r\n"

_FULL = (
    "its database is full (NOSPACE): nothing can be written before it has been compacted and defragmented "
    "(etcdctl compact, defrag, alarm disarm) or given a larger --quota-backend-bytes"
)


class OutcomeUnknown(Exception):
    """No answer arrived: the request was executed, will be executed, or never will be."""


class StreamEnded(Exception):
    """A stream has ended."""


class DatabaseFull(StoreError):
    """etcd's database is full. A write with this answer was executed already, or never will be."""


class LeaseExpired(StoreError):
    """A lease has expired."""


class _NotSent(Exception):
    """A server could not be reached; nothing was executed."""


class _TokenRefused(Exception):
    pass


class _Failure(msgspec.Struct):
    """The body of an error response."""

    error: str = ""
    code: int = 0


class _Token(msgspec.Struct):
    token: str


class Gateway:
    """The servers of one etcd cluster. All methods are thread-safe.

    Args:
        servers: ``host:port`` of each; tried in turn.
        tls: TLS context; None: no encryption.
        user, password: None: no authentication.
    """

    def __init__(
        self,
        servers: Sequence[str],
        tls: ssl.SSLContext | None = None,
        user: str | None = None,
        password: str | None = None,
    ) -> None:
        self._http = _urllib3()
        self._arguments = (servers, tls, user, password)
        self._tls = tls
        self._urls = [f"{'https' if tls else 'http'}://{server}" for server in servers]
        self._name = f"etcd at {', '.join(servers)}"
        self._user = user
        self._password = password
        self._at = 0
        self._answered = False
        self._token: str | None = None
        self._lock = threading.Lock()
        self._pool = self._http.PoolManager(
            len(servers), maxsize=_MAX_IDLE_CONNECTIONS, retries=False, ssl_context=tls
        )

    def __str__(self) -> str:
        return self._name

    @property
    def server(self) -> str:
        """``host:port`` of the server that answered last."""
        return self._urls[self._at].partition("//")[2]

    def clone(self) -> Gateway:
        """Return another gateway to the same servers, to be closed separately."""
        return Gateway(*self._arguments)

    def close(self) -> None:
        """Close all idle connections."""
        self._pool.clear()

    def call(
        self,
        path: str,
        body: Body,
        answer: type[T],
        deadline: Deadline,
        closed: threading.Event,
        *,
        writes: bool = False,
    ) -> T:
        """Return the answer of a server, decoded as ``answer``.

        Args:
            path: below ``/v3/``.
            closed: cancels the call, if set between two attempts.
            writes: the request must not be sent again unless it is known that it was not executed.

        Raises:
            Unclear: a request that ``writes`` may have been executed.
            StoreTimeout: no server answered; a request that ``writes`` was not sent.
            StoreError: etcd refused the request; the message has the reason.
            AuthenticationError: user, password or certificate are wrong.
        """
        raw = msgspec.json.encode(body)
        reply_deadline = Deadline(deadline.remaining() + _REPLY_MARGIN_S)
        backoff, tries, refused, token = Backoff(closed), 0, 0, ""
        while True:
            at = self._at
            try:
                token = self._token_for_user(at, reply_deadline)
                longest = (
                    _ANSWER_TIMEOUT_S
                    if writes or len(self._urls) == 1
                    else _FIRST_READ_TIMEOUT_S * 2 ** min(tries, 4)
                )
                return _decoded(self._request(at, path, raw, reply_deadline, token, longest), answer)
            except _TokenRefused as error:
                refused += 1
                if refused > _MAX_TOKEN_REFUSALS:
                    raise AuthenticationError(f"{self} refuses the tokens that it issued: {error}") from None
                self._log_out(token)
                continue
            except _NotSent as error:
                why = str(error)
            except OutcomeUnknown as error:
                if writes:
                    self._at = (at + 1) % len(self._urls)
                    raise
                why = str(error)
            self._at = (at + 1) % len(self._urls)
            tries += 1
            # Even without time left, each server is tried once.
            if reply_deadline.expired or (deadline.expired and tries >= len(self._urls)):
                raise StoreTimeout(
                    f"{self} did not answer within {format_seconds(deadline.timeout)} ({why})"
                    + ("; nothing was sent to it" if writes else "")
                )
            if tries % len(self._urls) == 0:
                backoff.pause(reply_deadline.remaining())

    def stream(self, path: str, bodies: Sequence[Body], silence: float) -> JsonStream:
        """Send a request whose answer is an endless stream of documents.

        Args:
            silence: timeout in seconds for each document.

        Raises:
            StreamEnded: this server returned no stream; the next call tries another server.
        """
        at = self._at
        raw = b"".join(map(msgspec.json.encode, bodies))
        try:
            response = self._send(at, path, raw, silence, self._token, whole=False)
        except (_NotSent, OutcomeUnknown) as error:
            self._at = (at + 1) % len(self._urls)
            raise StreamEnded(str(error)) from error
        if response.status != HTTPStatus.OK:
            response.close()
            raise StreamEnded(f"HTTP status {response.status}")
        return JsonStream(response, self._http)

    def _token_for_user(self, at: int, reply_deadline: Deadline) -> str:
        """Return the token of the user; "" without a user."""
        if self._user is None:
            return ""
        with self._lock:
            if self._token is None:
                body = {"name": self._user, "password": self._password or ""}
                try:
                    raw = self._request(
                        at, "auth/authenticate", msgspec.json.encode(body), reply_deadline, ""
                    )
                except OutcomeUnknown as error:
                    raise _NotSent(str(error)) from None
                self._token = _decoded(raw, _Token).token if raw else ""
            return self._token

    def _log_out(self, token: str) -> None:
        with self._lock:
            if self._token == token:
                self._token = None

    def _request(
        self,
        at: int,
        path: str,
        raw: bytes,
        reply_deadline: Deadline,
        token: str,
        longest: float = _ANSWER_TIMEOUT_S,
    ) -> bytes:
        seconds = min(reply_deadline.remaining(), longest, _ANSWER_TIMEOUT_S)
        response = self._send(at, path, raw, seconds, token, whole=True)
        data = response.data
        if response.status == HTTPStatus.OK:
            return data
        server = self._urls[at].partition("//")[2]
        try:
            failure = from_json(data, _Failure, strict=False)
        except MalformedMessage:
            raise StoreError(
                f"the server at {server} is not etcd 3.4 or later with the JSON gateway /v3: "
                f"HTTP status {response.status}"
            ) from None
        return self._raise_for_failure(server, failure)

    def _raise_for_failure(self, server: str, failure: _Failure) -> bytes:
        """Raise the exception for ``failure``; return b"" if etcd needs no token."""
        text = failure.error.removeprefix("etcdserver: ").removeprefix("mvcc: ")
        if failure.code == _UNAUTHENTICATED or "revision in header is old" in text:
            raise _TokenRefused(text)
        if failure.code in _UNCLEAR or "too many requests" in text:
            raise OutcomeUnknown(f"{server}: {text}")
        if failure.code == _FAILED and "not enabled" in text:
            return b""
        if "user name is empty" in text:
            raise AuthenticationError(
                f"{self} asks for user and password: set SHOAL_STORE_USER and SHOAL_STORE_PASSWORD, or put "
                "them into the URL, as in etcd://user:password@host:2379"
            )
        if "authentication failed" in text:
            raise AuthenticationError(
                f"{self} does not accept user {self._user!r} with this password: {text}"
            )
        if failure.code == _DENIED:
            raise StoreError(f"{self}: user {self._user!r} lacks permission: {text}")
        if "space exceeded" in text:
            raise DatabaseFull(f"{self}: {_FULL}")
        if "lease not found" in text:
            raise LeaseExpired(f"{self}: {text}")
        raise StoreError(f"{self}: {text}")

    def _send(
        self, at: int, path: str, raw: bytes, seconds: float, token: str | None, *, whole: bool
    ) -> urllib3.BaseHTTPResponse:
        errors = self._http.exceptions
        timeout = self._http.Timeout(
            connect=max(min(seconds, _CONNECT_TIMEOUT_S), 0.001), read=max(seconds, 0.001)
        )
        headers = {"Content-Type": "application/json"}
        if token:
            headers["Authorization"] = token
        try:
            response: urllib3.BaseHTTPResponse = self._pool.request(
                "POST", f"{self._urls[at]}/v3/{path}", body=raw, headers=headers, timeout=timeout,
                retries=False, redirect=False, preload_content=whole,
            )  # fmt: skip
            self._answered = True
            return response
        except (errors.NewConnectionError, errors.ConnectTimeoutError) as error:
            raise _NotSent(cause(error)) from error
        except errors.HTTPError as error:
            if "[SSL: " in str(error) or "RemoteDisconnected" in str(error):
                raise_for_tls(
                    "etcd", self._urls[at].partition("//")[2], encrypted=self._tls is not None,
                    greeting=_GREETING, answers=() if self._answered else (b"HTTP/",), error=error,
                )  # fmt: skip
            raise OutcomeUnknown(cause(error)) from error


class JsonStream:
    """An endless answer of JSON documents, one per line. As a context manager it closes the answer."""

    def __init__(self, response: urllib3.BaseHTTPResponse, http: Any) -> None:
        self._response = response
        self._http = http

    def documents(self, document: type[T]) -> Iterator[T]:
        """Yield each document as soon as it is complete.

        Raises:
            StreamEnded: no further documents will arrive.
            TimeoutError: no document arrived in time.
        """
        held = b""
        try:
            for piece in self._response.stream(2**16):
                *lines, held = (held + piece).split(b"\n")
                for line in lines:
                    if line:
                        yield _decoded(line, document)
        except self._http.exceptions.ReadTimeoutError:
            raise TimeoutError from None
        except (self._http.exceptions.HTTPError, OSError, ValueError, AttributeError) as error:
            raise StreamEnded(cause(error)) from error  # the last two: the stream was closed meanwhile
        raise StreamEnded("the server ended it")

    def shutdown(self) -> None:
        """End the stream from another thread."""
        with contextlib.suppress(OSError, RuntimeError, ValueError):  # it has ended already
            self._response.shutdown()

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._response.close()


def _urllib3() -> Any:
    try:
        import urllib3
    except ImportError:
        raise ConfigurationError("stores in etcd need urllib3: pip install shoal[etcd]") from None
    return urllib3


def _decoded(raw: bytes, kind: type[T]) -> T:
    try:
        return from_json(raw, kind, strict=False)  # numbers are encoded as strings
    except MalformedMessage as error:
        raise StoreError(f"an answer of etcd cannot be decoded: {error}") from error
