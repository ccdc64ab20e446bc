"""A store in a real Redis."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import pytest

from shoal.errors import StoreError, StoreTimeout
from shoal.store import MAX_VALUE
from shoal.store.external import job as external_job
from shoal.store.redis import store as redis_store
from shoal.store.redis.connection import ConnectionLost, RedisClient
from shoal.store.redis.scripts import WRITE, Script
from shoal.store.redis.store import MAX_REDIS_KEY, RedisStore
from shoal.testing import linearize
from tests.support.redis_server import RedisServer, needs_redis
from tests.support.waiting import PATIENCE, until

from .conformance import StoreConformance, in_background
from .losses import Losses
from .redis_store import server, store

__all__ = ["server", "store"]  # fixtures

pytestmark = [needs_redis, pytest.mark.filterwarnings("ignore:Redis at .* may lose changes")]

T = TypeVar("T")

SEEDS = [0, 1, *(pytest.param(seed, marks=pytest.mark.stress) for seed in range(2, 20))]


class TestRedisStore(StoreConformance):
    pass


# -- exactly once --------------------------------------------------------------------------------


def lose_answers(monkeypatch: pytest.MonkeyPatch, every: int) -> None:
    """Lose every ``every``-th answer to a write, half of them before the server has heard of it."""
    losses, exchange = Losses(every, ConnectionLost), RedisClient._exchange

    def exchanging(self: RedisClient, connection: Any, words: tuple[Any, ...], seconds: float) -> Any:
        ask = partial(exchange, self, connection, words, seconds)
        return losses.of(ask) if words[1] == redis_store.WRITE.digest else ask()

    monkeypatch.setattr(RedisClient, "_exchange", exchanging)


@pytest.mark.parametrize("seed", SEEDS)
def test_it_is_linearizable(seed: int, store: RedisStore) -> None:
    linearize.play(store, seed=seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_it_is_linearizable_though_answers_are_lost(
    seed: int, store: RedisStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    lose_answers(monkeypatch, every=4)
    linearize.play(store, seed=seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_it_is_linearizable_while_its_connections_are_cut(
    seed: int, server: RedisServer, store: RedisStore
) -> None:
    ended = threading.Event()
    cuts = 0

    def cut() -> None:
        nonlocal cuts
        while not ended.wait(0.002):
            cuts += server.ask("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
            cuts += server.ask("CLIENT", "KILL", "TYPE", "pubsub")

    with in_background() as call:
        cutting = call(cut)
        try:
            while cuts <= 5:
                linearize.play(store, seed=seed + 1000 * cuts, operations=150)
        finally:
            ended.set()
        cutting.result(60)


def test_a_store_that_keeps_no_replies_is_found_out(
    store: RedisStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    forgetful = WRITE.text.decode().replace("if last == number and reply", "if false and reply")
    monkeypatch.setattr(redis_store, "WRITE", Script(forgetful))
    lose_answers(monkeypatch, every=4)
    with pytest.raises(AssertionError, match="no order of its"):
        linearize.play(store)


@contextmanager
def first_write_on_the_way(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Any, ...]]]:
    """Keep the first attempt at a write back; the list has what was to be sent."""
    exchange, held = RedisClient._exchange, []

    def exchanging(self: RedisClient, connection: Any, words: tuple[Any, ...], seconds: float) -> Any:
        if words[1] == WRITE.digest and not held:
            held.append(words)
            raise ConnectionLost("on the way for long")
        return exchange(self, connection, words, seconds)

    with monkeypatch.context() as patch:
        patch.setattr(RedisClient, "_exchange", exchanging)
        yield held


def arrives(server: RedisServer, held: list[tuple[Any, ...]]) -> Any:
    """What the server answers to what was kept back."""
    (words,) = held
    return server.ask(*words)


def test_a_write_that_arrives_late_does_nothing(
    server: RedisServer, store: RedisStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    with first_write_on_the_way(monkeypatch) as held:
        store.set("key", b"old")
    assert arrives(server, held) == [b"done", b""]
    store.set("key", b"new")
    assert arrives(server, held) == [b"done", b""]
    assert store.get("key") == b"new"


def test_a_write_that_arrives_late_does_nothing_although_its_process_has_left(
    server: RedisServer, store: RedisStore, job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RedisStore(server.address, job, timeout=60) as leaver, first_write_on_the_way(monkeypatch) as held:
        assert leaver.add("counter", 1) == 1
    assert arrives(server, held) == [b"done", b"1"]
    assert store.get("counter") == b"1"


def test_no_write_follows_one_whose_fate_is_unknown_on_its_line(
    server: RedisServer, store: RedisStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    with first_write_on_the_way(monkeypatch), monkeypatch.context() as patch:
        patch.setattr(RedisClient, "_connected", lambda *_: (_ for _ in ()).throw(StoreError("it refuses")))
        with pytest.raises(StoreTimeout, match="it is unknown"):
            store.add("counter", 1)
    assert not store.delete("nothing")
    with store._backing.job.channel() as channel:
        assert channel.number == 2  # of another line, whose first write was the one before


def test_a_write_that_arrives_after_it_was_refused_does_nothing(
    server: RedisServer, store: RedisStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.set("key", b"of another")
    with first_write_on_the_way(monkeypatch) as held:
        assert store.compare_set("key", b"", b"mine") == b"of another"
    server.ask("HDEL", store.key, "kkey")
    assert arrives(server, held) == [b"late"]
    assert not store.check(["key"])


def test_a_refusal_after_an_attempt_without_an_answer_leaves_its_fate_unknown(
    store: RedisStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refusing(self: RedisClient, seconds: float) -> Any:
        raise StoreError("it refuses")

    store.set("key", b"")
    with first_write_on_the_way(monkeypatch), monkeypatch.context() as patch:
        patch.setattr(RedisClient, "_connected", refusing)
        with pytest.raises(StoreTimeout, match="it refuses; it is unknown whether the request was or"):
            store.set("key", b"")
        with pytest.raises(StoreError, match=r"it refuses$"):
            store.set("key", b"")


def test_replies_outlive_a_connection(store: RedisStore, monkeypatch: pytest.MonkeyPatch) -> None:
    exchange, done = RedisClient._exchange, set()

    def exchanging(self: RedisClient, connection: Any, words: tuple[Any, ...], seconds: float) -> Any:
        answer = exchange(self, connection, words, seconds)
        if words[1] == WRITE.digest and words[7:9] not in done:  # line and number
            done.add(words[7:9])
            raise ConnectionLost("lost on the way back")
        return answer

    store.multi_set(["a/1", "a/2", "b"], [b"", b"", b""])
    monkeypatch.setattr(RedisClient, "_exchange", exchanging)
    assert store.delete_prefix("a/") == 2
    assert store.list_keys() == ["b"]
    assert store.delete("b")
    assert store.add("counter", 2**60) == 2**60
    assert store.add("counter", 1) == 2**60 + 1
    assert store.compare_set("leader", "", "me") == b"me"
    store.append("leader", "!")
    assert store.get("leader") == b"me!"
    assert len(done) == 6


def test_a_server_that_has_forgotten_the_scripts_hears_them_again(
    server: RedisServer, store: RedisStore
) -> None:
    server.ask("SCRIPT", "FLUSH")
    assert store.add("counter", 1) == 1
    server.ask("SCRIPT", "FLUSH")
    assert store.get("counter") == b"1"


# -- waiting -------------------------------------------------------------------------------------


def without_silence(
    store: RedisStore, monkeypatch: pytest.MonkeyPatch, read: Callable[..., T], *args: Any
) -> T:
    """The result of a read that must not depend on a look when no message comes."""
    monkeypatch.setattr(external_job, "WATCH_TIMEOUT_S", 1000.0)
    with in_background() as call:
        reading = call(read, *args, 1000.0)
        try:
            return reading.result(PATIENCE)
        except BaseException:
            store.close()  # or it would be waited for
            raise


def test_a_wait_whose_connection_breaks_is_begun_again(
    server: RedisServer, store: RedisStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(external_job, "WATCH_TIMEOUT_S", 1000.0)
    streams = store._backing._streams
    with in_background() as call:
        getting, waiting = call(store.get, "key"), call(store.wait, ["key", "other"])
        for _ in range(3):
            until(lambda: len(streams) == 2)
            waits = [*streams]
            server.ask("CLIENT", "KILL", "TYPE", "pubsub")
            until(lambda waits=waits: not streams.intersection(waits))
        store.multi_set(["key", "other"], [b"value", b""])
        assert getting.result(30) == b"value"
        waiting.result(30)


def test_what_comes_between_a_look_and_the_subscription_is_seen(
    store: RedisStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    subscribed, missed = RedisClient.subscribed, []

    def late(self: RedisClient, *args: Any) -> Any:
        if not missed:
            missed.append(None)
            store.set("key", b"value")
        return subscribed(self, *args)

    monkeypatch.setattr(RedisClient, "subscribed", late)
    assert without_silence(store, monkeypatch, store.get, "key") == b"value"
    assert missed


@pytest.mark.parametrize("bring", ["set", "add", "append", "compare_set", "swap"])
def test_a_message_comes_with_every_change(
    bring: str, store: RedisStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def change() -> None:
        if bring == "add":
            store.add("key", 7)
        elif bring == "swap":
            assert store._backing.swap("key", None, b"7")
        else:
            getattr(store, bring)("key", *([b"", b"7"] if bring == "compare_set" else [b"7"]))

    monkeypatch.setattr(external_job, "WATCH_TIMEOUT_S", 1000.0)
    with in_background() as call:
        reading = call(store.get, "key", 1000.0)
        try:
            until(lambda: store._backing._streams)
            change()
            assert reading.result(PATIENCE) == b"7"
        finally:
            store.close()


def test_a_connection_is_used_again_after_a_wait(server: RedisServer, store: RedisStore) -> None:
    client = store._backing.job.client
    for number in range(20):
        with in_background() as call:
            getting = call(store.get, f"key {number}")
            until(lambda: store._backing._streams)
            store.set(f"key {number}", b"")
            getting.result(30)
    assert len(client._idle) <= 3
    assert int(server.ask("CLIENT", "LIST", "TYPE", "pubsub").count(b"\n")) == 0


def test_a_connection_whose_wait_ended_in_an_error_carries_no_calls(store: RedisStore) -> None:
    client = store._backing.job.client
    with pytest.raises(StoreError, match="in between"), client.subscribed("channel", store._deadline(60)):
        raise StoreError("in between")
    assert store.add("counter", 1) == 1


# -- limits --------------------------------------------------------------------------------------


def test_many_keys_are_asked_for_in_several_messages(
    store: RedisStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_store, "_MAX_KEYS_PER_REQUEST", 64)
    keys = [f"{i:03}" for i in range(260)]
    store.multi_set(keys, keys)
    assert store.multi_get(keys) == [key.encode() for key in keys]
    assert store.list_keys() == keys
    with pytest.raises(StoreTimeout, match="and 244 more"):
        store.wait([key + "x" for key in keys], 0)
    assert store.delete_prefix("1") == 100
    assert store.num_keys() == 160


def test_thousands_of_keys_are_set_and_removed_at_once(store: RedisStore) -> None:
    keys = [str(i) for i in range(20_000)]
    store.multi_set(keys, keys)
    store.wait(keys, 0)
    assert store.multi_get(keys[::-1])[0] == b"19999"
    assert store.delete_prefix("") == 20_000


def test_a_key_has_a_longest_length(store: RedisStore) -> None:
    store.set("k" * MAX_REDIS_KEY, b"value")
    assert store.list_keys("k") == ["k" * MAX_REDIS_KEY]
    with pytest.raises(StoreError, match="a key of 1048577 bytes"):
        store.set("k" * (MAX_REDIS_KEY + 1), b"")
    assert MAX_VALUE == 64 * 2**20


@pytest.mark.parametrize(("held", "total"), [("007", 8), ("-0", 1), ("00", 1), ("-09", -8)])
def test_numbers_that_redis_does_not_take_are_counters_all_the_same(
    held: str, total: int, store: RedisStore
) -> None:
    store.set("counter", held)
    assert store.add("counter", 1) == total
