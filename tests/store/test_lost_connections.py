"""A connection that is lost is no error, and what was asked for is done once."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator

import pytest

from shoal.errors import StoreError, StoreTimeout, WireError
from shoal.net import ClientConnection, connect
from shoal.store import TCPStore, TCPStoreServer
from shoal.store.requests import Add, Append, CompareSet, NumKeys, Set
from shoal.store.tcp import client as tcp
from shoal.store.tcp.protocol import PURPOSE, Status, decode_request, encode_reply, encode_request
from shoal.store.tcp.replies import CHANNEL_TTL_S, StoredReplies
from shoal.store.tcp.server import _StoreClient
from tests.support.waiting import until

from .conformance import in_background

SECRET = b"secret"


@pytest.fixture
def server() -> Iterator[TCPStoreServer]:
    with TCPStoreServer(secret=SECRET) as server:
        yield server


@pytest.fixture
def store(server: TCPStoreServer) -> Iterator[TCPStore]:
    with TCPStore("127.0.0.1", server.port, SECRET, timeout=60) as store:
        yield store


def cut(server: TCPStoreServer) -> None:
    """End all connections."""
    sessions = list(server._clients.values())
    for session in sessions:
        with contextlib.suppress(OSError):  # the client has just closed it
            session.stream.shutdown()
    until(lambda: all(session.closed for session in sessions))


def lose_replies(monkeypatch: pytest.MonkeyPatch, *, every: int, after: int = 0) -> threading.Event:
    """Cut the connection in the place of every ``every``-th message of the server, but of the first ones.

    Returns:
        set when the first ones have been sent.
    """
    count = itertools.count(1)
    begun = threading.Event()

    def send(session: ClientConnection, message: bytes) -> None:
        number = next(count)
        if number > after:
            begun.set()
            if number % every == 0:
                raise OSError("cut")
        ClientConnection.send(session, message)

    monkeypatch.setattr(_StoreClient, "send", send)
    return begun


def test_what_is_asked_for_is_done_once_however_many_answers_are_lost(
    store: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    lose_replies(monkeypatch, every=3)

    def work(name: int) -> list[int]:
        sums = []
        for i in range(40):
            sums.append(store.add("counter", 1))
            store.append("log", f"{name}.{i};")
            assert store.compare_set(f"mine/{name}", str(i - 1) if i else "", str(i)) == str(i).encode()
            assert store.delete(f"other/{name}") is False
            store.set(f"other/{name}", b"there")
            assert store.delete(f"other/{name}") is True
            step = [Add(f"steps/{name}", 1), Append("log", f"{name}.{i};".encode())]
            assert store.together(step) == [i + 1, None]
        return sums

    with in_background() as call:
        sums = [each.result(60) for each in [call(work, name) for name in range(4)]]
    assert sorted(itertools.chain(*sums)) == list(range(1, 161))
    assert sorted(store.get("log").split(b";")) == sorted(
        [b"", *(f"{name}.{i}".encode() for name in range(4) for i in range(40) for _ in range(2))]
    )


def test_a_long_reply_that_was_lost_is_given_again(store: TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    lose_replies(monkeypatch, every=3)
    long, longer = b"x" * 100_000, b"y" * 200_000
    for _ in range(9):
        assert store.compare_set("key", b"", long) == long
        assert store.compare_set("key", long, longer) == longer
        assert store.compare_set("key", long, b"never") == longer
        assert store.delete("key")


def test_a_request_that_waits_goes_on_waiting(server: TCPStoreServer, store: TCPStore) -> None:
    with in_background() as call:
        waiting = [call(store.get, "key"), call(store.wait, ["key", "other"])]
        for _ in range(3):
            until(lambda: len(server._waiting) == 2)
            cut(server)
        store.multi_set(["key", "other"], [b"value", b""])
        assert waiting[0].result(30) == b"value"
        waiting[1].result(30)


def test_a_request_that_waits_keeps_its_deadline(server: TCPStoreServer, store: TCPStore) -> None:
    with in_background() as call:
        waiting = call(store.get, "key", 0.5)
        until(lambda: server._waiting or waiting.done())
        cut(server)
        with pytest.raises(StoreTimeout, match=r"waited 0.5 s.*'key'"):
            waiting.result(30)


def test_a_store_that_closes_ends_those_that_wait_for_a_connection(
    server: TCPStoreServer, store: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    trying = threading.Event()

    def connect(*_: object, **__: object) -> None:
        trying.set()
        raise WireError("no way")

    with in_background() as call:
        monkeypatch.setattr(tcp, "connect", connect)
        cut(server)
        waiting = call(store.get, "key")
        assert trying.wait(30)
        store.close()
        with pytest.raises(StoreError, match="closed"):
            waiting.result(30)


def test_a_write_that_was_not_sent_is_told_from_one_whose_answer_is_missing(
    server: TCPStoreServer, store: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp, "_REPLY_MARGIN_S", 0.1)
    store.timeout = 0.1

    def connect(*_: object, **__: object) -> None:
        raise WireError("no way")

    with monkeypatch.context() as patched:
        patched.setattr(_StoreClient, "send", lambda *_: None)
        with pytest.raises(StoreTimeout, match=r"within 0\.1 s; it is unknown whether"):
            store.set("key", b"value")
    with monkeypatch.context() as patched:
        patched.setattr(tcp, "connect", connect)
        with pytest.raises(StoreTimeout, match="no way; nothing was sent"):
            store.set("key", b"value")


def test_a_write_is_not_sent_again_when_the_server_may_have_forgotten_it(
    store: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp, "_MAX_REPEAT_S", 0.0)
    lose_replies(monkeypatch, every=3)
    store.check([])
    store.check([])
    with pytest.raises(StoreTimeout, match="it is unknown whether"):
        store.add("counter", 1)
    assert store.get("counter") == b"1"


def test_writes_of_two_lines_on_one_connection_end_it(server: TCPStoreServer) -> None:
    connection = connect("127.0.0.1", server.port, secret=SECRET, purpose=PURPOSE, timeout=30)
    with contextlib.closing(connection), TCPStore("127.0.0.1", server.port, SECRET) as store:
        connection.recv(60)
        for number in range(2):
            connection.send(encode_request(Add("key", 1), b"a" * 16, number), 10)
            assert connection.recv(60)[:1] == bytes((Status.DONE,))
        connection.send(encode_request(Add("key", 1), b"b" * 16, 0), 10)
        with pytest.raises(WireError):
            connection.recv(60)
        assert store.get("key") == b"2"


def test_a_server_that_ends_each_connection_costs_no_more_than_the_deadline(
    server: TCPStoreServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise WireError("no")

    monkeypatch.setattr(tcp, "_REPLY_MARGIN_S", 0.1)
    with TCPStore("127.0.0.1", server.port, SECRET, timeout=60) as store:
        store.timeout = 0.5
        monkeypatch.setattr(TCPStoreServer, "on_message", refuse)
        # The deadline may also come while it connects.
        late = r"did not answer: (its connections are lost again and again|waited .*|no connection to .*)$"
        with pytest.raises(StoreTimeout, match=late):
            store.check(["key"])
        unknown = "it is unknown whether the request was or will be done|nothing was sent"
        with pytest.raises(StoreTimeout, match=unknown):
            store.set("key", b"")


def test_a_server_that_began_anew_is_no_store_to_go_on_with(server: TCPStoreServer, store: TCPStore) -> None:
    store.set("key", b"value")
    server.close()
    with TCPStoreServer("127.0.0.1", server.port, SECRET):
        for _ in range(2):
            with pytest.raises(StoreError, match=r"lost the store at .*restarted without its data"):
                store.check(["key"])
        with pytest.raises(StoreError, match="restarted without its data"):
            store.clone()


def test_a_clone_of_a_store_whose_server_is_gone_is_an_error_at_once(
    server: TCPStoreServer, store: TCPStore
) -> None:
    server.close()
    with pytest.raises(StoreError, match="lost the store") as raised:
        store.clone()
    assert not isinstance(raised.value, StoreTimeout)


def test_lines_are_used_again(server: TCPStoreServer, store: TCPStore) -> None:
    with in_background() as call:
        for _ in range(5):
            together = threading.Barrier(12)

            def add(together: threading.Barrier = together) -> None:
                together.wait(30)
                store.add("counter", 1)

            for each in [call(add) for _ in range(12)]:
                each.result(30)
            cut(server)
    assert store.get("counter") == b"60"
    assert len(server._replies) <= 12


def test_a_number_gets_its_reply_again_and_a_new_one_none() -> None:
    replies, write = StoredReplies(), Set("key", b"value")
    assert replies.stored_reply(b"line", 1, 1, write) is None
    replies.store(b"line", 1, b"reply")
    assert replies.stored_reply(b"line", 2, 1, write) == b"reply"
    assert replies.stored_reply(b"line", 2, 2, write) is None
    assert replies.stored_reply(b"other", 3, 1, write) is None


def test_nothing_is_taken_from_a_connection_that_was_given_up() -> None:
    replies, write = StoredReplies(), Set("key", b"value")
    assert replies.stored_reply(b"line", 2, 7, write) is None  # it changed nothing
    with pytest.raises(WireError, match="abandoned"):
        replies.stored_reply(b"line", 1, 7, write)
    replies.store(b"line", 8, b"reply")
    with pytest.raises(WireError, match="abandoned"):
        replies.stored_reply(b"line", 2, 7, write)


def test_a_reply_that_is_too_long_to_keep_is_made_again() -> None:
    replies, write = StoredReplies(), CompareSet("key", b"", b"x" * 70_000)
    reply = encode_reply(Status.DONE, write.desired)
    replies.store(b"line", 1, reply, write)
    assert replies.writes()[0].reply == b""
    assert replies.stored_reply(b"line", 1, 1, write) == reply


def test_lines_are_forgotten_some_time_after_their_clients_have_gone() -> None:
    replies = StoredReplies()
    for line in (b"a", b"b", b"c"):
        replies.store(line, 1, b"reply")
    replies.disconnected(b"a", 0, 100.0)
    replies.disconnected(b"b", 0, 100.0)
    assert replies.stored_reply(b"b", 1, 2, Set("key", b"")) is None  # it came again
    replies.disconnected(b"b", 0, 101.0)  # its older connection is found dead
    replies.disconnected(b"c", 0, 100.0 + CHANNEL_TTL_S)
    assert {line.name for line in replies.writes()} == {b"b", b"c"}


def test_a_write_has_a_number_and_nothing_else_has_one() -> None:
    message = encode_request(Add("key", 1), b"l" * 16, 7)
    assert decode_request(message) == (Add("key", 1), b"l" * 16, 7)
    with pytest.raises(WireError, match="without its number"):
        decode_request(message[25:])
    with pytest.raises(WireError, match="with a number"):
        decode_request(message[:25] + encode_request(NumKeys("")))
    for length in range(len(message)):
        with pytest.raises(WireError):
            decode_request(message[:length])
