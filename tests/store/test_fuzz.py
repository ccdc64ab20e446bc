"""A live server is fed at least 10,000 pieces of garbage, and goes on serving."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from shoal.errors import WireError
from shoal.net import Connection, Deadline, connect, frame_header
from shoal.net.handshake import Handshake
from shoal.store import TCPStore, TCPStoreServer
from shoal.store.requests import Add, Append, CompareSet, Get, MultiSet, Peek, Set, Together, Wait
from shoal.store.tcp.protocol import PURPOSE, encode_request

SECRET = b"secret"
EXAMPLES, PIECES = 70, 50

_valid = [
    encode_request(Set("key", b"value")),
    encode_request(Get(["key", "other"], 0.0)),
    encode_request(Wait(["never"], 0.0)),
    encode_request(Add("counter", 7)),
    encode_request(CompareSet("key", b"", b"value")),
    encode_request(MultiSet([("a", b"1"), ("b", b"2")])),
    encode_request(Peek(["key", "never"])),
    encode_request(Together([Set("key", b"value"), Add("counter", 7), Append("log", b".")])),
]
_greeting = Handshake(connecting=True, secret=b"wrong", purpose=PURPOSE).greeting

#: which bytes of a message to replace by what
_changes = st.lists(st.tuples(st.integers(0, 200), st.integers(0, 255)), max_size=3)

fuzz = settings(
    max_examples=EXAMPLES,
    deadline=None,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


def _changed(message: bytes | bytearray, changes: list[tuple[int, int]]) -> bytes:
    changed = bytearray(message)
    for place, value in changes:
        changed[place % len(changed)] = value
    return bytes(changed)


@pytest.fixture(scope="module")
def fed() -> Iterator[list[int]]:
    """How many pieces each test has fed."""
    counts: list[int] = []
    yield counts
    assert sum(counts) >= 10_000


@pytest.fixture(scope="module")
def server() -> Iterator[TCPStoreServer]:
    with TCPStoreServer(secret=SECRET) as server:
        yield server


@pytest.fixture(scope="module")
def honest(server: TCPStoreServer) -> Iterator[TCPStore]:
    with TCPStore("127.0.0.1", server.port, SECRET, timeout=30) as store:
        yield store


def _feed(server: TCPStoreServer, piece: bytes, *, hurry: bool) -> None:
    """Send bytes as a stranger; wait to be dropped unless in a hurry."""
    with (
        contextlib.suppress(OSError),
        socket.create_connection(("127.0.0.1", server.port), 30) as sock,
    ):
        sock.sendall(piece)
        if not hurry:
            sock.shutdown(socket.SHUT_WR)
            while sock.recv(4096):
                pass


def _unharmed(server: TCPStoreServer, honest: TCPStore) -> None:
    assert honest.add("honest", 1) == honest.add("honest", 1) - 1
    with TCPStore("127.0.0.1", server.port, SECRET, timeout=30) as newcomer:
        assert newcomer.check(["honest"])


def test_garbage_instead_of_a_handshake(server: TCPStoreServer, honest: TCPStore, fed: list[int]) -> None:
    @fuzz
    @given(st.lists(st.binary(max_size=40), min_size=PIECES, max_size=PIECES))
    def feed(pieces: list[bytes]) -> None:
        for number, piece in enumerate(pieces):
            _feed(server, piece * (1 + number % 8), hurry=number % 2 == 0)
        fed.append(len(pieces))
        _unharmed(server, honest)

    feed()


def test_a_handshake_that_went_wrong(server: TCPStoreServer, honest: TCPStore, fed: list[int]) -> None:
    @fuzz
    @given(st.lists(st.tuples(_changes, st.binary(max_size=40)), min_size=PIECES, max_size=PIECES))
    def feed(pieces: list[tuple[list[tuple[int, int]], bytes]]) -> None:
        for changes, rest in pieces:
            _feed(server, _changed(_greeting, changes) + rest, hurry=True)
        fed.append(len(pieces))
        _unharmed(server, honest)

    feed()


def test_garbage_after_the_handshake(server: TCPStoreServer, honest: TCPStore, fed: list[int]) -> None:
    """An authenticated client that is broken: frames of noise, changed requests, changed lengths."""
    message = st.tuples(st.sampled_from(_valid), _changes).map(lambda each: _changed(*each))
    frame = st.one_of(
        st.binary(max_size=40),
        st.binary(max_size=40).map(lambda noise: frame_header(len(noise)) + noise),
        message.map(lambda each: frame_header(len(each)) + each),
        st.tuples(message, _changes).map(
            lambda each: _changed(frame_header(len(each[0])) + each[0], each[1])
        ),
    )

    @fuzz
    @given(st.lists(frame, min_size=PIECES, max_size=PIECES))
    def feed(frames: list[bytes]) -> None:
        connection = _authenticated(server)
        for number, piece in enumerate(frames):
            try:
                connection.write(piece, Deadline(30))
                if number % 5 == 0:
                    connection.recv(0)
            except WireError:
                connection.close()
                connection = _authenticated(server)
        connection.close()
        fed.append(len(frames))
        _unharmed(server, honest)

    feed()


def _authenticated(server: TCPStoreServer) -> Connection:
    return connect("127.0.0.1", server.port, secret=SECRET, purpose=PURPOSE, timeout=30)
