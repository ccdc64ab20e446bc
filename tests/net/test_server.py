"""A server that is no store: what every server of authenticated connections has."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from shoal.errors import AuthenticationError, UsageError, WireError
from shoal.net import (
    ClientConnection,
    Connection,
    Deadline,
    Server,
    connect,
    connect_unix,
    frame_header,
    listen,
    listen_unix,
    stream,
)
from shoal.net.handshake import Handshake

SECRET = b"secret"


class Echo(Server[ClientConnection]):
    """Sends each message back; ``alarm``: an hour later; ``broadcast``: to all; and notes what ends."""

    def __init__(self, unix: str | None = None) -> None:
        self.ended: list[str] = []
        self.dropped: list[ClientConnection] = []
        self.all: list[ClientConnection] = []
        self.threads: set[str] = set()
        listener = listen("127.0.0.1", secret=SECRET) if unix is None else listen_unix(unix)
        self.port = 0 if unix is not None else int(listener.getsockname()[1])
        super().__init__(
            listener,
            secret=SECRET,
            purpose="echo",
            limit=2**20,
            kind="echo",
            client_class=ClientConnection,
        )

    def on_authenticated(self, session: ClientConnection) -> None:
        self.all.append(session)

    def on_message(self, session: ClientConnection, message: bytearray) -> None:
        self.threads.add(threading.current_thread().name)
        if message == b"alarm":
            self.timers.set(session, time.monotonic() + 0.01)
        elif message == b"broadcast":
            for each in self.all:
                self.send(each, message)
        elif message == b"refuse":
            raise UsageError("refused")
        elif message == b"break":
            raise ZeroDivisionError
        else:
            session.send(message)

    def on_timer(self, session: ClientConnection) -> None:
        self.send(session, b"rings")

    def on_dropped(self, session: ClientConnection) -> None:
        self.ended.append(session.name)
        self.dropped.append(session)


@pytest.fixture
def server() -> Iterator[Echo]:
    with Echo() as server:
        yield server


def _connect(server: Echo, secret: bytes = SECRET) -> Connection:
    return connect("127.0.0.1", server.port, secret=secret, purpose="echo", timeout=30)


def test_messages_are_answered_in_one_thread_that_has_a_name(server: Echo) -> None:
    with _connect(server) as one, _connect(server) as other:
        for message in (b"", b"x", os.urandom(2**20)):
            one.send(message, 30)
            other.send(b"short", 30)
            assert one.recv(30) == message
            assert other.recv(30) == b"short"
        assert server.clients == 2
    assert server.threads == {"shoal-echo"}


def test_several_messages_may_be_on_their_way(server: Echo) -> None:
    """Requests before their answers are the business of who serves them."""
    with _connect(server) as client:
        client.write(b"".join(frame_header(1) + bytes([number]) for number in range(100)), Deadline(30))
        assert [client.recv(30) for _ in range(100)] == [bytes([number]) for number in range(100)]


def test_alarms_and_messages_to_others_come_from_the_thread(server: Echo) -> None:
    with _connect(server) as one, _connect(server) as other:
        one.send(b"alarm", 30)
        assert one.recv(30) == b"rings"
        other.send(b"broadcast", 30)
        assert (one.recv(30), other.recv(30)) == (b"broadcast", b"broadcast")


@pytest.mark.parametrize("message", [b"refuse", b"break"])
def test_a_message_that_is_refused_ends_its_client_alone(
    server: Echo, message: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with _connect(server) as bad, _connect(server) as good:
        bad.send(message, 30)
        with pytest.raises(WireError):
            bad.recv(30)
        good.send(b"still here", 30)
        assert good.recv(30) == b"still here"
        assert len(server.ended) == 1
        assert ("ZeroDivisionError" in caplog.text) == (message == b"break")


def test_a_message_beyond_the_limit_ends_its_client(server: Echo) -> None:
    with _connect(server) as bad:
        bad.write(frame_header(2**20 + 1), Deadline(30))
        with pytest.raises(WireError):
            bad.recv(30)


def test_another_secret_is_refused(server: Echo) -> None:
    with pytest.raises(AuthenticationError):
        _connect(server, b"other")


class Choked(stream.SocketStream):
    """Reads ahead, as a stream that decrypts does; its first answer finds no room for a while."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock)
        self.ahead = bytearray()
        self.refusals = 0
        self.recv_into = self._recv_into
        self.send = self._send

    def _recv_into(self, view: memoryview) -> int:
        if not self.ahead:
            self.ahead += self.socket.recv(2**16)
        count = len(self.ahead[: len(view)])
        view[:count] = self.ahead[:count]
        del self.ahead[:count]
        return count

    def _send(self, data: bytes | bytearray | memoryview) -> int:
        if self.ahead and self.refusals < 3:
            self.refusals += 1
            raise BlockingIOError
        return self.socket.send(data)

    def pending(self) -> bool:
        return bool(self.ahead)


def test_a_message_that_came_with_a_wrong_proof_is_never_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even while the refusal waits for room."""
    monkeypatch.setattr(stream, "SocketStream", Choked)
    stranger = Handshake(connecting=True, secret=b"other", purpose="echo")
    with Echo() as server:
        with socket.create_connection(("127.0.0.1", server.port), timeout=30) as sock:
            sock.sendall(stranger.greeting)
            greeting = b""
            while len(greeting) < stranger.needed:
                greeting += sock.recv(stranger.needed - len(greeting))
            sock.sendall(stranger.feed(greeting) + frame_header(5) + b"hello")
            assert sock.recv(1000) == bytes(32)
            assert sock.recv(1000) == b""
        assert server.threads == set()
        assert server.dropped[0].stream.refusals == 3  # type: ignore[attr-defined]


def test_a_server_listens_on_a_unix_socket_too() -> None:
    name = f"shoal-test-{os.getpid()}"
    with (
        Echo(name),
        connect_unix(name, secret=SECRET, purpose="echo", timeout=30) as client,
    ):
        client.send(b"near", 30)
        assert client.recv(30) == b"near"


def test_closing_drops_every_client() -> None:
    server = Echo()
    with server:
        clients = [_connect(server) for _ in range(3)]
    for client in clients:
        with pytest.raises(WireError):
            client.recv(30)
        client.close()
    assert len(server.ended) == 3
    server.close()
