"""What clients see of a store at the same time has an order; and the check finds stores without one."""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.errors import StoreTimeout
from shoal.store import Backing, FileStore, MemoryStore, Store, TCPStore, TCPStoreServer
from shoal.store.tcp.replies import StoredReplies
from shoal.testing import linearize
from shoal.testing.linearize import RecordedCall, Recorder, RefusedResult
from tests.support.waiting import PATIENCE

from .conformance import in_background
from .test_lost_connections import cut, lose_replies

SECRET = b"secret"
#: messages of a server before the clients begin: three keys are deleted, five clones are welcomed
BEGINNING = 8
SEEDS = [0, 1, *(pytest.param(seed, marks=pytest.mark.stress) for seed in range(2, 50))]


@pytest.fixture(autouse=True)
def _often_in_between() -> Iterator[None]:
    """Let threads come between each other's instructions."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.fixture
def server() -> Iterator[TCPStoreServer]:
    with TCPStoreServer(secret=SECRET) as server:
        yield server


@pytest.fixture
def tcp(server: TCPStoreServer) -> Iterator[TCPStore]:
    with TCPStore("127.0.0.1", server.port, SECRET, timeout=60) as store:
        yield store


@pytest.mark.parametrize("seed", SEEDS)
def test_the_memory_store_is_linearizable(seed: int) -> None:
    with MemoryStore(60) as store:
        assert len(linearize.play(store, seed=seed)) == 300


@pytest.mark.parametrize("seed", SEEDS)
def test_the_file_store_is_linearizable(seed: int, tmp_path: Path) -> None:
    with FileStore(tmp_path / "store", timeout=60) as store:
        linearize.play(store, seed=seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_tcp_store_is_linearizable(seed: int, tcp: TCPStore) -> None:
    linearize.play(tcp, seed=seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_tcp_store_is_linearizable_though_its_connections_are_cut(
    seed: int, server: TCPStoreServer, tcp: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = lose_replies(monkeypatch, every=7, after=BEGINNING)
    ended = threading.Event()

    def cut_often() -> None:
        assert begun.wait(PATIENCE)  # a clone may not lose its first connection
        while not ended.wait(0.02):
            cut(server)

    with in_background() as call:
        cutting = call(cut_often)
        try:
            linearize.play(tcp, seed=seed)
        finally:
            ended.set()
        cutting.result(60)


def test_a_server_that_keeps_no_replies_is_found_out(tcp: TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StoredReplies, "store", lambda *_: None)
    linearize.play(tcp)  # as long as nothing is lost, none is needed
    lose_replies(monkeypatch, every=3, after=BEGINNING)
    with pytest.raises(AssertionError, match="no order of its"):
        linearize.play(tcp)


class _Careless(Backing):
    """Looks and stores in two steps."""

    def __init__(self, values: dict[str, bytes]) -> None:
        super().__init__()
        self._values = values

    def get_now(self, key: str) -> bytes | None:
        return self._values.get(key)

    def swap(self, key: str, held: bytes | None, value: bytes | None) -> bool:
        if self._values.get(key) != held:
            return False
        self.closed.wait(0.0005)
        if value is None:
            self._values.pop(key, None)
        else:
            self._values[key] = value
        return True

    def list_keys(self, prefix: str) -> list[str]:
        return [key for key in [*self._values] if key.startswith(prefix)]

    def clone(self, timeout: float) -> _Careless:
        return type(self)(self._values)


def test_a_store_whose_changes_overlap_is_found_out() -> None:
    with Store(_Careless({}), 60) as store, pytest.raises(AssertionError, match="no order of its"):
        linearize.play(store, together=False)


class _OneByOne(_Careless):
    """Does each operation in one step, and those of ``together`` in several."""

    _lock = threading.Lock()

    def swap(self, key: str, held: bytes | None, value: bytes | None) -> bool:
        with self._lock:
            return super().swap(key, held, value)


def test_a_store_that_does_what_is_done_together_in_several_steps_is_found_out() -> None:
    with Store(_OneByOne({}), 60) as store:
        linearize.play(store, together=False)
        with pytest.raises(AssertionError, match="no order of its"):
            linearize.play(store)


#: client, name, arguments, call, return, result
Call = tuple[str, str, tuple[object, ...], int, int | None, object]


def _check(*calls: Call) -> None:
    history = [
        RecordedCall(client, name, "key", arguments, called, returned, result)
        for client, name, arguments, called, returned, result in calls
    ]
    linearize.check(reversed(history))


SET: Call = ("a", "set", (b"1",), 0, 10, None)
RIGHT: dict[str, list[Call]] = {
    "a read during a write sees it or not": [
        SET,
        ("b", "check", (), 1, 9, False),
        ("c", "check", (), 1, 9, True),
    ],
    "a later read may have looked first": [
        ("b", "check", (), 0, 9, False),
        ("c", "get", (), 1, 8, b"1"),
        SET,
    ],
    "an unanswered write is never done": [
        SET,
        ("b", "set", (b"2",), 11, None, None),
        ("a", "get", (), 90, 99, b"1"),
    ],
    "an unanswered write is done much later": [
        SET,
        ("b", "append", (b"2",), 11, None, None),
        ("a", "get", (), 20, 29, b"1"),
        ("a", "add", (7,), 30, 39, 8),
        ("a", "get", (), 40, 49, b"82"),
    ],
    "an unanswered read says nothing": [SET, ("b", "get", (), 11, None, None)],
    "moments that are equal overlap": [SET, ("b", "check", (), 10, 10, False)],
    "all that is there is done": [
        SET,
        ("a", "compare_set", (b"1", b"2"), 11, 12, b"2"),
        ("a", "compare_set", (b"1", b"3"), 13, 14, b"2"),
        ("a", "append", (b"x",), 15, 16, None),
        ("a", "add", (1,), 17, 18, RefusedResult("no counter")),
        ("a", "delete", (), 19, 20, True),
        ("a", "delete", (), 21, 22, False),
        ("a", "compare_set", (b"1", b"3"), 23, 24, b"1"),
        ("a", "add", (-4,), 25, 26, -4),
        ("a", "get", (), 27, 28, b"-4"),
    ],
}
WRONG: dict[str, list[Call]] = {
    "a write is lost": [SET, ("b", "check", (), 11, 19, False)],
    "a read sees what was overwritten": [
        SET,
        ("a", "set", (b"2",), 11, 19, None),
        ("b", "get", (), 20, 29, b"1"),
    ],
    "a write is seen and then not": [
        SET,
        ("a", "set", (b"2",), 11, 99, None),
        ("b", "get", (), 20, 29, b"2"),
        ("c", "get", (), 30, 39, b"1"),
    ],
    "two see two writes in two orders": [
        ("a", "append", (b"1",), 0, 9, None),
        ("b", "append", (b"2",), 0, 9, None),
        ("c", "get", (), 10, 19, b"12"),
        ("d", "get", (), 10, 19, b"21"),
    ],
    "a write is done twice": [("a", "add", (1,), 0, 9, 2)],
    "an unanswered write is done twice": [
        SET,
        ("a", "add", (1,), 11, None, None),
        ("b", "get", (), 20, 29, b"3"),
    ],
    "an unanswered write is done before its call": [
        ("b", "get", (), 0, 9, b"1"),
        ("a", "set", (b"1",), 10, None, None),
    ],
    "two add the same": [("a", "add", (1,), 0, 9, 1), ("b", "add", (1,), 0, 9, 1)],
    "both win": [
        SET,
        *((each, "compare_set", (b"1", each.encode()), 20, 29, each.encode()) for each in "ab"),
    ],
    "a counter refuses": [SET, ("b", "add", (1,), 11, 19, RefusedResult("no counter"))],
    "what is no counter does not": [("a", "set", (b"x",), 0, 9, None), ("b", "add", (1,), 10, 19, 1)],
    "both delete it": [SET, ("a", "delete", (), 11, 19, True), ("b", "delete", (), 11, 19, True)],
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_history_with_an_order_passes(name: str) -> None:
    _check(*RIGHT[name])


@pytest.mark.parametrize("name", WRONG)
def test_a_history_without_an_order_is_an_error(name: str) -> None:
    with pytest.raises(AssertionError, match=r"key 'key': no order of its \d+ first operations"):
        _check(*WRONG[name])


def test_the_error_shows_the_first_result_without_an_explanation() -> None:
    adds: list[Call] = [("a", "add", (1,), 10 * i, 10 * i + 5, i + 1) for i in range(50)]
    with pytest.raises(AssertionError) as raised:
        _check(
            *adds,
            ("b", "get", (), 500, 504, b"49"),
            ("c", "set", (b"",), 502, None, None),
            ("d", "get", (), 505, 509, b"x"),
        )
    lines = str(raised.value).splitlines()
    assert lines[0].endswith("no order of its 52 first operations explains the result of b, get() -> b'49'.")
    assert lines[1].endswith("the key could hold b'50'.")
    assert lines[3] == "  ... 40 more"
    assert lines[-1].split() == ["0.5", "0.5", "b:", "get()", "->", "b'49'"]
    assert any("c: set(b''), unanswered" in line for line in lines)
    assert len(lines) == 16


def test_keys_have_orders_of_their_own() -> None:
    linearize.check(
        [RecordedCall("a", "add", key, (1,), i, i, 1) for i, key in enumerate("abc")]
        + [RecordedCall("a", "add", key, (1,), 9, 9, 2) for key in "abc"]
    )


def test_many_unanswered_writes_take_little_time() -> None:
    lost: list[Call] = [("a", "set", (b"%d" % i,), i, None, None) for i in range(30)]
    reads: list[Call] = [("b", "get", (), 100 + i, 100 + i, b"%d" % (i // 10)) for i in range(100)]
    _check(*lost, *reads[:30], *reads[50:80])


def test_what_a_client_calls_is_noted() -> None:
    history: list[RecordedCall] = []
    with MemoryStore(60) as store:
        client = Recorder(store, "a", history)
        client.set("key", b"1")
        assert client.add("key", 2) == 3
        assert client.compare_set("key", b"3", b"4") == b"4"
        client.append("key", b"x")
        assert client.get("key") == b"4x"
        assert client.check("key")
        assert client.delete("key")
        with pytest.raises(StoreTimeout):
            client.get("key", 0.0)
    results = [(each.name, each.arguments, each.result) for each in history]
    assert results == [
        ("set", (b"1",), None),
        ("add", (2,), 3),
        ("compare_set", (b"3", b"4"), b"4"),
        ("append", (b"x",), None),
        ("get", (), b"4x"),
        ("check", (), True),
        ("delete", (), True),
        ("get", (), None),
    ]
    assert history[-1].returned is None
    moments = list(itertools.chain(*((each.called, each.returned) for each in history[:-1])))
    assert moments == sorted(moments)  # type: ignore[type-var]
    linearize.check(history)
