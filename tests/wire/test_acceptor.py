"""Accepting among strangers."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from shoal.errors import AuthenticationError, WireTimeout
from shoal.wire import Acceptor, Connection, connect, listen

SECRET = b"secret"


@pytest.fixture
def acceptor() -> Iterator[Acceptor]:
    with Acceptor(listen("127.0.0.1", secret=SECRET), secret=SECRET, purpose="test") as acceptor:
        yield acceptor


def _port(acceptor: Acceptor) -> int:
    port: int = acceptor._listener.getsockname()[1]
    return port


def _connect(acceptor: Acceptor, secret: bytes = SECRET) -> Connection:
    return connect("127.0.0.1", _port(acceptor), secret=secret, purpose="test", timeout=30)


def test_a_silent_stranger_delays_nobody(acceptor: Acceptor) -> None:
    silent = [socket.create_connection(("127.0.0.1", _port(acceptor))) for _ in range(5)]
    with ThreadPoolExecutor(3) as pool:
        connecting = [pool.submit(_connect, acceptor) for _ in range(3)]
        accepted = [acceptor.accept(30) for _ in range(3)]
        for connection in accepted:
            connection.send(b"welcome", 1)
        connected = [each.result(30) for each in connecting]
    assert [connection.recv(30) for connection in connected] == [b"welcome"] * 3
    for each in (*silent, *accepted, *connected):
        each.close()


def test_strangers_that_fail_are_passed_over(acceptor: Acceptor) -> None:
    with ThreadPoolExecutor(1) as pool:
        for noise in (b"", b"x", os.urandom(1000)):
            with socket.create_connection(("127.0.0.1", _port(acceptor))) as stranger:
                stranger.sendall(noise)

        def wrong_then_right() -> Connection:
            with pytest.raises(AuthenticationError):
                _connect(acceptor, b"wrong")
            return _connect(acceptor)

        connecting = pool.submit(wrong_then_right)
        acceptor.accept(30).close()
        connecting.result(30).close()


def test_a_timeout_says_why_the_last_stranger_was_refused(acceptor: Acceptor) -> None:
    with pytest.raises(WireTimeout, match=r"nobody connected within 0.01 s$"):
        acceptor.accept(0.01)
    with ThreadPoolExecutor(1) as pool:
        connecting = pool.submit(_connect, acceptor, b"wrong")
        while not connecting.done():
            with contextlib.suppress(WireTimeout):
                acceptor.accept(0.05)
        with pytest.raises(WireTimeout, match=r"refused: .*secret"):
            acceptor.accept(0)
        with pytest.raises(AuthenticationError):
            connecting.result(30)


def test_a_stranger_that_stays_silent_is_dropped() -> None:
    listener = listen("127.0.0.1", secret=SECRET)
    with (
        Acceptor(listener, secret=SECRET, purpose="test", handshake_timeout=0.01) as acceptor,
        socket.create_connection(("127.0.0.1", _port(acceptor)), timeout=30) as silent,
    ):
        with pytest.raises(WireTimeout, match="refused: it stayed silent"):
            acceptor.accept(0.5)
        while silent.recv(1000):
            pass


def test_closing_drops_those_that_were_not_given_out() -> None:
    acceptor = Acceptor(listen("127.0.0.1", secret=SECRET), secret=SECRET, purpose="test")
    silent = socket.create_connection(("127.0.0.1", _port(acceptor)), timeout=30)
    with pytest.raises(WireTimeout):
        acceptor.accept(0.01)
    acceptor.close()
    with silent:
        while silent.recv(1000):
            pass
