"""A store in a real Redis."""

from __future__ import annotations

import itertools
import multiprocessing
import socket
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from shoal.errors import StoreError, StoreTimeout
from shoal.store import MAX_VALUE, open_store, outside_client, outside_job, redis_link
from shoal.store import redis as redis_store
from shoal.store.redis import MAX_REDIS_KEY, RedisStore
from shoal.store.redis_job import RedisJob
from shoal.store.redis_link import Broken, Link
from shoal.store.redis_scripts import WRITE, Script
from shoal.testing import linearize
from tests.support.ports import free_port
from tests.support.redis_server import DURABLE, RedisServer, needs_redis
from tests.support.waiting import PATIENCE, until

from .conformance import StoreConformance, in_background
from .jobs import meet_by_arrival, run_a_job

pytestmark = [needs_redis, pytest.mark.filterwarnings("ignore:Redis at .* may lose changes")]

T = TypeVar("T")

SEEDS = [0, 1, *(pytest.param(seed, marks=pytest.mark.stress) for seed in range(2, 20))]
_numbers = itertools.count()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def job() -> str:
    """A job that nobody else has."""
    return f"job {next(_numbers)}"


@pytest.fixture
def store(server: RedisServer, job: str) -> Iterator[RedisStore]:
    with RedisStore(server.address, job, timeout=60) as store:
        yield store


class TestRedisStore(StoreConformance):
    pass


# -- exactly once --------------------------------------------------------------------------------


def lose_answers(monkeypatch: pytest.MonkeyPatch, every: int) -> None:
    """Lose every ``every``-th answer to a write, half of them before the server has heard of it."""
    count, exchange = itertools.count(1), Link._exchange

    def exchanging(self: Link, connection: Any, words: tuple[Any, ...], seconds: float) -> Any:
        number = next(count) if words[1] == redis_store.WRITE.digest else 0
        if number and number % (2 * every) == 0:
            raise Broken("lost on the way there")
        answer = exchange(self, connection, words, seconds)
        if number and number % every == 0:
            raise Broken("lost on the way back")
        return answer

    monkeypatch.setattr(Link, "_exchange", exchanging)


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

    def cut() -> int:
        cuts = 0
        while not ended.wait(0.002):
            cuts += server.ask("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
            cuts += server.ask("CLIENT", "KILL", "TYPE", "pubsub")
        return cuts

    with in_background() as call:
        cutting = call(cut)
        try:
            linearize.play(store, seed=seed, operations=150)
        finally:
            ended.set()
        assert cutting.result(60) > 5


def test_a_store_that_keeps_no_replies_is_found_out(
    store: RedisStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    forgetful = WRITE.text.decode().replace("if last == number then", "if false then")
    monkeypatch.setattr(redis_store, "WRITE", Script(forgetful))
    lose_answers(monkeypatch, every=4)
    with pytest.raises(AssertionError, match="no order of its"):
        linearize.play(store)


def test_a_write_that_arrives_late_does_nothing(store: RedisStore, monkeypatch: pytest.MonkeyPatch) -> None:
    exchange, held = Link._exchange, []

    def exchanging(self: Link, connection: Any, words: tuple[Any, ...], seconds: float) -> Any:
        if words[1] == WRITE.digest and not held:
            held.append(words)
            raise Broken("on the way for long")
        return exchange(self, connection, words, seconds)

    monkeypatch.setattr(Link, "_exchange", exchanging)
    store.set("key", b"old")
    store.set("key", b"new")
    ((_, _, *late),) = held
    arguments = late[2:]
    reply = store._backing.job.link.run(
        WRITE, [store.key], arguments, store._deadline(60), threading.Event(), writes=True
    )
    assert reply == [b"late"]
    assert store.get("key") == b"new"


def test_replies_outlive_a_connection(store: RedisStore, monkeypatch: pytest.MonkeyPatch) -> None:
    exchange, done = Link._exchange, set()

    def exchanging(self: Link, connection: Any, words: tuple[Any, ...], seconds: float) -> Any:
        answer = exchange(self, connection, words, seconds)
        if words[1] == WRITE.digest and words not in done:
            done.add(words)
            raise Broken("lost on the way back")
        return answer

    store.multi_set(["a/1", "a/2", "b"], [b"", b"", b""])
    monkeypatch.setattr(Link, "_exchange", exchanging)
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
    monkeypatch.setattr(outside_client, "SILENCE", 1000.0)
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
    monkeypatch.setattr(outside_client, "SILENCE", 1000.0)
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
    subscribed, missed = Link.subscribed, []

    def late(self: Link, *args: Any) -> Any:
        if not missed:
            missed.append(None)
            store.set("key", b"value")
        return subscribed(self, *args)

    monkeypatch.setattr(Link, "subscribed", late)
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

    monkeypatch.setattr(outside_client, "SILENCE", 1000.0)
    with in_background() as call:
        reading = call(store.get, "key", 1000.0)
        try:
            until(lambda: store._backing._streams)
            change()
            assert reading.result(PATIENCE) == b"7"
        finally:
            store.close()


def test_a_connection_is_used_again_after_a_wait(server: RedisServer, store: RedisStore) -> None:
    link = store._backing.job.link
    for number in range(20):
        with in_background() as call:
            getting = call(store.get, f"key {number}")
            until(lambda: store._backing._streams)
            store.set(f"key {number}", b"")
            getting.result(30)
    assert len(link._idle) <= 3
    assert int(server.ask("CLIENT", "LIST", "TYPE", "pubsub").count(b"\n")) == 0


def test_a_connection_whose_wait_ended_in_an_error_carries_no_calls(store: RedisStore) -> None:
    link = store._backing.job.link
    with pytest.raises(StoreError, match="in between"), link.subscribed("channel", store._deadline(60)):
        raise StoreError("in between")
    assert store.add("counter", 1) == 1


# -- limits --------------------------------------------------------------------------------------


def test_many_keys_are_asked_for_in_several_messages(
    store: RedisStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_store, "_AT_ONCE", 64)
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


# -- a life --------------------------------------------------------------------------------------


def test_the_last_one_to_leave_removes_all_keys(server: RedisServer, store: RedisStore, job: str) -> None:
    name = store._backing.job.name
    with RedisStore(server.address, name, timeout=60) as other, store.clone() as third:
        other.add("counter", 1)
        third.append("log", b"x")
        assert store.num_keys() == 2
    assert store.num_keys() == 2
    store.close()
    assert server.names(job) == []


def test_who_leaves_takes_its_notes_along(server: RedisServer, store: RedisStore) -> None:
    store.set("key", b"")
    with RedisStore(server.address, store._backing.job.name, timeout=60) as other:
        other.set("key", b"")
        assert server.ask("HLEN", store.key) == 4
    assert server.ask("HLEN", store.key) == 3
    assert server.ask("ZCARD", store.key + ":members") == 1


def test_all_keys_end_together(server: RedisServer, store: RedisStore) -> None:
    ends = {server.ask("PEXPIRETIME", key) for key in (store.key, store.key + ":members")}
    assert len(ends) == 1
    assert 0 < server.ask("PTTL", store.key) <= 60_000


def test_a_store_whose_keys_have_ended_says_so_and_begins_no_new_life(
    server: RedisServer, store: RedisStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outside_client, "SILENCE", 0.05)
    store.set("key", b"value")
    with in_background() as call:
        waiting = call(store.get, "never")
        until(lambda: store._backing._streams)
        server.ask("PEXPIRE", store.key, 0)
        with pytest.raises(StoreError, match=r"keys have ended.*for 60 s.*suspended"):
            waiting.result(30)
    for again in range(2):
        for operation in (
            lambda: store.set("key", b""),
            lambda: store.add("counter", 1),
            lambda: store.multi_get(["key", "other"], 0),
            lambda: store.num_keys(),
            lambda: store.delete_prefix(""),
        ):
            with pytest.raises(StoreError, match="keys have ended"):
                operation()
        if not again:
            assert server.ask("EXISTS", store.key) == 0
            other = RedisStore(server.address, store._backing.job.name, timeout=60)
            other.set("key", b"of the new life")
    with other:
        assert other.list_keys() == ["key"]
        store.close()  # which is no member of the new life
        assert other.list_keys() == ["key"]


def test_who_asks_for_it_gets_the_life_that_began_after(server: RedisServer, store: RedisStore) -> None:
    store.set("key", b"value")
    with store.clone(anew=True) as same:
        assert same.get("key") == b"value"
    server.ask("DEL", store.key)
    with store.clone(anew=True) as first, store.clone(anew=True) as second, first.clone() as third:
        first.set("key", b"new")
        assert second.get("key") == third.get("key") == b"new"
    with pytest.raises(StoreError, match="keys have ended"):
        store.get("key", 0)


def test_the_keys_are_kept_alive(server: RedisServer, job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, keep = threading.Semaphore(0), RedisJob._keep_alive

    def noting(*args: Any) -> bool:
        lives = keep(*args)
        kept.release()
        return lives

    monkeypatch.setattr(RedisJob, "_keep_alive", noting)
    monkeypatch.setattr(outside_job, "KEEPING", 0.01)
    with RedisStore(server.address, job, timeout=60) as store:
        server.ask("PEXPIRE", store.key, 50_000)
        for _ in range(3):
            assert kept.acquire(timeout=60)
        assert server.ask("PTTL", store.key) > 50_000
        store.set("key", b"")


def _hold(address: str, job: str, ready: Any) -> None:
    outside_job.OUTLIVING = 1.0
    store = RedisStore(address, job, timeout=60)
    store.set("key", b"value")
    ready.send(None)
    store.get("never", 600)


def test_nothing_is_left_when_all_processes_were_killed(server: RedisServer, job: str) -> None:
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    processes = [context.Process(target=_hold, args=(server.address, job, there)) for _ in range(2)]
    with here, there:
        try:
            for process in processes:
                process.start()
            for _ in processes:
                assert here.poll(60)
                here.recv()
            assert len(server.names(job)) == 2
        finally:
            for process in processes:
                process.kill()
                process.join()
                process.close()
    until(lambda: server.names(job) == [])


# -- servers -------------------------------------------------------------------------------------


def test_a_server_that_is_not_there_is_named() -> None:
    dead = f"127.0.0.1:{free_port()}"
    with pytest.raises(StoreTimeout, match=rf"Redis at {dead} did not answer within 0\.1 s \(Conn.*refused"):
        RedisStore(dead, timeout=0.1)


def test_a_server_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_link, "_GRACE", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(StoreTimeout, match=r"did not answer within 0\.1 s \(Timeout reading"):
            RedisStore(address, timeout=0.1)


def test_a_server_that_goes_away_for_good_is_an_error_in_words(tmp_path: Path) -> None:
    with RedisServer(tmp_path) as server, RedisStore(server.address, timeout=60) as store:
        store.set("key", b"value")
        server.kill()
        store.timeout = 0.1
        with pytest.raises(StoreTimeout, match=r"did not answer within 0\.1 s \(Conn.*, \d+ times\); noth"):
            store.set("key", b"new")
        with pytest.raises(StoreTimeout, match=r"waited 0\.1 s.*'key' \(as far as known: Redis at"):
            store.get("key")


def test_what_became_of_a_write_whose_answer_was_lost_is_said_to_be_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_link, "_GRACE", 0.05)
    with RedisServer(tmp_path) as server, RedisStore(server.address, timeout=60) as store:
        store.set("key", b"value")
        with server.suspended():
            store.timeout = 0.1
            with pytest.raises(StoreTimeout, match=r"Timeout reading.*it is unknown whether the request was"):
                store.set("key", b"new")
        store.timeout = 60
        store.set("key", b"newest")
        assert store.get("key") == b"newest"


def test_who_may_lose_changes_is_told_once(tmp_path: Path, job: str) -> None:
    with RedisServer(tmp_path) as server:
        with pytest.warns(UserWarning, match=r"may lose changes.*\(appendonly no\)"):
            store = RedisStore(server.address, job, timeout=60)
        with warnings.catch_warnings(action="error"), store, store.clone():
            RedisStore(server.address, job, timeout=60).close()
        server.ask("CONFIG", "SET", "appendonly", "yes")
        server.ask("CONFIG", "SET", "maxmemory", "1gb")
        server.ask("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
        with pytest.warns(UserWarning, match=r"\(appendfsync everysec\); it evicts keys.*allkeys-lru"):
            RedisStore(server.address, job, timeout=60).close()


@pytest.mark.filterwarnings("error")
def test_nobody_is_told_of_a_server_that_loses_nothing(tmp_path: Path) -> None:
    with RedisServer(tmp_path, *DURABLE) as server:
        RedisStore(server.address, timeout=60).close()


def test_a_database_is_one_of_several(server: RedisServer, monkeypatch: pytest.MonkeyPatch, job: str) -> None:
    monkeypatch.setenv("SHOAL_JOB", job)
    with open_store(server.url + "/3", timeout=60) as third, open_store(server.url, timeout=60) as first:
        third.set("key", b"of the third")
        assert not first.check(["key"])
        with in_background() as call:
            waiting = call(first.get, "key")
            until(lambda: first._backing._streams)
            third.set("key", b"again")  # and the message comes, as channels know no databases
            first.set("key", b"of the first")
            assert waiting.result(30) == b"of the first"


# -- where it is named ---------------------------------------------------------------------------


def test_it_may_be_named_wherever_a_store_is(
    server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_JOB", "third")
    with open_store(server.url, timeout=60) as store:  # which keeps the job's life
        run_a_job(server.url, tmp_path)
        assert isinstance(store, RedisStore)
        assert (store.key, store.get("key", 0)) == ("{shoal:third}", b"value")
    assert server.ask("KEYS", "*") == []


def test_ranks_come_as_they_arrive_where_the_record_of_their_job_is_kept(
    server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    meet_by_arrival(server.url, tmp_path, monkeypatch)
    assert server.names("by arrival") == []
