"""Servers of Redis that refuse, lag, lie, or are several."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from shoal.errors import StoreError, StoreTimeout
from shoal.store.redis import connection as redis_link
from shoal.store.redis.store import RedisStore
from shoal.store.requests import Add, Delete, Set
from tests.support.ports import free_port
from tests.support.redis_server import RedisServer, needs_redis
from tests.support.waiting import until

from .conformance import in_background

pytestmark = [needs_redis, pytest.mark.filterwarnings("ignore:Redis at .* may lose changes")]


def test_a_full_memory_is_named_and_nothing_is_done(tmp_path: Path) -> None:
    with RedisServer(tmp_path) as server, RedisStore(server.address, timeout=60) as store:
        store.multi_set(["key", "large"], [b"value", bytes(2**23)])
        server.ask("CONFIG", "SET", "maxmemory", "4mb")
        for change in (
            lambda: store.multi_set(["key", "other"], [b"new", b"new"]),
            lambda: store.append("key", b"more"),
            lambda: store.add("counter", 1),
            lambda: store.compare_set("key", "value", "new"),
            lambda: store.together([Add("counter", 1), Set("key", b"new")]),
        ):
            with pytest.raises(StoreError, match=r"Redis at 127.*memory is full.*maxmemory"):
                change()
        assert store.multi_get(["key", "large"]) == [b"value", bytes(2**23)]
        assert store.list_keys() == ["key", "large"]
        assert store._backing.job._keep_alive(store._deadline(60))
        assert store.delete("large")  # which needs no memory
        server.ask("CONFIG", "SET", "maxmemory", "100mb")
        assert store.add("counter", 1) == 1


def test_a_replica_is_named(tmp_path: Path) -> None:
    with RedisServer(tmp_path / "primary") as primary:
        host, port = primary.address.split(":")
        options = ["--replicaof", f"{host} {port}"]
        with (
            RedisServer(tmp_path / "replica", *options) as replica,
            RedisStore(primary.address, timeout=60) as store,
        ):
            with pytest.raises(StoreError, match="is a read-only replica: name its primary"):
                RedisStore(replica.address, timeout=60)
            store.set("key", b"value")
            primary.ask("REPLICAOF", "127.0.0.1", str(replica.port))
            with pytest.raises(StoreError, match="is a read-only replica"):
                store.set("key", b"new")
            primary.ask("REPLICAOF", "NO", "ONE")
            until(lambda: primary.ask("ROLE")[0] == b"master")


def test_replicas_are_a_reason_to_warn(tmp_path: Path) -> None:
    with RedisServer(tmp_path / "primary") as primary:
        options = ["--replicaof", primary.address.replace(":", " "), "--repl-diskless-sync-delay", "0"]
        with RedisServer(tmp_path / "replica", *options):
            until(lambda: primary.ask("INFO", "replication")["connected_slaves"] == 1)
            with pytest.warns(UserWarning, match=r"its replicas \(1\) receive changes after the answer"):
                RedisStore(primary.address, timeout=60).close()


def test_an_unknown_database_is_named(tmp_path: Path) -> None:
    with RedisServer(tmp_path) as server, pytest.raises(StoreError, match="DB index is out of range"):
        RedisStore(server.address, database=99, timeout=60)


def test_a_server_without_room_for_connections_is_waited_for(tmp_path: Path) -> None:
    with RedisServer(tmp_path, "--maxclients", "1") as server:

        def admitted() -> socket.socket | None:
            connection = socket.create_connection(("127.0.0.1", server.port), timeout=60)
            with contextlib.suppress(OSError):
                connection.sendall(b"PING\r\n")
                if connection.recv(16).startswith(b"+"):
                    return connection
            connection.close()
            return None

        held = until(admitted)  # who looked whether the server is there may still have the place
        with held, pytest.raises(StoreTimeout, match="max number of clients reached"):
            RedisStore(server.address, timeout=0.2)
        with RedisStore(server.address, timeout=60) as store:
            store.set("key", b"")


def test_a_key_of_somebody_else_is_an_error_in_words(tmp_path: Path) -> None:
    with RedisServer(tmp_path) as server:
        server.ask("SET", "{shoal:default}", "mine")
        with pytest.raises(StoreError, match="WRONGTYPE"):
            RedisStore(server.address, timeout=60)
        assert server.ask("GET", "{shoal:default}") == b"mine"


# -- servers that lie ----------------------------------------------------------------------------


@contextmanager
def impostor(*answers: bytes) -> Iterator[str]:
    """The address of a server that answers so in turn, to whatever it is sent; the last answer for ever."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        left = [*answers]

        def talk(connection: socket.socket) -> None:
            with connection:
                while connection.recv(2**16):
                    connection.sendall(left[0])
                    if len(left) > 1:
                        left.pop(0)

        def serve() -> None:
            while True:
                try:
                    connection, _ = listening.accept()
                except OSError:
                    return
                threading.Thread(target=talk, args=(connection,), daemon=True).start()

        accepting = threading.Thread(target=serve, daemon=True)
        accepting.start()
        try:
            yield f"127.0.0.1:{listening.getsockname()[1]}"
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            accepting.join(60)


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.0 200 OK\r\n\r\n", b"*2\r\n$4\r\ndone\r\n:5\r\n", b"*0\r\n", b":7\r\n", b"*-1\r\n",
        b"$x\r\n", b"*2\r\n*0\r\n$0\r\n\r\n", b"*1\r\n$6\r\nstolen\r\n", b"\r\n\r\n", b"-MOVED x\r\n",
        b"*1000\r\n" * 1001, b"*3\r\n$4\r\ndone\r\n$1\r\na\r\n$1\r\nb\r\n", b"-MOVED 1 h:99999\r\n",
        b"-MOVED 1 a\0b:1\r\n", b"-\r\n", b"$-7\r\n",
    ],
)  # fmt: skip
def test_what_no_redis_answers_is_an_error_in_words(answer: bytes) -> None:
    with (
        impostor(answer) as address,
        pytest.raises(
            StoreError, match=r"is not Redis|sent an unexpected answer|did not answer within|Redis at "
        ),
    ):
        RedisStore(address, timeout=0.2)


@pytest.mark.parametrize(
    ("operation", "answer"),
    [
        (lambda store: store.get("key", 1), b"*2\r\n$4\r\ndone\r\n*2\r\n$1\r\na\r\n$1\r\nb\r\n"),
        (lambda store: store.get("key", 1), b"*2\r\n$4\r\ndone\r\n*0\r\n"),
        (lambda store: store.check(["key"]), b"*2\r\n$4\r\ndone\r\n*1\r\n:7\r\n"),
        (lambda store: store.check(["key"]), b"*2\r\n$4\r\ndone\r\n*1\r\n:-1\r\n"),
        (lambda store: store.list_keys(), b"*2\r\n$4\r\ndone\r\n*1\r\n$2\r\nk\xff\r\n"),
        (lambda store: store.num_keys(), b"*2\r\n$4\r\ndone\r\n*0\r\n"),
        (lambda store: store.add("key", 1), b"*2\r\n$4\r\ndone\r\n$1\r\nx\r\n"),
        (lambda store: store.add("key", 1), b"*1\r\n$9\r\nunchanged\r\n"),
        (lambda store: store.set("key", b""), b"*1\r\n$4\r\ndone\r\n"),
        (lambda store: store.set("key", b""), b"*1\r\n$4\r\nlate\r\n"),
        (lambda store: store.set("key", b""), b"*1\r\n$9\r\nunchanged\r\n"),
        (lambda store: store.append("key", b""), b"*1\r\n$9\r\nunchanged\r\n"),
        (lambda store: store.delete_prefix("key"), b"*2\r\n$4\r\ndone\r\n$2\r\n-1\r\n"),
        (lambda store: store.together([Add("key", 1)]), b"*2\r\n$4\r\ndone\r\n$0\r\n\r\n"),
        (lambda store: store.together([Add("key", 1)]), b"*2\r\n$4\r\ndone\r\n$8\r\ndone 1 x\r\n"),
        (lambda store: store.together([Add("key", 1)]), b"*2\r\n$4\r\ndone\r\n$9\r\ndone -1 5\r\n"),
        (lambda store: store.together([Delete("key")]), b"*2\r\n$4\r\ndone\r\n$7\r\nheld 0 \r\n"),
    ],
)
def test_an_answer_that_does_not_fit_the_question_is_an_error_in_words(
    operation: Callable[[RedisStore], object], answer: bytes
) -> None:
    life = b"*2\r\n$4\r\ndone\r\n$1\r\nx\r\n"
    with (
        impostor(life, answer) as address,
        RedisStore(address, timeout=1) as store,
        pytest.raises(StoreError, match="sent an unexpected answer"),
    ):
        operation(store)


@pytest.mark.parametrize(
    "text", ["LOADING Redis is loading the dataset in memory", "BUSY Redis is busy", "TRYAGAIN x"]
)
def test_a_server_that_is_not_ready_is_waited_for_and_has_done_nothing(text: str) -> None:
    life = b"*2\r\n$4\r\ndone\r\n$1\r\nx\r\n"
    with (
        impostor(life, f"-{text}\r\n".encode()) as address,
        RedisStore(address, timeout=0.2) as store,
        pytest.raises(StoreTimeout, match=rf"{text.split()[0]}.*; it did nothing"),
    ):
        store.set("key", b"")


# -- a cluster -----------------------------------------------------------------------------------


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[list[RedisServer]]:
    options = ["--cluster-enabled", "yes", "--cluster-node-timeout", "5000", "--cluster-port"]
    buses = [str(free_port()) for _ in range(2)]
    with (
        RedisServer(tmp_path / "1", *options, buses[0]) as first,
        RedisServer(tmp_path / "2", *options, buses[1]) as second,
    ):
        first.ask("CLUSTER", "ADDSLOTSRANGE", 0, 8191)
        second.ask("CLUSTER", "ADDSLOTSRANGE", 8192, 16383)
        first.ask("CLUSTER", "SET-CONFIG-EPOCH", 1)
        second.ask("CLUSTER", "SET-CONFIG-EPOCH", 2)
        first.ask("CLUSTER", "MEET", "127.0.0.1", second.port, buses[1])
        until(lambda: all(b"cluster_state:ok" in each.ask("CLUSTER", "INFO") for each in (first, second)))
        yield [first, second]


def test_a_cluster_is_asked_at_the_server_that_has_the_slot(cluster: list[RedisServer]) -> None:
    hosts = set()
    for number in range(8):
        job = f"job-{number}"
        with (
            RedisStore(cluster[0].address, job, timeout=60) as one,
            RedisStore(cluster[1].address, job, timeout=60) as other,
            in_background() as call,
        ):
            waiting = call(other.get, "key")
            until(lambda other=other: other._backing._streams)
            one.set("key", b"value")
            assert waiting.result(30) == b"value"
            assert one.add("counter", 1) + other.add("counter", 1) == 3
            hosts.add(one._backing.job.client._server)
            assert other._backing.job.client._server == one._backing.job.client._server
    assert hosts == {each.address for each in cluster}


def test_servers_that_send_one_in_circles_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_link, "_REPLY_MARGIN_S", 0.05)
    with impostor(b"-MOVED 1 127.0.0.1:1\r\n") as address, pytest.raises(StoreTimeout):
        RedisStore(address, timeout=0.2)
