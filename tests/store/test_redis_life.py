"""How long the keys of a job live in a real Redis, what its end is, and where it is named."""

from __future__ import annotations

import multiprocessing
import socket
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest

from shoal.errors import StoreError, StoreTimeout
from shoal.store import open_store
from shoal.store.external import job as external_job
from shoal.store.redis import connection as redis_link
from shoal.store.redis.job import RedisJob
from shoal.store.redis.store import RedisStore
from tests.support.ports import free_port
from tests.support.redis_server import DURABLE, RedisServer, needs_redis
from tests.support.waiting import until

from .conformance import in_background
from .jobs import lose_a_rank_and_let_another_join, meet_by_arrival, run_a_job
from .redis_store import server, store

__all__ = ["server", "store"]  # fixtures

pytestmark = [needs_redis, pytest.mark.filterwarnings("ignore:Redis at .* may lose changes")]


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
    monkeypatch.setattr(external_job, "WATCH_TIMEOUT_S", 0.05)
    store.set("key", b"value")
    with in_background() as call:
        waiting = call(store.get, "never")
        until(lambda: store._backing._streams)
        server.ask("PEXPIRE", store.key, 0)
        with pytest.raises(StoreError, match=r"keys have expired.*for 60 s.*suspended"):
            waiting.result(30)
    for again in range(2):
        for operation in (
            lambda: store.set("key", b""),
            lambda: store.add("counter", 1),
            lambda: store.multi_get(["key", "other"], 0),
            lambda: store.num_keys(),
            lambda: store.delete_prefix(""),
        ):
            with pytest.raises(StoreError, match="keys have expired"):
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
    with store.clone(accept_new_data=True) as same:
        assert same.get("key") == b"value"
    server.ask("DEL", store.key)
    with (
        store.clone(accept_new_data=True) as first,
        store.clone(accept_new_data=True) as second,
        first.clone() as third,
    ):
        first.set("key", b"new")
        assert second.get("key") == third.get("key") == b"new"
    with pytest.raises(StoreError, match="keys have expired"):
        store.get("key", 0)


def test_the_keys_are_kept_alive(server: RedisServer, job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, keep = threading.Semaphore(0), RedisJob._keep_alive

    def noting(*args: Any) -> bool:
        lives = keep(*args)
        kept.release()
        return lives

    monkeypatch.setattr(RedisJob, "_keep_alive", noting)
    monkeypatch.setattr(external_job, "KEEP_ALIVE_INTERVAL_S", 0.01)
    with RedisStore(server.address, job, timeout=60) as store:
        server.ask("PEXPIRE", store.key, 50_000)
        while kept.acquire(blocking=False):
            pass  # before that
        for _ in range(3):  # one may have been under way
            assert kept.acquire(timeout=60)
        assert server.ask("PTTL", store.key) > 50_000
        store.set("key", b"")


def _hold(address: str, job: str, ready: Any) -> None:
    external_job.KEY_TTL_S = 5.0
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
    monkeypatch.setattr(redis_link, "_REPLY_MARGIN_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(StoreTimeout, match=r"did not answer within 0\.1 s \(Timeout reading"):
            RedisStore(address, timeout=0.1)


def test_a_server_that_goes_away_for_good_is_an_error_in_words(tmp_path: Path) -> None:
    with RedisServer(tmp_path) as server, RedisStore(server.address, timeout=60) as store:
        store.set("key", b"value")
        server.kill()
        store.timeout = 1.0
        with pytest.raises(StoreTimeout, match=r"did not answer within 1 s \(Conn.*, \d+ times\); noth"):
            store.set("key", b"new")
        store.timeout = 0.1
        with pytest.raises(StoreTimeout, match=r"waited 0\.1 s.*'key' \(as far as known: Redis at"):
            store.get("key")


def test_what_became_of_a_write_whose_answer_was_lost_is_said_to_be_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_link, "_REPLY_MARGIN_S", 0.05)
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
        with warnings.catch_warnings(), store, store.clone():
            warnings.simplefilter("error")
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


@pytest.mark.stress
def test_a_session_loses_a_rank_and_another_joins(server: RedisServer, tmp_path: Path) -> None:
    lose_a_rank_and_let_another_join(server.url, tmp_path)
