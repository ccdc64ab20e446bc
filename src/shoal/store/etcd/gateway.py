"""Calls of etcd v3 through the JSON gateway that each of its servers has.

A call goes to one server after the other, from the one that answered last, until one answers.  What is only
read may be asked for as often as it takes.  A write whose answer is lost may have been done, or may yet be
done: :meth:`Gateway.call` raises :class:`Unclear`, and the caller has to look.

Keys and values are bytes here; msgspec turns them into base64 and back.
"""

from __future__ import annotations

import contextlib
import random
import ssl
import threading
from collections.abc import Iterator, Mapping, Sequence
from http import HTTPStatus
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from ...common.decoding import MalformedMessage, from_json
from ...common.wording import in_seconds
from ...errors import AuthenticationError, ConfigurationError, StoreError, StoreTimeout
from ...net import Deadline
from ..external.tls import cause, talks_plain, talks_tls

if TYPE_CHECKING:
    import urllib3

T = TypeVar("T")
_Self = TypeVar("_Self", bound="JsonStream")

#: a request to etcd, encoded as JSON
Body = Mapping[str, object]

#: seconds beyond a deadline in which a server may still answer
_GRACE = 2.0
#: seconds until another server is tried: for a connection, and for an answer.  A server that has lost the
#: others says so after 7.
_CONNECTING, _ANSWERING = 3.0, 9.0
#: the same for the first answer to what is only read, where there are several servers
_LOOKING = 2.0
#: seconds between two rounds of all servers, before they are varied
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.01, 0.5
#: so often in a row a new token may be refused
_TOKENS = 3
#: idle connections that are kept for each server
_KEPT = 8

# The codes of gRPC that say something here.
_DENIED, _FAILED, _UNAUTHENTICATED = 7, 9, 16
#: those with which a write may have been done: cancelled, unknown, deadline exceeded, aborted, internal,
#: unavailable
_UNCLEAR = {1, 2, 4, 10, 13, 14}

#: what every HTTP server answers
_GREETING = b"GET /version HTTP/1.0\r\n\r\n"

_FULL = (
    "its database is full (NOSPACE): nothing can be written before it has been compacted and defragmented "
    "(etcdctl compact, defrag, alarm disarm) or given a larger --quota-backend-bytes"
)


class Unclear(Exception):
    """No answer came: what was asked for was done, or will be, or will never be."""


class StreamEnded(Exception):
    """A stream has ended."""


class Compacted(StoreError):
    """etcd has forgotten the revision that was asked for."""


class Full(StoreError):
    """etcd's database is full.  A write that is answered so was done, or never will be."""


class LeaseGone(StoreError):
    """A lease has expired."""


class _NotSent(Exception):
    """A server could not be reached; nothing was done."""


class _TokenRefused(Exception):
    pass


class _Failure(msgspec.Struct):
    """What a server answers to a request that it does not do."""

    error: str = ""
    code: int = 0


class _Token(msgspec.Struct):
    token: str


class Gateway:
    """The servers of one etcd.  All methods may be called from several threads at once.

    Args:
        servers: ``host:port`` of each; tried in turn.
        tls: how to talk to them; None: without encryption.
        user, password: who asks; None: nobody in particular.
    """

    def __init__(
        self,
        servers: Sequence[str],
        tls: ssl.SSLContext | None = None,
        user: str | None = None,
        password: str | None = None,
    ) -> None:
        self._http = _urllib3()
        self._given = (servers, tls, user, password)
        self._urls = [f"{'https' if tls else 'http'}://{server}" for server in servers]
        self._name = f"etcd at {', '.join(servers)}"
        self._user = user
        self._password = password
        self._at = 0
        self._answered = False
        self._token: str | None = None
        self._lock = threading.Lock()
        self._pool = self._http.PoolManager(len(servers), maxsize=_KEPT, retries=False, ssl_context=tls)

    def __str__(self) -> str:
        return self._name

    @property
    def server(self) -> str:
        """``host:port`` of the server that answered last."""
        return self._urls[self._at].partition("//")[2]

    def clone(self) -> Gateway:
        """Another one to the same servers, which is closed by itself."""
        return Gateway(*self._given)

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
        """What a server answers, decoded as ``answer``.

        Args:
            path: below ``/v3/``.
            closed: ends the call, when it is set between two tries.
            writes: the request must not be repeated before it is known whether it was done.

        Raises:
            Unclear: the request ``writes``, and may have been done.
            StoreTimeout: no server answered; a request that ``writes`` was not sent.
            StoreError: etcd refuses; the message says why.
            AuthenticationError: user, password or certificate are wrong.
        """
        raw = msgspec.json.encode(body)
        patience = Deadline(deadline.remaining() + _GRACE)
        pause, tries, refused, token = _SHORTEST_PAUSE, 0, 0, ""
        while True:
            at = self._at
            try:
                token = self._logged_in(at, patience)
                longest = _ANSWERING if writes or len(self._urls) == 1 else _LOOKING * 2 ** min(tries, 4)
                return _decoded(self._ask(at, path, raw, patience, token, longest), answer)
            except _TokenRefused as error:
                refused += 1
                if refused > _TOKENS:
                    raise AuthenticationError(f"{self} refuses the tokens that it gives: {error}") from None
                self._log_out(token)
                continue
            except _NotSent as error:
                why = str(error)
            except Unclear as error:
                if writes:
                    self._at = (at + 1) % len(self._urls)
                    raise
                why = str(error)
            self._at = (at + 1) % len(self._urls)
            tries += 1
            # Without time each server is tried once.
            if patience.expired or (deadline.expired and tries >= len(self._urls)):
                raise StoreTimeout(
                    f"{self} did not answer within {in_seconds(deadline.timeout)} ({why})"
                    + ("; nothing was sent to it" if writes else "")
                )
            if tries % len(self._urls) == 0:
                if closed.wait(min(pause * random.uniform(0.5, 1.0), patience.remaining())):
                    raise StoreError("closed")  # the store says which
                pause = min(2 * pause, _LONGEST_PAUSE)

    def stream(self, path: str, bodies: Sequence[Body], silence: float) -> JsonStream:
        """Ask for an answer without end.

        Args:
            silence: seconds without a document after which the stream is broken.

        Raises:
            Broken: there is no stream from this server; the next call goes to another one.
        """
        at = self._at
        raw = b"".join(map(msgspec.json.encode, bodies))
        try:
            response = self._send(at, path, raw, silence, self._token, whole=False)
        except (_NotSent, Unclear) as error:
            self._at = (at + 1) % len(self._urls)
            raise StreamEnded(str(error)) from error
        if response.status != HTTPStatus.OK:
            response.close()
            raise StreamEnded(f"HTTP status {response.status}")
        return JsonStream(response, self._http)

    def _logged_in(self, at: int, patience: Deadline) -> str:
        """The token of this user; "" without one."""
        if self._user is None:
            return ""
        with self._lock:
            if self._token is None:
                body = {"name": self._user, "password": self._password or ""}
                try:
                    raw = self._ask(at, "auth/authenticate", msgspec.json.encode(body), patience, "")
                except Unclear as error:
                    raise _NotSent(str(error)) from None
                self._token = _decoded(raw, _Token).token if raw else ""
            return self._token

    def _log_out(self, token: str) -> None:
        with self._lock:
            if self._token == token:
                self._token = None

    def _ask(
        self, at: int, path: str, raw: bytes, patience: Deadline, token: str, longest: float = _ANSWERING
    ) -> bytes:
        """The answer of one server."""
        seconds = min(patience.remaining(), longest, _ANSWERING)
        response = self._send(at, path, raw, seconds, token, whole=True)
        data = response.data
        if response.status == HTTPStatus.OK:
            return data
        server = self._urls[at].partition("//")[2]
        try:
            failure = from_json(data, _Failure, strict=False)
        except MalformedMessage:
            raise StoreError(
                f"what answers at {server} is no etcd with the JSON gateway /v3 (3.4 or later): "
                f"HTTP status {response.status}"
            ) from None
        return self._refused(server, failure)

    def _refused(self, server: str, failure: _Failure) -> bytes:
        """Raise what ``failure`` means; b"": there is no need for a token."""
        text = failure.error.removeprefix("etcdserver: ").removeprefix("mvcc: ")
        if failure.code == _UNAUTHENTICATED or "revision in header is old" in text:
            raise _TokenRefused(text)
        if failure.code in _UNCLEAR or "too many requests" in text:
            raise Unclear(f"{server}: {text}")
        if failure.code == _FAILED and "not enabled" in text:
            return b""
        if "user name is empty" in text:
            raise AuthenticationError(
                f"{self} asks for user and password: set SHOAL_STORE_USER and SHOAL_STORE_PASSWORD, or put "
                "them into the URL, as in etcd://user:password@host:2379"
            )
        if "authentication failed" in text:
            raise AuthenticationError(f"{self} does not take user {self._user!r} with this password: {text}")
        if failure.code == _DENIED:
            raise StoreError(f"{self}: user {self._user!r} may not do this: {text}")
        if "space exceeded" in text:
            raise Full(f"{self}: {_FULL}")
        if "has been compacted" in text:
            raise Compacted(f"{self}: {text}")
        if "lease not found" in text:
            raise LeaseGone(f"{self}: {text}")
        raise StoreError(f"{self}: {text}")

    def _send(
        self, at: int, path: str, raw: bytes, seconds: float, token: str | None, *, whole: bool
    ) -> urllib3.BaseHTTPResponse:
        errors = self._http.exceptions
        timeout = self._http.Timeout(connect=max(min(seconds, _CONNECTING), 0.001), read=max(seconds, 0.001))
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
            self._refuse_tls(at, error)
            raise Unclear(cause(error)) from error

    def _refuse_tls(self, at: int, error: Exception) -> None:
        """Raise if ``error`` says that no other try can do better."""
        server, text = self._urls[at].partition("//")[2], str(error)
        if not self._answered and "RemoteDisconnected" in text and talks_tls(server):
            raise StoreError(f"etcd at {server} talks TLS: use etcds:// in place of etcd://") from error
        if "CERTIFICATE_VERIFY_FAILED" in text:
            raise AuthenticationError(
                f"the certificate of etcd at {server} is not one that this process trusts ({cause(error)}); "
                "the parameter ca= of the URL names the file of the authority that signed it"
            ) from error
        if "CERTIFICATE_REQUIRED" in text or "BAD_CERTIFICATE" in text:
            raise AuthenticationError(
                f"etcd at {server} wants a certificate of its own authority from each client "
                f"({cause(error)}): give it as cert= and key= in the URL"
            ) from error
        if not self._answered and "[SSL: " in text and talks_plain(server, _GREETING, b"HTTP/"):
            raise StoreError(f"etcd at {server} talks no TLS: use etcd:// in place of etcds://") from error


class JsonStream:
    """An answer that goes on: documents of JSON, one a line.  A context manager, which closes it."""

    def __init__(self, response: urllib3.BaseHTTPResponse, http: Any) -> None:
        self._response = response
        self._http = http

    def documents(self, document: type[T]) -> Iterator[T]:
        """Each document as soon as it has come whole, in however many pieces.

        Raises:
            Broken: no more will come.
            TimeoutError: none has come for long.
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
            raise StreamEnded(cause(error)) from error  # the last two: it was closed meanwhile
        raise StreamEnded("the server ended it")

    def shutdown(self) -> None:
        """End it from another thread."""
        with contextlib.suppress(OSError, RuntimeError, ValueError):  # it has ended
            self._response.shutdown()

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._response.close()


def _urllib3() -> Any:
    try:
        import urllib3
    except ImportError:
        raise ConfigurationError("stores in etcd need urllib3: pip install shoal[etcd]") from None
    return urllib3


def _decoded(raw: bytes, kind: type[T]) -> T:
    try:
        return from_json(raw, kind, strict=False)  # numbers come as text
    except MalformedMessage as error:
        raise StoreError(f"etcd answers what cannot be read: {error}") from error
