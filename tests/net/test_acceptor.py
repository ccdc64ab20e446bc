"""Accepting among strangers."""

from __future__ import annotations

import contextlib
import itertools
import os
import resource
import select
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from shoal.errors import AuthenticationError, WireError, WireTimeout
from shoal.net import Acceptor, Connection, Deadline, connect, listen
from shoal.net.authentication import authenticate
from shoal.net.connection import DEFAULT_LIMIT
from shoal.net.handshake import Handshake
from shoal.testing import no_leaks

from .acceptors import SECRET, acceptor, port

__all__ = ["acceptor"]  # a fixture


def _connect(acceptor: Acceptor, secret: bytes = SECRET) -> Connection:
    return connect("127.0.0.1", port(acceptor), secret=secret, purpose="test", timeout=30)


def test_a_silent_stranger_delays_nobody(acceptor: Acceptor) -> None:
    silent = [socket.create_connection(("127.0.0.1", port(acceptor))) for _ in range(5)]
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
            with socket.create_connection(("127.0.0.1", port(acceptor))) as stranger:
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
        socket.create_connection(("127.0.0.1", port(acceptor)), timeout=30) as silent,
    ):
        while not acceptor.refused:
            with contextlib.suppress(WireTimeout):
                acceptor.accept(0.05)
        with pytest.raises(WireTimeout, match="refused: it stayed silent"):
            acceptor.accept(0)
        while silent.recv(1000):
            pass


def test_closing_drops_those_that_were_not_given_out() -> None:
    acceptor = Acceptor(listen("127.0.0.1", secret=SECRET), secret=SECRET, purpose="test")
    silent = socket.create_connection(("127.0.0.1", port(acceptor)), timeout=30)
    with pytest.raises(WireTimeout):
        acceptor.accept(0.01)
    acceptor.close()
    with silent:
        while silent.recv(1000):
            pass


def test_of_too_many_strangers_the_oldest_are_dropped() -> None:
    listener = listen("127.0.0.1", secret=SECRET)
    with (
        Acceptor(listener, secret=SECRET, purpose="test", most_pending=4) as acceptor,
        contextlib.ExitStack() as stack,
        ThreadPoolExecutor(1) as pool,
    ):
        silent = [
            stack.enter_context(socket.create_connection(("127.0.0.1", port(acceptor)), timeout=30))
            for _ in range(20)
        ]
        before = len(os.listdir("/proc/self/fd"))
        while select.select([listener], [], [], 0)[0]:
            with contextlib.suppress(WireTimeout):
                acceptor.accept(0.05)
        with pytest.raises(WireTimeout, match="too many others connected"):
            acceptor.accept(0)
        assert len(os.listdir("/proc/self/fd")) <= before + 4
        for stranger in silent[:16]:
            while stranger.recv(1000):
                pass  # its end
        connecting = pool.submit(_connect, acceptor)
        acceptor.accept(30).close()
        connecting.result(30).close()


def test_strangers_that_hold_all_descriptors_are_dropped(acceptor: Acceptor) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(1) as pool:
        strangers = [
            stack.enter_context(socket.create_connection(("127.0.0.1", port(acceptor)))) for _ in range(9)
        ]
        honest = stack.enter_context(socket.create_connection(("127.0.0.1", port(acceptor))))
        used = max(map(int, os.listdir("/proc/self/fd")))
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + 4, hard))
        try:
            connection = pool.submit(authenticate, honest, True, SECRET, "test", Deadline(30), DEFAULT_LIMIT)
            acceptor.accept(30).close()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        connection.result(30).close()
        assert len(strangers) == 9


def test_a_stranger_that_says_a_byte_at_a_time_has_one_deadline_for_all() -> None:
    greeting = Handshake(connecting=True, secret=b"guess", purpose="test").greeting
    listener = listen("127.0.0.1", secret=SECRET)
    with (
        Acceptor(listener, secret=SECRET, purpose="test", handshake_timeout=0.05) as acceptor,
        socket.create_connection(("127.0.0.1", port(acceptor)), timeout=30) as slow,
    ):
        deadline = Deadline(30)
        with contextlib.suppress(OSError):  # the end that this test waits for
            for byte in itertools.cycle(greeting):
                slow.send(bytes([byte]))
                with contextlib.suppress(WireTimeout):
                    acceptor.accept(0.01)
                assert not deadline.expired
        assert acceptor.refused


def test_an_acceptor_is_stopped_while_a_thread_waits_in_it() -> None:
    with no_leaks(), Acceptor(listen("127.0.0.1"), secret=b"", purpose="test") as acceptor:
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(acceptor.accept, 60)
            acceptor.stop()
            with pytest.raises(WireError, match="the acceptor has been stopped"):
                waiting.result(30)
        with pytest.raises(WireError, match="the acceptor has been stopped"):
            acceptor.accept(60)
