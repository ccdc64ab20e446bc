"""Unix sockets and the descriptors that go through them."""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from shoal.errors import AuthenticationError, UsageError, WireError, WireTimeout
from shoal.net import (
    Acceptor,
    Connection,
    Deadline,
    connect_unix,
    listen_unix,
    peer_pid,
    recv_fds,
    send_fds,
)
from tests.support.other_user import as_nobody, needs_root

from .accepting import accept


@pytest.fixture
def name() -> str:
    return f"shoal-test-{uuid.uuid4()}"


@pytest.fixture
def pair(name: str) -> Iterator[tuple[Connection, Connection]]:
    with listen_unix(name) as listener, ThreadPoolExecutor(1) as pool:
        accepting = pool.submit(accept, listener, secret=b"s", purpose="test", timeout=10)
        left = connect_unix(name, secret=b"s", purpose="test", timeout=10)
        right = accepting.result(10)
        with left, right:
            yield left, right


@pytest.fixture
def memory() -> Iterator[int]:
    fd = os.memfd_create("test")
    os.write(fd, b"shared")
    yield fd
    os.close(fd)


def test_messages_and_process_ids_go_both_ways(pair: tuple[Connection, Connection]) -> None:
    left, right = pair
    left.send(b"hello", 1)
    assert right.recv(10) == b"hello"
    assert peer_pid(left) == peer_pid(right) == os.getpid()


def test_descriptors_arrive_between_messages(pair: tuple[Connection, Connection], memory: int) -> None:
    left, right = pair
    left.send(b"before", 1)
    send_fds(left, [memory, memory], 1)
    left.send(b"after", 1)
    assert right.recv(10) == b"before"
    received = recv_fds(right, 2, 10)
    assert right.recv(10) == b"after"
    for fd in received:
        assert os.pread(fd, 10, 0) == b"shared"
        assert not os.get_inheritable(fd)
        os.close(fd)


@pytest.mark.parametrize("expected", [1, 3])
def test_another_number_of_descriptors_is_an_error_and_closes_them(
    pair: tuple[Connection, Connection], memory: int, expected: int
) -> None:
    left, right = pair
    send_fds(left, [memory, memory], 1)
    with pytest.raises(WireError, match=f"expected {expected}"):
        recv_fds(right, expected, 10)


def test_something_else_than_descriptors_is_an_error(pair: tuple[Connection, Connection]) -> None:
    left, right = pair
    left.write(b"no descriptors", Deadline(1))
    with pytest.raises(WireError, match="0 descriptors"):
        recv_fds(right, 1, 10)


def test_waiting_for_descriptors_has_a_deadline(pair: tuple[Connection, Connection]) -> None:
    with pytest.raises(WireTimeout):
        recv_fds(pair[0], 1, 0.01)


def test_a_peer_that_leaves_sends_no_descriptors(pair: tuple[Connection, Connection]) -> None:
    left, right = pair
    left.close()
    with pytest.raises(WireError, match="closed the connection"):
        recv_fds(right, 1, 10)


@pytest.mark.parametrize("count", [0, 254])
def test_the_number_of_descriptors_has_limits(
    pair: tuple[Connection, Connection], memory: int, count: int
) -> None:
    with pytest.raises(UsageError, match="1 to 253"):
        send_fds(pair[0], [memory] * count, 1)


def test_a_name_is_taken_while_somebody_listens(name: str) -> None:
    with listen_unix(name), pytest.raises(WireError, match="Address already in use"):
        listen_unix(name)
    listen_unix(name).close()


def test_nobody_listening_is_an_error_that_names_it(name: str) -> None:
    with pytest.raises(WireError, match=name):
        connect_unix(name, secret=b"", purpose="test", timeout=1)


@pytest.mark.parametrize("bad", ["", "x" * 108])
def test_a_name_that_cannot_be_is_a_usage_error(bad: str) -> None:
    with pytest.raises(UsageError, match="1 to 107 bytes"):
        listen_unix(bad)


@needs_root
def test_another_user_is_refused_though_it_holds_the_secret(name: str) -> None:
    def connect() -> None:
        connect_unix(name, secret=b"s", purpose="test", timeout=10)

    with Acceptor(listen_unix(name), secret=b"s", purpose="test") as acceptor, ThreadPoolExecutor(1) as pool:
        stranger = pool.submit(as_nobody, connect)
        while not stranger.done():
            with pytest.raises(WireTimeout):
                acceptor.accept(0.02)
        assert isinstance(stranger.result(), AuthenticationError)  # it refuses us as well
        assert acceptor.refused == "" or "user 65534" in acceptor.refused
        connecting = pool.submit(connect_unix, name, secret=b"s", purpose="test", timeout=10)
        acceptor.accept(10).close()
        connecting.result(10).close()


@needs_root
def test_a_stranger_of_another_user_that_does_not_look_is_refused_by_the_listener(name: str) -> None:
    def connect() -> bytes:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(30)
            sock.connect(b"\0" + name.encode())
            return sock.recv(1)  # nothing, not even a greeting

    with listen_unix(name) as listener, ThreadPoolExecutor(1) as pool:
        stranger = pool.submit(as_nobody, connect)
        with pytest.raises(AuthenticationError, match="of user 65534 is at the other end"):
            accept(listener, secret=b"s", purpose="test", timeout=10)
        assert stranger.result(30) == b""
