"""Strangers that speak TLS, or nearly: none is let in, and none costs the others anything."""

from __future__ import annotations

import contextlib
import itertools
import random
import socket
import ssl
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.net import ClientConnection, frame_header
from shoal.net.handshake import Handshake
from shoal.net.tls import stream as tls
from shoal.testing import no_leaks
from tests.support.waiting import until

from .echo import SECRET, EchoServer, connect_echo, echoes
from .key_updates import Updater
from .relay import GREETING

STRANGERS = 1000


@pytest.fixture(autouse=True)
def _encrypted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_TLS", "1")


def _handshake() -> Handshake:
    return Handshake(connecting=True, secret=b"guess", purpose="echo", tls=True)


def _client(old: bool = False) -> tuple[ssl.SSLObject, ssl.MemoryBIO, ssl.MemoryBIO]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if old:
        context.maximum_version = ssl.TLSVersion.TLSv1_2
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    return context.wrap_bio(incoming, outgoing), incoming, outgoing


def _hello(old: bool = False) -> bytes:
    client, _, outgoing = _client(old)
    with contextlib.suppress(ssl.SSLWantReadError):
        client.do_handshake()
    return outgoing.read()


def _mutated(data: bytes, chance: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(chance.randint(1, 8)):
        match chance.randrange(4):
            case 0:
                changed[chance.randrange(len(changed))] = chance.randrange(256)
            case 1:
                del changed[chance.randrange(len(changed)) :][:1]
            case 2:
                at = chance.randrange(len(changed))
                changed[at:at] = chance.randbytes(chance.randint(1, 40))
            case 3:
                del changed[chance.randint(1, len(changed)) :]
    return bytes(changed)


def _connected(server: EchoServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=60)


def _through_tls(sock: socket.socket, then: bytes) -> None:
    """Shake hands as TLS does, and go on with ``then``."""
    sock.sendall(_handshake().greeting)
    assert len(sock.recv(GREETING, socket.MSG_WAITALL)) == GREETING
    client, incoming, outgoing = _client()
    while True:
        try:
            client.do_handshake()
            break
        except ssl.SSLWantReadError:
            sock.sendall(outgoing.read())
            data = sock.recv(2**16)
            if not data:
                return
            incoming.write(data)
    client.write(then)
    sock.sendall(outgoing.read())


def _until_dropped(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while sock.recv(2**16):
            pass


def test_a_thousand_hostile_handshakes_let_nobody_in() -> None:
    chance = random.Random(0)
    greeting = _handshake().greeting
    hello = _hello()
    kinds = [
        lambda: greeting + _mutated(hello, chance),
        lambda: _mutated(greeting, chance) + hello,
        lambda: greeting + hello + chance.randbytes(chance.randint(1, 3000)),
        lambda: greeting + chance.randbytes(chance.randint(1, 3000)),
        lambda: greeting + b"\x16\x03\x01\xff\xff" + chance.randbytes(2**17),  # a record beyond all bounds
        # A hello that promises 16 MB, in records of the greatest size.
        lambda: (
            greeting
            + b"\x16\x03\x01\x40\x00\x01\xff\xff\xff"
            + bytes(2**14 - 4)
            + (b"\x16\x03\x03\x40\x00" + bytes(2**14)) * 20
        ),
        lambda: greeting + _hello(old=True),
        lambda: greeting + b"\x15\x03\x03\x00\x02\x02\x28" * 50,  # alerts
        # Changes of cipher, of which TLS 1.3 knows none.
        lambda: greeting + b"\x14\x03\x03\x00\x01\x01" * 2000,
        lambda: hello,  # without a greeting
        lambda: greeting + bytes(32),  # a plain proof
    ]
    counts = dict.fromkeys(range(len(kinds)), 0)
    with no_leaks(), EchoServer() as server, connect_echo(server.port) as honest:
        for number in range(STRANGERS):
            kind = number % len(kinds)
            counts[kind] += 1
            with _connected(server) as sock, contextlib.suppress(OSError):
                sock.sendall(kinds[kind]())
                if number % 3:  # the others leave at once
                    sock.shutdown(socket.SHUT_WR)
                    _until_dropped(sock)
            if number % 50 == 0:
                honest.send(b"still", 30)
                assert honest.recv(30) == b"still"
        honest.send(b"served", 30)
        assert honest.recv(30) == b"served"
        assert server.accepted == 1
        echoes(server.port)
    assert min(counts.values()) > 80


@pytest.mark.parametrize(
    "then", [bytes(32), b"x" * 32, b"x" * 32 + frame_header(5) + b"hello", bytes(31), bytes(2**18)]
)
def test_tls_without_the_secret_is_worth_nothing(then: bytes) -> None:
    with EchoServer() as server:
        for _ in range(10):
            with _connected(server) as sock, contextlib.suppress(OSError):
                _through_tls(sock, then)
                sock.shutdown(socket.SHUT_WR)
                _until_dropped(sock)
        assert server.accepted == 0
        echoes(server.port)


def _bytewise(server: EchoServer) -> Iterator[socket.socket]:
    """A stranger that says its hello a byte at a time, and begins anew when it is dropped."""
    data = _handshake().greeting + _hello()
    for _ in itertools.count():
        with _connected(server) as sock, contextlib.suppress(OSError):
            for byte in data[:-1]:
                sock.send(bytes([byte]))
                yield sock
            while True:
                yield sock


def test_a_slow_handshake_delays_nobody() -> None:
    with EchoServer() as server:
        slow = [_bytewise(server) for _ in range(5)]
        for _ in range(30):
            for each in slow:
                for _ in range(20):
                    next(each)
            echoes(server.port)
        for each in slow:
            each.close()  # type: ignore[attr-defined]


def test_a_handshake_that_does_not_end_is_dropped_at_its_deadline() -> None:
    with EchoServer(handshake_timeout=0.2) as server:
        begun = time.monotonic()
        for data in (b"", _hello()[:-1], _hello()):
            with _connected(server) as sock:
                sock.sendall(_handshake().greeting + data)
                _until_dropped(sock)
        assert time.monotonic() - begun < 30
        assert server.accepted == 0


def test_a_stranger_that_takes_nothing_costs_no_memory_and_no_time() -> None:
    """It asks for the server's part of the handshake, and never reads."""
    with EchoServer(handshake_timeout=20.0) as server, contextlib.ExitStack() as stack:
        hello = _handshake().greeting + _hello()
        for _ in range(50):
            sock = stack.enter_context(socket.socket())
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
            sock.connect(("127.0.0.1", server.port))
            sock.sendall(hello)
        for _ in range(20):
            echoes(server.port)


def test_a_client_of_tls_1_2_is_refused_by_tls() -> None:
    with EchoServer() as server, _connected(server) as sock:
        sock.sendall(_handshake().greeting)
        assert len(sock.recv(GREETING, socket.MSG_WAITALL)) == GREETING
        sock.sendall(_hello(old=True))
        alert = sock.recv(100)
        assert alert[:1] == b"\x15"
        assert alert[6] == 70  # the alert "protocol version"


def _updater(sock: socket.socket, handshake: Handshake, folder: Path) -> Updater:
    """A client that has shaken hands as TLS does, and not proved itself."""
    sock.sendall(handshake.greeting)
    handshake.feed(sock.recv(GREETING, socket.MSG_WAITALL))
    return Updater(sock, folder)


def test_new_keys_may_come_at_any_time(tmp_path: Path) -> None:
    """TLS 1.3 knows no renegotiation; it knows this."""
    seen: list[bytes] = []

    class Noting(EchoServer):
        def on_authenticated(self, session: ClientConnection) -> None:
            super().on_authenticated(session)
            session.send(b"welcome")

        def on_message(self, session: ClientConnection, message: bytearray) -> None:
            seen.append(bytes(message))

    with Noting() as server, _connected(server) as sock:
        handshake = Handshake(connecting=True, secret=SECRET, purpose="echo", tls=True)
        updater = _updater(sock, handshake, tmp_path)
        updater.update(3)
        updater.send(handshake.tls_established(server._tls.certificate))  # type: ignore[union-attr]
        updater.update(1)
        updater.send(frame_header(5) + b"hel")
        updater.update(1)
        updater.send(b"lo")
        until(lambda: seen == [b"hello"])
        assert server.accepted == 1


def test_a_stranger_that_asks_for_new_keys_and_takes_no_answers_is_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls, "_MAX_UNSENT_BYTES", 2**12)
    with EchoServer(handshake_timeout=600) as server, socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        sock.settimeout(60)
        sock.connect(("127.0.0.1", server.port))
        updater = _updater(sock, _handshake(), tmp_path)
        (session,) = server._clients.values()
        session.stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
        with contextlib.suppress(OSError):
            for _ in range(100):
                updater.update(300)
        until(lambda: session.closed)
        # Answers to all that was taken at once may come on top.
        assert len(session.stream._unsent) <= 2**14  # type: ignore[attr-defined]
        echoes(server.port)
        assert server.accepted == 1
