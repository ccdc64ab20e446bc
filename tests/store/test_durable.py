"""A store whose server comes again: what it promises while it is there, while it is away, and after."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from shoal.errors import ConfigurationError, StoreError, StoreTimeout, WireError
from shoal.net import connect
from shoal.store import DurableStoreServer, Store, TCPStore, TCPStoreServer
from shoal.store.requests import Add, Check, CompareSet, Get, Set
from shoal.store.tcp import durable_server as durable
from shoal.store.tcp import journal
from shoal.store.tcp.protocol import MAX_MESSAGE, PURPOSE, Status, encode_reply, encode_request
from tests.support.folders import folder_in_memory
from tests.support.ports import free_port
from tests.support.waiting import until

from .conformance import StoreConformance, in_background
from .test_lost_connections import lose_replies

SECRET = b"secret"


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log"


@pytest.fixture
def server(log: Path) -> Iterator[DurableStoreServer]:
    with DurableStoreServer(log, port=free_port(), secret=SECRET) as server:
        yield server


@pytest.fixture
def store(server: DurableStoreServer) -> Iterator[TCPStore]:
    with TCPStore("127.0.0.1", server.port, SECRET, timeout=60) as store:
        yield store


class TestDurableStore(StoreConformance):
    @pytest.fixture
    def store(self) -> Iterator[Store]:
        with (
            folder_in_memory() as folder,
            DurableStoreServer(folder / "log", secret=SECRET) as server,
            TCPStore("127.0.0.1", server.port, SECRET, timeout=60) as store,
        ):
            yield store


def again(server: DurableStoreServer, log: Path) -> DurableStoreServer:
    """End a server, and make one that takes its place."""
    server.close()
    return DurableStoreServer(log, port=server.port, secret=SECRET)


def test_data_outlives_the_server(server: DurableStoreServer, store: TCPStore, log: Path) -> None:
    store.multi_set(["a", "b", "c"], [b"1", b"", b"x" * 100_000])
    assert store.add("counter", 7) == 7
    assert store.delete("b")
    store.append("a", b"2")
    with pytest.raises(StoreError, match="no counter"):  # and that is done again, as far as it was done
        store.together([Set("d", b""), Add("a", -1), Add("c", 1), Set("e", b"")])
    assert store.together([Add("a", 1), CompareSet("a", b"", b"x"), Set("e", b"")]) == [12, b"12"]
    for _ in range(2):
        server = again(server, log)
        with server:
            assert store.multi_get(["a", "c", "counter"]) == [b"12", b"x" * 100_000, b"7"]
            assert store.list_keys() == ["a", "c", "counter", "d"]


def test_whoever_waits_goes_on_waiting_through_a_restart(
    server: DurableStoreServer, store: TCPStore, log: Path
) -> None:
    with in_background() as call, store.clone() as another:
        waiting = [call(store.get, "key"), call(store.wait, ["key", "other"]), call(another.get, "key")]
        until(lambda: len(server._waiting) == 3)
        server.close()
        calls = [call(store.add, "counter", 1) for _ in range(3)]
        cloned: Future[TCPStore] = call(store.clone)
        with DurableStoreServer(log, port=server.port, secret=SECRET) as server:
            assert sorted(each.result(60) for each in calls) == [1, 2, 3]
            until(lambda: len(server._waiting) == 3)
            with cloned.result(60) as clone:
                clone.multi_set(["key", "other"], [b"value", b""])
            assert [each.result(60) for each in waiting] == [b"value", None, b"value"]


def test_a_change_whose_answer_was_lost_with_the_server_is_done_once(
    server: DurableStoreServer, store: TCPStore, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.set("counter", b"1")
    with in_background() as call, monkeypatch.context() as patched:
        lose_replies(patched, every=1)
        adding = call(store.add, "counter", 1)
        until(lambda: server._table.values["counter"] == b"2")
        server.close()
        patched.undo()
        with DurableStoreServer(log, port=server.port, secret=SECRET):
            assert adding.result(60) == 2
            assert store.get("counter") == b"2"


def test_a_server_that_stays_away_is_an_error_at_the_deadline(
    server: DurableStoreServer, store: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.store.tcp.client._REPLY_MARGIN_S", 0.1)
    server.close()
    store.timeout = 0.2
    with pytest.raises(StoreTimeout, match=r"did not answer: .*(Connection refused|lost again and again)"):
        store.set("key", b"value")
    with pytest.raises(StoreTimeout, match="no store at"):
        store.clone()


def test_a_server_on_another_log_is_another_store(
    server: DurableStoreServer, store: TCPStore, tmp_path: Path
) -> None:
    server.close()
    for begin in (partial(DurableStoreServer, tmp_path / "other"), TCPStoreServer):
        with (
            begin(port=server.port, secret=SECRET),
            pytest.raises(StoreError, match="restarted without its data"),
        ):
            store.check([])


def _full(*_: object) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _broken(*_: object) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_a_full_disk_refuses_changes_and_loses_nothing(
    server: DurableStoreServer, store: TCPStore, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.multi_set(["key", "gone"], [b"before", b""])
    write, wrote = os.pwrite, []

    def half(descriptor: int, data: bytes, at: int) -> int:
        if wrote:
            _full()
        wrote.append(write(descriptor, bytes(data)[:20], at))
        return 20

    changes: list[Callable[[], Any]] = [
        lambda: store.set("key", b"after"),
        lambda: store.append("new", b"x"),
        lambda: store.add("counter", 1),
        lambda: store.delete("gone"),
        lambda: store.delete_prefix(""),
        lambda: store.compare_set("key", b"before", b"after"),
    ]
    with monkeypatch.context() as patched, in_background() as call:
        waiting = call(store.get, "new")
        until(lambda: len(server._waiting) == 1)
        patched.setattr(os, "pwrite", half)
        for change in changes:
            wrote.clear()
            with pytest.raises(StoreError, match=r"not done.*No space left on device") as raised:
                change()
            assert not isinstance(raised.value, StoreTimeout)
            assert store.list_keys() == ["gone", "key"]
            assert store.get("key") == b"before"
            assert store.compare_set("key", b"else", b"x") == b"before"  # it changes nothing
        patched.undo()
        assert not waiting.done()
        store.set("new", b"there is room")
        assert waiting.result(60) == b"there is room"
    with again(server, log):
        assert store.multi_get(["key", "gone", "new"]) == [b"before", b"", b"there is room"]


@pytest.fixture
def alone(
    server: DurableStoreServer, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[DurableStoreServer, list[tuple[object, bytes | bytearray]]]]:
    """A server without a thread, and what it has sent to whom."""
    server.close()
    server._journal = journal.Journal(server._journal.path)
    server._journal.load()
    sent: list[tuple[object, bytes | bytearray]] = []
    monkeypatch.setattr(server, "send", lambda session, message: sent.append((session, message)))
    yield server, sent
    server._journal.close()


class Connected:
    """A client's connection."""

    def __init__(self, order: int) -> None:
        self.order, self.parked, self.channel, self.closed = order, None, b"", False


def test_who_reads_in_a_round_that_failed_sees_nothing_of_it(
    alone: tuple[DurableStoreServer, list[tuple[object, bytes | bytearray]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, sent = alone
    monkeypatch.setattr(os, "pwrite", _full)
    # The same number on two connections, of which the client has given up one.
    add = encode_request(Add("key", 1), b"l" * 16, 1)
    sessions = [Connected(1), Connected(2), Connected(3)]
    for session, message in zip(sessions, [add, add, encode_request(Check(["key"]))], strict=True):
        server.on_message(session, bytearray(message))  # type: ignore[arg-type]
    server.on_round_end()
    assert [each for each, _ in sent] == sessions
    assert [message[:1] for _, message in sent] == [b"\2", b"\2", b"\0"]
    assert sent[2][1] == encode_reply(Status.DONE, False)
    assert not server._table.values
    assert not server._replies.writes()


def test_writes_of_one_round_cost_one_sync(
    alone: tuple[DurableStoreServer, list[tuple[object, bytes | bytearray]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, sent = alone
    order: list[object] = []
    sync = os.fdatasync
    monkeypatch.setattr(os, "fdatasync", lambda descriptor: (order.append(len(sent)), sync(descriptor)))
    for number in range(100):
        add = encode_request(Add("key", 1), b"%016d" % number, 1)
        server.on_message(Connected(number), bytearray(add))  # type: ignore[arg-type]
    server.on_round_end()
    assert order == [0]  # and nobody was answered before
    assert [message for _, message in sent] == [encode_reply(Status.DONE, n) for n in range(1, 101)]


def test_a_sync_that_failed_is_made_good_in_a_new_file(
    server: DurableStoreServer, store: TCPStore, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = os.stat(log / "log").st_ino
    with monkeypatch.context() as patched:
        patched.setattr(os, "fdatasync", _broken)
        assert store.add("counter", 1) == 1
        assert os.stat(log / "log").st_ino != before
    with again(server, log):
        assert store.get("counter") == b"1"


def test_a_change_that_may_be_on_a_broken_disk_is_neither_refused_nor_done(
    server: DurableStoreServer, store: TCPStore, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(durable, "_REPAIR_INTERVAL_S", 0.0)
    store.set("key", b"before")
    with monkeypatch.context() as patched, in_background() as call:
        patched.setattr(os, "fdatasync", _broken)
        patched.setattr(os, "fsync", _broken)
        adding = call(store.add, "counter", 1)
        until(lambda: server._in_doubt)
        with pytest.raises(StoreError, match=r"not done.*disk of the store's log failed"):
            store.set("key", b"after")
        assert store.get("key") == b"before"
        assert not store.check(["counter"])
        assert not adding.done()
        patched.undo()
        assert adding.result(60) == 1
    with again(server, log):
        assert store.multi_get(["key", "counter"]) == [b"before", b"1"]


def test_a_snapshot_takes_the_place_of_a_long_log(
    server: DurableStoreServer, store: TCPStore, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server._journal._due = 50_000
    monkeypatch.setattr(journal, "SNAPSHOT_BYTES", 50_000)
    for number in range(200):
        store.set("key", b"%d" % number * 500)
    assert (log / "log").stat().st_size < 60_000
    with again(server, log):
        assert store.get("key") == b"199" * 500


def test_a_snapshot_that_fails_is_made_later(
    server: DurableStoreServer, store: TCPStore, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server._journal._due = 1_000
    monkeypatch.setattr(journal, "SNAPSHOT_BYTES", 1_000)
    with monkeypatch.context() as patched:
        patched.setattr(os, "rename", _full)
        for number in range(20):
            store.set("key", b"%d" % number * 50)
        assert (log / "log").stat().st_size > 2_000
        assert not (log / "log.new").exists()
    for _ in range(20):
        store.set("key", b"last" * 20)
    assert (log / "log").stat().st_size < 2_000
    with again(server, log):
        assert store.get("key") == b"last" * 20


def test_a_client_that_breaks_the_rules_ends_itself_alone(
    server: DurableStoreServer, store: TCPStore
) -> None:
    long = encode_request(CompareSet("long", b"", bytes(100_000)), b"a" * 16, 1)
    for messages in (
        [encode_request(Get(["missing"], -1.0))],
        [encode_request(Get(["missing"], float("nan")))],
        [long, encode_request(Add("key", 1), b"a" * 16, 1)],
        [long, encode_request(Add("key", 1), b"b" * 16, 1)],
    ):
        connection = connect("127.0.0.1", server.port, secret=SECRET, purpose=PURPOSE, timeout=30)
        connection.limit = MAX_MESSAGE
        connection.recv(30)
        for message in messages[:-1]:
            connection.send(message, 30)
            connection.recv(30)
        connection.send(messages[-1], 30)
        with pytest.raises(WireError):
            connection.recv(30)
        connection.close()
        assert store.add("honest", 1) > 0
    assert store.peek(["key", "honest"]) == [None, b"4"]


def test_a_second_server_is_refused(server: DurableStoreServer, log: Path) -> None:
    with pytest.raises(StoreError, match=rf"another store server \(process {os.getpid()}\) has the log"):
        DurableStoreServer(log)


def test_a_directory_that_others_could_change_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    folder.chmod(0o770)
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(folder)
    for name, why in (("folder", "others can write"), ("file", "not a directory"), ("link", "symbolic link")):
        with pytest.raises(ConfigurationError, match=f"refusing the store's log .*{name}: .*{why}"):
            DurableStoreServer(tmp_path / name)
    folder.chmod(0o700)
    (folder / "log").symlink_to(tmp_path / "file")
    with pytest.raises(ConfigurationError, match="symbolic link"):
        DurableStoreServer(folder)


def test_files_are_the_users_alone(server: DurableStoreServer, store: TCPStore, log: Path) -> None:
    assert log.stat().st_mode & 0o777 == 0o700
    assert {each.name: each.stat().st_mode & 0o777 for each in log.iterdir()} == {"log": 0o600, "lock": 0o600}


def test_what_the_log_holds_is_not_overwritten_by_the_records_of_the_beginning(tmp_path: Path) -> None:
    for records in ({"a": b"1"}, {"a": b"2", "b": b"2"}, {}):
        server = DurableStoreServer(tmp_path / "log", records=records)
        values = dict(server._table.values)
        server.close()
    assert values == {"a": b"1", "b": b"2"}
