"""A store of one's own keeps the whole contract, though it has three operations."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from shoal.errors import StoreError, StoreTimeout
from shoal.net import Deadline
from shoal.store import Backing, MemoryStore, Store
from tests.support import dictionary_store
from tests.support.dictionary_store import Dictionary

from .conformance import StoreConformance, in_background


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Dictionary, "tables", {})


class TestDictionaryStore(StoreConformance):
    one_step = False

    @pytest.fixture
    def store(self) -> Iterator[Store]:
        with dictionary_store.dictionary_store("name", 30) as store:
            yield store


def test_a_further_store_takes_less_than_a_hundred_lines() -> None:
    assert len(Path(dictionary_store.__file__).read_text().splitlines()) < 100


class Notifying(Dictionary):
    """Tells those who wait of each change, and counts how often they look."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.changed = threading.Condition()
        self.looks = 0

    def missing(self, keys: Sequence[str]) -> list[str]:
        self.looks += 1
        return super().missing(keys)

    def swap(self, key: str, held: bytes | None, value: bytes | None) -> bool:
        with self.changed:
            done = super().swap(key, held, value)
            self.changed.notify_all()
        return done

    def watch(self, keys: Sequence[str], deadline: Deadline) -> None:
        with self.changed:
            if not self.closed.is_set() and not any(self.get_now(key) for key in keys):
                self.changed.wait(deadline.remaining())

    def close(self) -> None:
        with self.changed:
            self.changed.notify_all()


def test_a_backing_that_notifies_is_not_polled() -> None:
    backing = Notifying("name")
    with Store(backing, 60) as store, in_background() as call:
        waiting = call(store.wait, ["a", "b"], 60)
        store.set("a", b"1")
        while backing.looks == 0:
            pass
        threading.Event().wait(0.05)
        assert backing.looks <= 3
        store.set("b", b"2")
        waiting.result(30)
        again = call(store.wait, ["c"], 60)
        store.close()
        with pytest.raises(StoreError, match="this Notifying has been closed"):
            again.result(30)


class Contended(Dictionary):
    """Another client comes between each look and the first attempt to change what was seen."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.raced: set[str] = set()

    def swap(self, key: str, held: bytes | None, value: bytes | None) -> bool:
        if key not in self.raced:
            self.raced.add(key)
            self.values[key] = b"%d" % (int(held or b"0") + 100)
        return super().swap(key, held, value)


def test_a_change_that_another_client_comes_between_is_tried_again() -> None:
    with Store(Contended("name"), 30) as store:
        assert store.add("counter-a", 1) == 101
        store.append("counter-b", b"7")
        assert store.get("counter-b") == b"1007"
        assert store.delete("counter-b")
        store.set("counter-c", b"5")
        assert store.get("counter-c") == b"5"
        assert store.compare_set("counter-d", b"", b"9") == b"100"


def test_all_keys_under_a_prefix_can_be_deleted_at_once() -> None:
    for store in (MemoryStore(30), Store(Dictionary("name"), 30)):
        store.multi_set(["a/1", "a/2", "ab", "b"], [b""] * 4)
        assert store.delete_prefix("a/") == 2
        assert store.list_keys() == ["ab", "b"]
        assert store.delete_prefix("a/") == 0


class Textual(Dictionary):
    """Gives text where bytes are due."""

    def get_now(self, key: str) -> bytes | None:
        value = super().get_now(key)
        return value and value.decode()  # type: ignore[return-value]


CHANGES: dict[str, Callable[[Store], object]] = {
    "set": lambda store: store.set("key", b"2"),
    "add": lambda store: store.add("key", 1),
    "append": lambda store: store.append("key", b"2"),
    "compare_set": lambda store: store.compare_set("key", b"1", b"2"),
    "delete": lambda store: store.delete("key"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_backing_whose_values_are_no_bytes_is_refused(change: str) -> None:
    """It would never find again what it holds, and try for ever."""
    Dictionary("name").values["key"] = b"1"
    with (
        Store(Textual("name"), 30) as store,
        pytest.raises(StoreError, match=r"Textual.get_now\('key'\) returned str"),
    ):
        CHANGES[change](store)


def test_the_least_that_a_backing_has_is_said_by_python() -> None:
    with pytest.raises(TypeError, match=r"abstract.*clone.*get_now.*list_keys.*swap"):
        Backing()  # type: ignore[abstract]


def test_a_backing_that_cannot_be_closed_keeps_nobody_from_closing_the_rest() -> None:
    class Broken(Dictionary):
        def close(self) -> None:
            raise OSError("the line is dead")

    def fail() -> None:
        done.append("first")
        raise OSError("no such line")

    done: list[str] = []
    store = Store(Broken("name"), 5.0)
    store.call_when_closed(lambda: done.append("second"))
    store.call_when_closed(fail)
    with pytest.raises(OSError, match="no such line"):
        store.close()
    assert done == ["first", "second"]
    with pytest.raises(StoreError, match="closed"):
        store.num_keys()


class Refusing(Dictionary):
    """Never stores anything, whatever it is told that it holds."""

    def swap(self, key: str, held: bytes | None, value: bytes | None) -> bool:
        return False


@pytest.mark.parametrize("change", CHANGES)
def test_a_backing_that_never_stores_is_given_up_at_the_deadline(change: str) -> None:
    Dictionary("name").values["key"] = b"1"
    with (
        Store(Refusing("name"), 0.05) as store,
        pytest.raises(
            StoreTimeout, match=r"key 'key' .* within 0\.05 s: Refusing.swap returned False [1-9]\d* times"
        ),
    ):
        CHANGES[change](store)


def test_a_store_that_is_closed_stops_trying() -> None:
    with Store(Refusing("name"), 60) as store, in_background() as call:
        trying = call(store.set, "key", b"1")
        store.close()
        with pytest.raises(StoreError, match="this Refusing has been closed"):
            trying.result(30)
