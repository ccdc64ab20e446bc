"""What every store promises of calls that are made together, as tests; a part of the conformance."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from shoal.errors import StoreError, UsageError
from shoal.store import Store
from shoal.store.requests import Add, Append, CompareSet, Delete, Get, MultiSet, Set


@contextmanager
def in_background() -> Iterator[Callable[..., Future[Any]]]:
    """Call functions in threads that are joined at the end."""
    with ThreadPoolExecutor(32) as pool:
        yield pool.submit


class MadeTogether:
    """The contract of :meth:`shoal.store.Store.together`."""

    #: whether it does in one step what is done together
    one_step = True

    def test_several_calls_are_made_at_once(self, store: Store) -> None:
        store.set("held", b"before")
        assert store.together(
            [
                Set("key", b"value"), Add("counter", 5), CompareSet("held", b"before", b"after"),
                CompareSet("held", b"before", b"after"), Append("key", b"s"), Add("counter", -7),
                Delete("held"), Delete("held"),
            ]
        ) == [None, 5, b"after", b"after", None, -2, True, False]  # fmt: skip
        assert store.peek(["key", "counter", "held"]) == [b"values", b"-2", None]
        assert store.together([]) == []

    def test_calls_that_are_made_at_once_end_where_another_value_is_found(self, store: Store) -> None:
        store.set("held", b"before")
        calls = [Add("counter", 1), CompareSet("held", b"", b"mine"), Add("counter", 1)]
        assert store.together(calls) == [1, b"before"]
        assert store.together([CompareSet("none", b"some", b"mine"), Add("counter", 1)]) == [b"some"]
        assert store.together([CompareSet("held", b"before", b"before"), Add("counter", 1)]) == [b"before", 2]

    def test_calls_that_are_made_at_once_end_with_the_first_that_fails(self, store: Store) -> None:
        store.set("text", b"no number")
        with pytest.raises(StoreError, match=r"text'.*no counter"):
            store.together([Set("a", b"1"), Add("text", 1), Set("b", b"2")])
        assert store.peek(["a", "text", "b"]) == [b"1", b"no number", None]

    def test_a_counter_that_begins_with_zeros_counts(self, store: Store) -> None:
        store.set("counter", b"007")
        assert store.together([Set("a", b""), Add("counter", 1), Add("after", 1)]) == [None, 8, 1]
        store.set("counter", b"-007")
        assert store.add("counter", 1) == -6

    @pytest.mark.concurrency
    def test_nobody_sees_half_of_what_is_done_together(self, store: Store) -> None:
        rounds = 20

        def count() -> None:
            with store.clone() as mine:
                for _ in range(rounds):
                    one, two, there = mine.together([Add("one", 1), Add("two", -1), Set("there", b"")])
                    assert one + two == 0 or not self.one_step
                    assert there is None
                    assert mine.together([Delete("there")]) in ([True], [False])
                    first, second = mine.together([Add("both", 1), Add("both", 1)])
                    assert second == first + 1 or not self.one_step

        with in_background() as call:
            counting = [call(count) for _ in range(3)]
            while not all(each.done() for each in counting):
                one, two = (int(each or 0) for each in store.peek(["one", "two"]))
                assert one + two == 0 or not self.one_step
            for each in counting:
                each.result()
        assert store.add("one", 0) == 3 * rounds
        assert store.add("both", 0) == 6 * rounds

    def test_only_short_writes_are_made_at_once(self, store: Store) -> None:
        for call in (Get(["key"], 1.0), MultiSet([("key", b"")]), "key"):
            with pytest.raises(UsageError, match="expected Set, Add"):
                store.together([Set("key", b""), call])  # type: ignore[list-item]
        with pytest.raises(UsageError, match="key must be"):
            store.together([Set(5, b"")])  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="value must be"):
            store.together([CompareSet("key", b"", 5)])  # type: ignore[arg-type]
        for amount in (1.5, "1", 2**63):
            with pytest.raises(UsageError, match="whole number of 64 bits"):
                store.together([Add("key", amount)])  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="17 calls, at most 16"):
            store.together([Add("key", 1)] * 17)
        with pytest.raises(StoreError, match=r"400\d\d bytes .*: at most 32768"):
            store.together([Set("key", b""), Append("key", bytes(40_000))])
        assert store.num_keys() == 0
        store.set("key", bytes(40_000))
        with pytest.raises(StoreError, match=r"a value of 40000 bytes was found: 32768 at most"):
            store.together([Add("counter", 1), CompareSet("key", b"", b"value"), Add("counter", 1)])
        assert store.get("counter") == b"1"

    def test_values_of_calls_that_are_made_at_once_may_be_of_every_kind(self, store: Store) -> None:
        value = bytearray(b"b")
        store.together([Set("key", "käse"), Append("key", memoryview(b"a")), Append("key", value)])  # type: ignore[arg-type]
        value[0] = 0
        assert store.get("key") == "käseab".encode()
        assert store.together([CompareSet("key", "käseab", "text"), Add("one", True)]) == [b"text", 1]  # type: ignore[arg-type]

    def test_calls_that_are_made_at_once_wake_those_that_wait(self, store: Store) -> None:
        with in_background() as call:
            waiting = call(store.multi_get, ["a", "b"], 30)
            store.together([Set("a", b"1"), Set("b", b"2")])
            assert waiting.result(30) == [b"1", b"2"]
