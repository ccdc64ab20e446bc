"""Listening, connecting, accepting, and connections over real sockets."""

from __future__ import annotations

import errno
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from shoal.errors import AuthenticationError, UsageError, WireError, WireTimeout
from shoal.net import Connection, Deadline, connect, frame_header, listen, stream

from .accepting import accept

SECRET = b"secret"


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with listen("127.0.0.1", secret=SECRET) as sock:
        yield sock


def _port(listener: socket.socket) -> int:
    port: int = listener.getsockname()[1]
    return port


class _Background:
    """Runs a function in a thread; ``result()`` gives what it returned or raises what it raised."""

    def __init__(self, fn: Callable[[], Any]) -> None:
        self._fn = fn
        self._value: Any = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._value = self._fn()
        except BaseException as error:
            self._error = error

    def result(self) -> Any:
        self._thread.join(30)
        assert not self._thread.is_alive()
        if self._error is not None:
            raise self._error
        return self._value


def _accept(listener: socket.socket, **changes: Any) -> Connection:
    return accept(listener, **{"secret": SECRET, "purpose": "test", "timeout": 10, **changes})


def _connect(listener: socket.socket, **changes: Any) -> Connection:
    arguments = {"secret": SECRET, "purpose": "test", "timeout": 10, **changes}
    return connect("127.0.0.1", _port(listener), **arguments)


@pytest.fixture
def pair(listener: socket.socket) -> Iterator[tuple[Connection, Connection]]:
    accepting = _Background(lambda: _accept(listener))
    left = _connect(listener)
    right = accepting.result()
    with left, right:
        yield left, right


@pytest.mark.parametrize("size", [0, 1, 2**14, 2**14 + 1, 2**20])
def test_messages_arrive_whole(pair: tuple[Connection, Connection], size: int) -> None:
    left, right = pair
    message = os.urandom(size)
    receiving = _Background(lambda: right.recv(10))
    left.send(message, 10)
    assert receiving.result() == message
    right.send(b"thanks", 10)
    assert left.recv(10) == b"thanks"


def test_descriptors_are_close_on_exec_and_do_not_delay(pair: tuple[Connection, Connection]) -> None:
    for connection in pair:
        assert not os.get_inheritable(connection.fileno())
        assert connection.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_receiving_has_a_deadline_and_can_be_tried_again(pair: tuple[Connection, Connection]) -> None:
    left, right = pair
    frame = frame_header(5) + b"hello"
    left.write(frame[:6], Deadline(10))
    with pytest.raises(WireTimeout, match=r"waited 0.01 s for a message from 127\.0\.0\.1:"):
        right.recv(0.01)
    left.write(frame[6:], Deadline(10))
    assert right.recv(10) == b"hello"


def test_sending_to_a_peer_that_reads_nothing_has_a_deadline_and_closes(
    pair: tuple[Connection, Connection],
) -> None:
    left, _ = pair
    left.limit = 2**26
    with pytest.raises(WireTimeout, match="room to send"):
        left.send(bytes(2**26), 0.05)
    with pytest.raises(WireError, match="is closed"):
        left.send(b"more", 1)


def test_a_message_beyond_the_limit_is_not_sent(pair: tuple[Connection, Connection]) -> None:
    left, right = pair
    left.limit = 10
    with pytest.raises(UsageError, match="11 bytes"):
        left.send(bytes(11), 1)
    left.send(bytes(10), 1)
    assert right.recv(10) == bytes(10)


def test_a_message_beyond_the_limit_is_not_received(pair: tuple[Connection, Connection]) -> None:
    left, right = pair
    right.limit = 10
    left.send(bytes(11), 1)
    with pytest.raises(WireError, match="11 bytes came, at most 10"):
        right.recv(10)


def test_a_peer_that_closes_is_noticed(pair: tuple[Connection, Connection]) -> None:
    left, right = pair
    left.write(frame_header(100) + b"only this", Deadline(1))
    left.close()
    with pytest.raises(WireError, match="closed the connection in the middle of a message"):
        right.recv(10)


def test_shutdown_wakes_a_thread_that_waits(pair: tuple[Connection, Connection]) -> None:
    left, _ = pair
    waiting = _Background(lambda: left.recv(60))
    left.shutdown()
    with pytest.raises(WireError):
        waiting.result()


def test_a_connection_can_be_handed_over_between_frames(pair: tuple[Connection, Connection]) -> None:
    left, right = pair
    left.send(b"first", 1)
    left.write(b"not a frame", Deadline(1))
    assert right.recv(10) == b"first"
    with socket.socket(fileno=right.detach()) as sock:
        sock.setblocking(True)
        assert sock.recv(11, socket.MSG_WAITALL) == b"not a frame"
    assert right.fileno() == -1
    with pytest.raises(WireError, match="is closed"):
        right.recv(1)


def test_a_connection_is_not_handed_over_within_a_frame(pair: tuple[Connection, Connection]) -> None:
    left, right = pair
    left.write(frame_header(5) + b"he", Deadline(1))
    with pytest.raises(WireTimeout):
        right.recv(0.01)
    with pytest.raises(WireError, match="part of a frame"):
        right.detach()


@pytest.mark.parametrize(
    ("changes", "error"),
    [({"secret": b"other"}, AuthenticationError), ({"purpose": "other"}, WireError)],
)
def test_both_sides_refuse_a_stranger_and_the_listener_goes_on(
    listener: socket.socket, changes: dict[str, Any], error: type[Exception]
) -> None:
    accepting = _Background(lambda: _accept(listener))
    with pytest.raises(error):
        _connect(listener, **changes)
    with pytest.raises(error):
        accepting.result()
    accepting = _Background(lambda: _accept(listener))
    _connect(listener).close()
    accepting.result().close()


@pytest.mark.parametrize("data", [b"", b"GET / HTTP/1.1\r\n\r\n", os.urandom(1000)])
def test_a_client_that_speaks_something_else_is_dropped(listener: socket.socket, data: bytes) -> None:
    with socket.create_connection(("127.0.0.1", _port(listener))) as stranger:
        stranger.sendall(data)
        stranger.shutdown(socket.SHUT_WR)
        with pytest.raises(WireError):
            _accept(listener)


def test_a_client_that_stays_silent_is_dropped_at_the_deadline(listener: socket.socket) -> None:
    with socket.create_connection(("127.0.0.1", _port(listener))) as stranger:
        with pytest.raises(WireTimeout):
            _accept(listener, timeout=0.05)
        stranger.settimeout(10)
        while stranger.recv(1000):
            pass


def test_a_server_that_stays_silent_is_given_up_at_the_deadline(listener: socket.socket) -> None:
    with pytest.raises(WireTimeout):
        _connect(listener, timeout=0.05)


def test_nobody_connecting_is_a_timeout(listener: socket.socket) -> None:
    with pytest.raises(WireTimeout, match="nobody connected within 0 s"):
        _accept(listener, timeout=0)


def test_nobody_listening_is_an_error_that_names_the_address(listener: socket.socket) -> None:
    port = _port(listener)
    listener.close()
    with pytest.raises(WireError, match=rf"127\.0\.0\.1:{port}: Connection refused") as caught:
        connect("127.0.0.1", port, secret=b"", purpose="test", timeout=5)
    assert isinstance(caught.value.__cause__, ConnectionRefusedError)


def test_a_host_that_does_not_exist_is_an_error_that_names_it() -> None:
    with pytest.raises(WireError, match="'no such host'"):
        connect("no such host", 1, secret=b"", purpose="test", timeout=5)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", ""])
def test_listening_beyond_loopback_needs_a_secret(host: str) -> None:
    with pytest.raises(UsageError, match="SHOAL_SECRET"):
        listen(host)


def test_listening_on_every_interface_works_with_a_secret() -> None:
    with listen("0.0.0.0", secret=SECRET) as listener:
        accepting = _Background(lambda: _accept(listener))
        _connect(listener).close()
        accepting.result().close()


def test_listening_on_every_interface_needs_no_secret_for_everybody() -> None:
    with listen("0.0.0.0", public=True) as listener:
        assert listener.getsockname()[0] == "0.0.0.0"


def test_loopback_needs_no_secret() -> None:
    with listen("localhost") as listener:
        accepting = _Background(lambda: _accept(listener, secret=b""))
        _connect(listener, secret=b"").close()
        accepting.result().close()


def test_a_port_in_use_is_an_error_that_names_it(listener: socket.socket) -> None:
    with pytest.raises(WireError, match=rf"127\.0\.0\.1:{_port(listener)}: Address already in use"):
        listen("127.0.0.1", _port(listener))


def test_a_port_that_cannot_be_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="70000"):
        listen("127.0.0.1", 70000)


@pytest.mark.parametrize("timeout", [-1.0, float("nan")])
def test_a_timeout_that_makes_no_sense_is_a_usage_error(timeout: float) -> None:
    with pytest.raises(UsageError, match="timeout="):
        Deadline(timeout)


def test_a_timeout_without_end_is_a_long_one() -> None:
    assert 10**9 < Deadline(float("inf")).milliseconds() < 2**31
    assert Deadline(0).expired
    assert Deadline(0.0001).milliseconds() <= 1
    assert Deadline(5).at > time.monotonic()


def test_a_forked_child_has_none_of_the_sockets(
    listener: socket.socket, pair: tuple[Connection, Connection]
) -> None:
    left, right = pair
    child = os.fork()
    if child == 0:
        closed = [listener.fileno(), left.fileno(), right.fileno()] == [-1, -1, -1]
        os._exit(0 if closed else 1)
    assert os.waitpid(child, 0)[1] == 0
    left.send(b"still here", 1)
    assert right.recv(10) == b"still here"


def test_a_connection_that_is_reset_before_the_greeting_is_an_error_in_words(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Reset(stream.SocketStream):
        def __init__(self, sock: socket.socket) -> None:
            super().__init__(sock)
            self.send = self._reset

        def _reset(self, data: object) -> int:
            raise ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))

    monkeypatch.setattr(stream, "SocketStream", Reset)
    with pytest.raises(
        WireError, match=r"lost the connection to 127\.0\.0\.1:\d+: Connection reset"
    ) as raised:
        _connect(listener)
    assert isinstance(raised.value.__cause__, ConnectionResetError)
