"""The TCP store: its server, its clients, and what either does when the other misbehaves."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import resource
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import shoal
from shoal.errors import (
    AuthenticationError,
    OutOfResources,
    StoreError,
    StoreTimeout,
    UsageError,
    WireError,
)
from shoal.net import Connection, Deadline, Server, connect, frame_header, listen
from shoal.store import MAX_VALUE, Store, TCPStore, TCPStoreServer, open_store, serve
from shoal.store.requests import Get, Set, Wait, encode
from shoal.store.tcp import server as tcp_server
from shoal.store.tcp.protocol import MAX_MESSAGE, PURPOSE, Status, decode_reply, decode_welcome, encode_reply
from shoal.testing import faults
from tests.support.ports import free_port
from tests.support.waiting import until

from .conformance import StoreConformance, in_background

SECRET = b"secret"
ENVIRON = {**os.environ, "PYTHONPATH": str(Path(shoal.__file__).parent.parent)}


@pytest.fixture
def server() -> Iterator[TCPStoreServer]:
    with TCPStoreServer(secret=SECRET, handshake_timeout=60) as server:
        yield server


def _client(server: TCPStoreServer, timeout: float = 30) -> TCPStore:
    return TCPStore("127.0.0.1", server.port, SECRET, timeout=timeout)


def _connection(server: TCPStoreServer) -> Connection:
    connection = connect(
        "127.0.0.1", server.port, secret=SECRET, purpose=PURPOSE, timeout=30, limit=MAX_MESSAGE
    )
    decode_welcome(connection.recv(30))
    return connection


class TestTCPStore(StoreConformance):
    @pytest.fixture
    def store(self, server: TCPStoreServer) -> Iterator[Store]:
        with _client(server) as store:
            yield store


@contextlib.contextmanager
def _server_process(prelude: str = "") -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A server in a process of its own, and its port."""
    code = (
        f"{prelude}\nfrom shoal.store import serve\n"
        f"serve('127.0.0.1:0', secret={SECRET!r}, announce=lambda url: print(url, flush=True))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], env=ENVIRON, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            yield process, int(process.stdout.readline().rpartition(":")[2])
        finally:
            process.kill()


def test_records_are_there_from_the_beginning() -> None:
    with TCPStoreServer(secret=SECRET, records={"size": b"4"}) as server, _client(server) as store:
        assert store.get("size", 0) == b"4"
        assert server.address == f"127.0.0.1:{server.port}"
        assert server.url == f"tcp://127.0.0.1:{server.port}"


def test_a_server_that_was_never_started_can_be_closed() -> None:
    server = TCPStoreServer()
    server.close()
    server.close()


def test_a_server_needs_a_secret_beyond_loopback() -> None:
    with pytest.raises(UsageError, match="SHOAL_SECRET"):
        TCPStoreServer("0.0.0.0")


def test_a_port_can_be_used_again_at_once() -> None:
    with TCPStoreServer(secret=SECRET) as server, _client(server) as store:
        store.set("key", b"value")
    with TCPStoreServer("127.0.0.1", server.port, SECRET) as again, _client(again) as store:
        assert not store.check(["key"])


def test_a_client_without_the_secret_is_refused_at_once(server: TCPStoreServer) -> None:
    for secret in (b"", b"wrong"):
        with pytest.raises(AuthenticationError, match=f"127.0.0.1:{server.port}"):
            TCPStore("127.0.0.1", server.port, secret, timeout=60)
    with _client(server) as store:
        store.set("key", b"value")


def test_a_secret_may_be_text() -> None:
    with TCPStoreServer(secret=SECRET.decode()) as server:
        with TCPStore("127.0.0.1", server.port, SECRET.decode(), timeout=60) as store:
            store.set("key", b"value")
        with open_store(server.url, secret=SECRET.decode(), timeout=60) as store:
            assert store.get("key") == b"value"
        with pytest.raises(UsageError, match="secret: expected str or bytes, not int"):
            TCPStore("127.0.0.1", server.port, 7)  # type: ignore[arg-type]


def test_a_server_may_start_after_its_clients() -> None:
    port = free_port()
    with in_background() as call:
        opening = call(TCPStore, "127.0.0.1", port, SECRET, timeout=30)
        with TCPStoreServer("127.0.0.1", port, SECRET), opening.result(30) as store:
            assert store.num_keys() == 0


def test_no_server_at_all_is_a_timeout_that_names_the_address() -> None:
    port = free_port()
    with pytest.raises(StoreTimeout, match=rf"no store at 127\.0\.0\.1:{port} within 0.05 s.*refused"):
        TCPStore("127.0.0.1", port, SECRET, timeout=0.05)


def test_a_client_that_does_not_wait_for_a_server_has_an_error_at_once() -> None:
    port = free_port()
    with pytest.raises(StoreError, match=rf"^no store at 127\.0\.0\.1:{port}: .*refused") as caught:
        TCPStore("127.0.0.1", port, SECRET, timeout=60, wait_for_server=False)
    assert not isinstance(caught.value, StoreTimeout)
    with TCPStoreServer(secret=SECRET) as server:
        TCPStore("127.0.0.1", server.port, SECRET, wait_for_server=False).close()


def test_something_else_on_the_port_is_an_error_at_once() -> None:
    with listen("127.0.0.1") as listener, in_background() as call:

        def impostor() -> None:
            sock, _ = listener.accept()
            with sock:
                sock.sendall(b"HTTP/1.1 400 Bad Request\r\n".ljust(1000))
                sock.recv(1000)

        answering = call(impostor)
        with pytest.raises(WireError, match="does not speak"):
            TCPStore("127.0.0.1", listener.getsockname()[1], SECRET, timeout=60)
        answering.result(30)


def test_a_first_connection_that_is_dropped_is_tried_again() -> None:
    """A server drops the strangers that came first where too many come at once."""
    with listen("127.0.0.1") as listener, in_background() as call:
        port = listener.getsockname()[1]
        opening = call(TCPStore, "127.0.0.1", port, SECRET, timeout=60)
        for _ in range(2):
            listener.accept()[0].close()
        listener.close()
        with TCPStoreServer("127.0.0.1", port, SECRET), opening.result(30) as store:
            assert store.num_keys() == 0


def test_a_killed_server_is_noticed_by_all_that_wait_and_named() -> None:
    with _server_process() as (process, port), in_background() as call:
        store = TCPStore("127.0.0.1", port, SECRET, timeout=120)
        store.set("key", b"value")
        waiting = [call(store.get, f"key-{i}") for i in range(4)]
        process.kill()
        for each in waiting:
            with pytest.raises(StoreError, match=rf"lost the store at 127\.0\.0\.1:{port}"):
                each.result(30)
        with pytest.raises(StoreError, match=rf"lost the store at 127\.0\.0\.1:{port}"):
            store.set("key", b"value")
        store.close()


def test_a_server_that_closes_is_noticed(server: TCPStoreServer) -> None:
    with _client(server, timeout=120) as store, in_background() as call:
        waiting = call(store.get, "key")
        server.close()
        with pytest.raises(StoreError, match="lost the store"):
            waiting.result(30)


def test_a_stopped_server_costs_no_more_than_the_deadline() -> None:
    with _server_process() as (process, port), TCPStore("127.0.0.1", port, SECRET) as store:
        faults.stop(process.pid)
        with pytest.raises(StoreTimeout, match=r"'key' \(as far as known.*did not answer"):
            store.get("key", 0.01)


def test_a_closed_client_leaves_no_waiter_behind(server: TCPStoreServer) -> None:
    with _client(server) as store, in_background() as call:
        other = store.clone()
        waiting = call(other.get, "key", 60)
        until(lambda: len(server._waiting) == 1)
        other.close()
        with pytest.raises(StoreError):
            waiting.result(30)
        until(lambda: len(server._waiting) == 0)
        store.set("key", b"value")


def test_a_waiter_that_times_out_leaves_nothing_behind(server: TCPStoreServer) -> None:
    with _client(server) as store:
        with pytest.raises(StoreTimeout):
            store.get("key", 0.01)
        assert len(server._waiting) == 0
        store.set("key", b"value")
        assert store.get("key") == b"value"


def test_a_half_open_client_is_dropped_and_the_others_go_on() -> None:
    with TCPStoreServer(secret=SECRET) as server, _client(server) as store:
        server._handshake_timeout = 0.05
        with socket.create_connection(("127.0.0.1", server.port), timeout=30) as silent:
            while silent.recv(1000):
                store.set("key", b"served meanwhile")
        assert store.get("key") == b"served meanwhile"


@pytest.mark.parametrize(
    "data",
    [
        frame_header(MAX_MESSAGE + 1),
        frame_header(2**32 - 1),
        frame_header(0),
        frame_header(5) + b"\xc1" * 5,
        frame_header(1) + b"\x90",
        frame_header(3) + encode(Wait([], 1.0))[:3],
        frame_header(len(encode(Wait([], 1.0)))) + encode(Wait([], 1.0))[::-1],
        frame_header(len(encode(Get(["k"], float("nan"))))) + encode(Get(["k"], float("nan"))),
    ],
)
def test_a_client_that_sends_nonsense_is_dropped_and_the_others_go_on(
    server: TCPStoreServer, data: bytes
) -> None:
    with _connection(server) as bad, _client(server) as store:
        store.set("key", b"value")
        bad.write(data, Deadline(10))
        with pytest.raises(WireError):
            bad.recv(30)
        assert store.get("key") == b"value"


def test_a_client_that_does_not_wait_for_its_answer_is_dropped(server: TCPStoreServer) -> None:
    with _connection(server) as hasty, _client(server) as store:
        hasty.send(encode(Wait(["key"], 60.0)), 10)
        until(lambda: len(server._waiting) == 1)
        hasty.send(encode(Wait(["key"], 60.0)), 10)
        with pytest.raises(WireError):
            hasty.recv(30)
        assert len(server._waiting) == 0
        assert store.num_keys() == 0


def test_who_waits_sees_all_that_is_done_together(server: TCPStoreServer) -> None:
    with _client(server) as store, in_background() as call:
        waiting = call(store.multi_get, ["a", "b"], 30)
        until(lambda: len(server._waiting) == 1)
        store.together([Set("a", b"1"), Set("b", b"2"), Set("a", b"3")])
        assert waiting.result(30) == [b"3", b"2"]


def test_a_deadline_without_end_does_not_stop_the_server(server: TCPStoreServer) -> None:
    with _connection(server) as patient, _client(server) as store:
        patient.send(encode(Wait(["key"], float("inf"))), 10)
        until(lambda: len(server._waiting) == 1)
        store.set("key", b"value")
        assert patient.recv(30)


def test_a_client_that_reads_nothing_holds_up_nobody(server: TCPStoreServer) -> None:
    with _connection(server) as slow, _client(server) as store:
        store.set("large", bytes(MAX_VALUE))
        slow.send(encode(Get(["large"], 1.0)), 10)
        for _ in range(100):
            store.add("counter", 1)
        assert len(slow.recv(60)) > MAX_VALUE
        assert store.get("counter") == b"100"


def test_a_client_that_leaves_in_the_middle_of_a_large_value_is_dropped(server: TCPStoreServer) -> None:
    with _client(server) as store:
        with _connection(server) as leaving:
            leaving.write(frame_header(MAX_VALUE) + b"x" * 100_000, Deadline(30))
        assert store.num_keys() == 0
        until(lambda: len(server._clients) == 1)


def test_an_error_inside_the_server_costs_one_client(
    server: TCPStoreServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(_: object, __: object) -> None:
        raise ZeroDivisionError

    with _client(server) as store, _client(server) as other, caplog.at_level(logging.CRITICAL + 1):
        monkeypatch.setattr(Wait, "apply", broken)
        with pytest.raises(StoreError, match="the store failed at the request: ZeroDivisionError"):
            store.wait([])
        assert other.num_keys() == 0


def test_fifteen_hundred_clients_wait_at_once(server: TCPStoreServer) -> None:
    clients = 1500
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 4 * clients:
        pytest.skip(f"this machine allows {hard} descriptors")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 4 * clients), hard))
    try:
        with contextlib.ExitStack() as stack:
            connections = [stack.enter_context(_connection(server)) for _ in range(clients)]
            for connection in connections:
                connection.send(encode(Get(["start"], 60.0)), 10)
            with _client(server) as store:
                until(lambda: len(server._waiting) == clients)
                store.set("start", b"now")
            assert {connection.recv(60) for connection in connections} == {b"\0\x91\xc4\x03now"}
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_who_brings_a_key_is_answered_before_those_who_wait_and_they_in_turn_with_others(
    server: TCPStoreServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[object] = []
    send, send_queued = tcp_server._StoreClient.send, Server._send_queued

    def noted(session: tcp_server._StoreClient, message: bytes) -> None:
        sent.append(session)
        send(session, message)

    def next_turn(server: TCPStoreServer) -> None:
        sent.append("turn")
        send_queued(server)

    with contextlib.ExitStack() as stack:
        waiting = [stack.enter_context(_connection(server)) for _ in range(5)]
        for connection in waiting:
            connection.send(encode(Get(["start"], 60.0)), 10)
        until(lambda: len(server._waiting) == 5)
        waiters = set(server._clients.values())
        writer = stack.enter_context(_client(server))
        monkeypatch.setattr("shoal.net.server._MAX_ANSWERS_PER_TURN", 2)
        monkeypatch.setattr(tcp_server._StoreClient, "send", noted)
        monkeypatch.setattr(Server, "_send_queued", next_turn)
        writer.set("start", b"now")
        assert [connection.recv(60) for connection in waiting] == [b"\0\x91\xc4\x03now"] * 5
    order = ["waiter" if each in waiters else each if each == "turn" else "writer" for each in sent]
    assert order[order.index("writer") :][:8] == [
        "writer",
        "turn",
        *["waiter"] * 2,
        "turn",
        *["waiter"] * 2,
        "turn",
    ]


def test_the_same_answer_to_many_is_encoded_once(
    server: TCPStoreServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded = []

    def counted(status: Status, body: object) -> bytearray:
        encoded.append(body)
        return encode_reply(status, body)

    with contextlib.ExitStack() as stack:
        asked = [
            Get(["a"], 60.0),
            Get(["a", "b"], 50.0),
            Wait(["a"], 40.0),
            Get(["a"], 30.0),
            Wait(["a"], 20.0),
        ]
        connections = [stack.enter_context(_connection(server)) for _ in asked]
        with _client(server) as store:
            store.set("b", b"2")
            for connection, request in zip(connections, asked, strict=True):
                connection.send(encode(request), 10)
            until(lambda: len(server._waiting) == len(asked))
            monkeypatch.setattr(tcp_server, "encode_reply", counted)
            store.set("a", b"1")
            answers = zip(asked, connections, strict=True)
            replies = [decode_reply(request, each.recv(60), 1.0) for request, each in answers]
    assert replies == [[b"1"], [b"1", b"2"], None, [b"1"], None]
    assert len(encoded) == 1 + 3  # that of the one who set it, and one each of the three requests


def test_a_server_without_descriptors_serves_those_it_has_and_takes_others_later() -> None:
    # The soft limit is raised at the start; at the hard one clients wait for others to leave.
    limits = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (30, 50))"
    with _server_process(limits) as (_, port), TCPStore("127.0.0.1", port, SECRET, timeout=30) as store:
        with contextlib.ExitStack() as stack:
            for _ in range(60):
                stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=30))
            assert store.add("counter", 1) == 1
        with store.clone() as other:
            assert other.add("counter", 1) == 2


def test_of_too_many_strangers_the_oldest_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.net.server._MAX_UNAUTHENTICATED", 8)
    with TCPStoreServer(secret=SECRET) as server, _client(server) as store, contextlib.ExitStack() as stack:
        strangers = [
            stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=30))
            for _ in range(50)
        ]
        for stranger in strangers[:42]:
            while stranger.recv(1000):
                pass  # its end
        assert server.clients <= 8 + store.connections
        with _client(server) as other:  # the newest is the last to be dropped
            assert other.add("counter", 1) == 1


def test_a_store_can_be_hosted_in_the_foreground() -> None:
    stop, urls = threading.Event(), list[str]()
    announced = threading.Event()

    def announce(url: str) -> None:
        urls.append(url)
        announced.set()

    with in_background() as call:
        serving = call(
            serve, "127.0.0.1:0", secret=SECRET, records={"size": b"2"}, announce=announce, stop=stop
        )
        assert announced.wait(30)
        with TCPStore("127.0.0.1", int(urls[0].rpartition(":")[2]), SECRET, timeout=30) as store:
            assert store.get("size", 0) == b"2"
        stop.set()
        serving.result(30)


def test_a_server_without_a_thread_says_so_and_keeps_no_port(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    server = TCPStoreServer(secret=SECRET)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with pytest.raises(OutOfResources, match=r"cannot serve a store: .*ulimit -u"):
            server.start()
    server.close()
    listen("127.0.0.1", server.port, secret=SECRET).close()


@pytest.mark.parametrize("refused", ["socket.socketpair", "select.epoll"])
def test_a_server_without_descriptors_says_so_and_leaves_none_open(
    refused: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    before = os.listdir("/proc/self/fd")
    with monkeypatch.context() as patched:
        patched.setattr(refused, refuse)
        with pytest.raises(OutOfResources, match=r"cannot serve a store: Too many open files.*ulimit -n"):
            TCPStoreServer(secret=SECRET)
    assert os.listdir("/proc/self/fd") == before
