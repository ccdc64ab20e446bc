"""What every store promises, as tests.

Inherit :class:`StoreConformance` and give it a fixture ``store``: an empty store.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import wait
from typing import Any

import pytest

from shoal.errors import ForkedProcess, ShoalError, StoreError, StoreTimeout, UsageError
from shoal.store import MAX_VALUE, Store
from shoal.store.requests import Add, Append

from .made_together import MadeTogether, in_background

ODD_KEYS = ["", " ", "/", "a/b//c", "new\nline", "nul\0", "käse 🧀", "\u202e", "x" * 10_000, "%s{}", "."]


class StoreConformance(MadeTogether):
    """The contract of :class:`shoal.store.Store`."""

    #: what the store takes, in bytes
    largest_value = MAX_VALUE
    longest_key = 10_000
    #: what it takes in one multi_set, in bytes; None: more is set in several steps
    largest_at_once: int | None = None

    def test_what_was_set_can_be_got(self, store: Store) -> None:
        store.set("key", b"value")
        assert store.get("key") == b"value"
        store.set("key", b"other")
        assert store.get("key") == b"other"

    def test_text_is_encoded(self, store: Store) -> None:
        store.set("key", "käse")
        assert store.get("key") == "käse".encode()

    @pytest.mark.parametrize("value", [bytearray(b"ab"), memoryview(b"ab")])
    def test_every_kind_of_bytes_is_taken(self, store: Store, value: bytearray | memoryview) -> None:
        store.set("key", value)
        assert store.get("key") == b"ab"

    @pytest.mark.parametrize(
        "value", [b"", b"\0", b"\0=", b"\0+1 5", bytes(range(256)), b"\n" * 3, b"x" * 100_000]
    )
    def test_values_are_binary(self, store: Store, value: bytes) -> None:
        store.set("key", value)
        assert store.get("key") == value

    def test_a_value_may_be_as_long_as_the_store_says(self, store: Store) -> None:
        value = os.urandom(2**20) * (self.largest_value // 2**20)
        assert len(value) == self.largest_value
        store.set("key", value)
        assert store.get("key") == value

    def test_a_longer_value_is_refused_and_the_store_goes_on(self, store: Store) -> None:
        with pytest.raises(StoreError, match=f"{self.largest_value + 1} bytes"):
            store.set("key", bytes(self.largest_value + 1))
        store.set("key", bytes(self.largest_value))
        with pytest.raises(StoreError, match=f"{self.largest_value + 1} bytes"):
            store.together([Add("before", 1), Append("key", b"x"), Add("after", 1)])
        assert store.list_keys() == ["before", "key"]
        with pytest.raises(StoreError, match=f"{self.largest_value + 1} bytes"):
            store.append("key", b"x")
        assert len(store.get("key")) == self.largest_value

    def test_many_large_values_can_be_set_and_got_at_once(self, store: Store) -> None:
        longest = self.largest_value // 2 if self.largest_at_once is None else self.largest_at_once // 4
        values = [bytes([i]) * longest for i in range(3)] + [b"small"]
        store.multi_set(["a", "b", "c", "d"], values)
        assert store.multi_get(["a", "b", "c", "d"]) == values

    @pytest.mark.parametrize("key", ODD_KEYS)
    def test_keys_are_any_text(self, store: Store, key: str) -> None:
        key = key[: self.longest_key]
        assert not store.check([key])
        store.set(key, b"value")
        assert store.check([key])
        assert store.get(key) == b"value"
        assert store.list_keys() == [key]
        assert store.delete(key)

    def test_keys_do_not_mix(self, store: Store) -> None:
        keys = [key[: self.longest_key] for key in ODD_KEYS]
        for number, key in enumerate(keys):
            store.set(key, str(number))
        assert store.multi_get(keys) == [b"%d" % number for number in range(len(keys))]
        assert store.num_keys() == len(keys)

    @pytest.mark.parametrize("key", [b"bytes", None, 5, "\ud800"])
    def test_what_is_no_text_is_no_key(self, store: Store, key: Any) -> None:
        with pytest.raises(UsageError, match="key"):
            store.set(key, b"")
        with pytest.raises(UsageError, match="key"):
            store.check([key])

    def test_one_string_is_not_a_list_of_keys(self, store: Store) -> None:
        with pytest.raises(UsageError, match="sequence of keys"):
            store.wait("key")

    @pytest.mark.parametrize("value", [None, 5, ["x"]])
    def test_what_is_not_bytes_is_no_value(self, store: Store, value: Any) -> None:
        with pytest.raises(UsageError, match="value must be"):
            store.set("key", value)
        assert store.num_keys() == 0

    @pytest.mark.concurrency
    def test_get_waits_until_the_key_is_set(self, store: Store) -> None:
        with in_background() as call:
            getting = call(store.get, "key", 30)
            store.set("other", b"")
            store.set("key", b"value")
            assert getting.result(30) == b"value"

    def test_get_that_waits_in_vain_names_the_key(self, store: Store) -> None:
        with pytest.raises(StoreTimeout, match=r"0\.02 s.*missing-key'"):
            store.get("missing-key", 0.02)

    def test_without_time_only_what_is_there_counts(self, store: Store) -> None:
        with pytest.raises(StoreTimeout):
            store.get("key", 0)
        store.set("key", b"value")
        assert store.get("key", 0) == b"value"
        store.wait(["key"], 0)

    def test_the_default_deadline_holds_where_none_is_given(self, store: Store) -> None:
        store.timeout = 0.02
        with pytest.raises(StoreTimeout, match=r"0\.02 s"):
            store.get("key")
        with pytest.raises(StoreTimeout):
            store.wait(["key"])
        with pytest.raises(StoreTimeout):
            store.multi_get(["key"])

    @pytest.mark.parametrize("timeout", [-1, float("nan")])
    def test_a_timeout_that_makes_no_sense_is_a_usage_error(self, store: Store, timeout: float) -> None:
        with pytest.raises(UsageError, match="timeout="):
            store.get("key", timeout)

    def test_a_timeout_without_end_is_taken(self, store: Store) -> None:
        store.set("key", b"value")
        assert store.get("key", float("inf")) == b"value"

    def test_wait_needs_all_keys_and_names_those_that_were_missing(self, store: Store) -> None:
        store.set("there", b"")
        with pytest.raises(StoreTimeout, match=r"absent-1.*absent-2") as caught:
            store.wait(["there", "absent-1", "absent-2"], 0.02)
        assert "there'" not in str(caught.value)

    def test_a_timeout_does_not_list_thousands_of_keys(self, store: Store) -> None:
        with pytest.raises(StoreTimeout, match="and 984 more") as caught:
            store.wait([f"{i:04}" for i in range(1000)], 0)
        assert len(str(caught.value)) < 1000

    @pytest.mark.concurrency
    def test_wait_wakes_when_the_last_key_is_set(self, store: Store) -> None:
        with in_background() as call:
            waiting = [call(store.wait, ["a", "b", "c"], 30) for _ in range(8)]
            store.set("b", b"")
            store.multi_set(["a"], [b""])
            assert not wait(waiting, timeout=0.05).done
            store.add("c", 1)
            for each in waiting:
                each.result(30)

    def test_a_key_that_was_deleted_again_keeps_wait_waiting(self, store: Store) -> None:
        with in_background() as call:
            if self.one_step:
                waiting = call(store.wait, ["a", "b"], 30)
            store.set("a", b"")
            store.delete("a")
            if not self.one_step:  # it looks at one key after the other
                waiting = call(store.wait, ["a", "b"], 30)
            store.set("b", b"")
            assert not wait([waiting], timeout=0.05).done
            store.set("a", b"")
            waiting.result(30)

    def test_waiting_for_nothing_returns_at_once(self, store: Store) -> None:
        store.wait([])
        assert store.multi_get([]) == []
        assert store.check([])

    def test_a_key_may_be_waited_for_twice(self, store: Store) -> None:
        with in_background() as call:
            getting = call(store.multi_get, ["a", "b", "a"], 30)
            store.set("a", b"1")
            store.set("b", b"2")
            assert getting.result(30) == [b"1", b"2", b"1"]

    @pytest.mark.parametrize("bring", ["compare_set", "append"])
    def test_every_way_to_make_a_key_wakes(self, store: Store, bring: str) -> None:
        with in_background() as call:
            getting = call(store.get, "key", 30)
            if bring == "append":
                store.append("key", b"value")
            else:
                store.compare_set("key", b"", b"value")
            assert getting.result(30) == b"value"

    def test_counters_start_from_zero_and_are_decimal_text(self, store: Store) -> None:
        assert store.add("counter", 5) == 5
        assert store.add("counter", -7) == -2
        assert store.add("counter", 0) == -2
        assert store.get("counter") == b"-2"
        store.set("counter", "41")
        assert store.add("counter", 1) == 42

    def test_adding_to_something_else_is_an_error(self, store: Store) -> None:
        for value in (b"no number", b"", b"-", b"1_0", b" 1", "٣".encode(), b"9" * 40):
            store.set("key", value)
            with pytest.raises(StoreError, match=r"key'.*no counter"):
                store.add("key", 1)
            assert store.get("key") == value

    def test_a_counter_has_64_bits(self, store: Store) -> None:
        assert store.add("counter", 2**63 - 1) == 2**63 - 1
        with pytest.raises(StoreError, match="64 bits"):
            store.add("counter", 1)
        assert store.add("counter", -(2**63 - 1)) == 0
        assert store.add("counter", -(2**63)) == -(2**63)
        with pytest.raises(UsageError, match="64 bits"):
            store.add("counter", 2**63)
        with pytest.raises(UsageError, match="whole number"):
            store.add("counter", 1.5)  # type: ignore[arg-type]

    def test_compare_set_sets_only_what_was_expected(self, store: Store) -> None:
        assert store.compare_set("key", b"expected", b"new") == b"expected"
        assert not store.check(["key"])
        assert store.compare_set("key", b"", b"first") == b"first"
        assert store.compare_set("key", b"", b"second") == b"first"
        assert store.compare_set("key", b"wrong", b"second") == b"first"
        assert store.compare_set("key", b"first", b"second") == b"second"
        assert store.get("key") == b"second"

    def test_compare_set_takes_an_empty_value_for_what_it_is(self, store: Store) -> None:
        store.set("key", b"")
        assert store.compare_set("key", b"", b"new") == b"new"

    @pytest.mark.concurrency
    def test_compare_set_lets_one_of_many_win(self, store: Store) -> None:
        with in_background() as call:
            seen = [call(store.compare_set, "leader", "", str(i)) for i in range(16)]
            winners = {each.result(30) for each in seen}
        assert winners == {store.get("leader")}

    def test_delete_says_whether_there_was_something(self, store: Store) -> None:
        assert not store.delete("key")
        store.set("key", b"")
        assert store.delete("key")
        assert not store.delete("key")
        assert not store.check(["key"])
        assert store.num_keys() == 0
        with pytest.raises(StoreTimeout):
            store.get("key", 0)

    def test_a_deleted_counter_starts_from_zero_again(self, store: Store) -> None:
        store.add("counter", 5)
        store.delete("counter")
        assert store.add("counter", 1) == 1

    def test_check_wants_all_keys(self, store: Store) -> None:
        store.set("a", b"")
        assert store.check(["a"])
        assert not store.check(["a", "b"])
        store.set("b", b"")
        assert store.check(["a", "b"])

    def test_keys_are_counted_and_listed_by_prefix(self, store: Store) -> None:
        assert store.num_keys() == 0
        assert store.list_keys() == []
        for key in ("b/2", "a/1", "b/1", "b"):
            store.set(key, b"")
        store.add("count", 1)
        assert store.num_keys() == 5
        assert store.list_keys() == ["a/1", "b", "b/1", "b/2", "count"]
        assert store.list_keys("b/") == ["b/1", "b/2"]
        assert store.list_keys("nothing") == []

    def test_append_extends_or_makes_a_value(self, store: Store) -> None:
        store.append("key", b"one ")
        store.append("key", b"")
        store.append("key", b"two")
        assert store.get("key") == b"one two"

    @pytest.mark.concurrency
    def test_appends_of_many_are_all_there(self, store: Store) -> None:
        with in_background() as call:
            for each in [call(store.append, "key", bytes([i])) for i in range(64)]:
                each.result(30)
        assert sorted(store.get("key")) == list(range(64))

    def test_multi_set_wants_a_value_for_each_key(self, store: Store) -> None:
        with pytest.raises(UsageError, match="2 keys and 1 values"):
            store.multi_set(["a", "b"], [b"1"])
        assert store.num_keys() == 0
        store.multi_set([], [])

    def test_multi_get_waits_for_all(self, store: Store) -> None:
        with in_background() as call:
            getting = call(store.multi_get, ["a", "b"], 30)
            store.set("b", b"2")
            store.set("a", b"1")
            assert getting.result(30) == [b"1", b"2"]
        with pytest.raises(StoreTimeout, match="c'"):
            store.multi_get(["a", "c"], 0)

    @pytest.mark.parametrize("many", [2, 40])
    def test_peek_reads_what_is_there_and_waits_for_nothing(self, store: Store, many: int) -> None:
        keys = [f"key-{number}" for number in range(many)]
        assert store.peek(keys) == [None] * many
        store.multi_set(keys[::2], [b"%d" % number for number in range(many)][::2])
        store.set(keys[0], b"")
        found = [b"%d" % number if number % 2 == 0 else None for number in range(many)]
        assert store.peek(keys) == [b"", *found[1:]]
        assert store.peek([keys[1], keys[0], keys[0]]) == [None, b"", b""]
        assert store.peek([]) == []
        with pytest.raises(UsageError, match="sequence of keys"):
            store.peek("key")

    def test_a_counter_is_a_value_like_others(self, store: Store) -> None:
        for total in range(1, 4):
            assert store.add("counter", 1) == total
        assert store.get("counter") == b"3"
        assert store.add("counter", -2) == 1
        assert store.add("counter", -2) == -1
        assert store.compare_set("counter", b"1", b"7") == b"-1"
        assert store.compare_set("counter", b"-1", b"7") == b"7"
        assert store.add("counter", 1) == 8
        assert store.together([Add("counter", 1), Append("counter", b"0"), Add("counter", 1)]) == [
            9,
            None,
            91,
        ]
        store.append("counter", b"!")
        with pytest.raises(StoreError, match=r"91!.*no counter"):
            store.add("counter", 1)
        assert store.delete("counter")
        assert store.add("counter", 1) == 1
        assert store.peek(["counter"]) == [b"1"]

    @pytest.mark.concurrency
    def test_many_clients_count_together(self, store: Store) -> None:
        clients, rounds = 8, 50
        sums: list[int] = []

        def count() -> None:
            with store.clone() as mine:
                sums.extend([mine.add("counter", 1) for _ in range(rounds)])

        with in_background() as call:
            for each in [call(count) for _ in range(clients)]:
                each.result(60)
        assert sorted(sums) == list(range(1, clients * rounds + 1))
        assert store.get("counter") == b"%d" % (clients * rounds)

    @pytest.mark.concurrency
    def test_threads_share_one_store_while_some_wait(self, store: Store) -> None:
        with in_background() as call:
            waiting = [call(store.get, f"key-{i}", 30) for i in range(16)]
            counting = [call(store.add, "counter", 1) for _ in range(64)]
            assert sorted(each.result(30) for each in counting) == list(range(1, 65))
            for i in range(16):
                store.set(f"key-{i}", str(i))
            assert [each.result(30) for each in waiting] == [b"%d" % i for i in range(16)]

    def test_a_clone_sees_the_same_data_and_outlives_the_other(self, store: Store) -> None:
        store.set("key", b"value")
        store.timeout = 17.0
        first = store.clone()
        second = first.clone()
        first.close()
        with second:
            assert second.timeout == 17.0
            assert second.get("key") == b"value"
            second.set("key", b"new")
        assert store.get("key") == b"new"

    def test_a_closed_store_refuses_everything(self, store: Store) -> None:
        other = store.clone()
        other.close()
        other.close()
        calls: list[Callable[[], object]] = [
            lambda: other.set("key", b""),
            lambda: other.get("key", 0),
            lambda: other.check(["key"]),
            lambda: other.num_keys(),
        ]
        for call in calls:
            with pytest.raises(StoreError, match="has been closed"):
                call()

    @pytest.mark.concurrency
    def test_closing_wakes_the_threads_that_wait(self, store: Store) -> None:
        other = store.clone()
        started = threading.Event()

        def waiting() -> None:
            started.set()
            other.get("key", 60)

        with in_background() as call:
            result = call(waiting)
            assert started.wait(30)
            assert not wait([result], timeout=0.02).done
            other.close()
            with pytest.raises(StoreError, match="has been closed"):
                result.result(30)

    def test_a_forked_child_may_not_use_it_and_the_parent_still_may(self, store: Store) -> None:
        store.set("key", b"value")
        child = os.fork()
        if child == 0:
            status = 1
            try:
                store.get("key", 1)
            except ForkedProcess as error:
                store.close()
                status = 0 if "spawn" in str(error) else 2
            except ShoalError:
                status = 3
            finally:
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
        assert store.get("key") == b"value"
