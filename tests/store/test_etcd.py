"""A store in a real etcd."""

from __future__ import annotations

import itertools
import multiprocessing
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from shoal.errors import StoreError, StoreTimeout
from shoal.store import open_store
from shoal.store.etcd import gateway
from shoal.store.etcd import job as etcd_job
from shoal.store.etcd import store as etcd
from shoal.store.etcd.gateway import Gateway, JsonStream
from shoal.store.etcd.store import MAX_ETCD_KEY, MAX_ETCD_VALUE, EtcdStore
from shoal.store.external import job as external_job
from shoal.store.requests import Add, Append
from tests.support.etcd_server import EtcdServer, needs_etcd
from tests.support.ports import free_port
from tests.support.waiting import PATIENCE, until

from .conformance import StoreConformance, in_background
from .etcd_store import server, store
from .jobs import meet_by_arrival, run_a_job

__all__ = ["server", "store"]  # fixtures

pytestmark = needs_etcd

T = TypeVar("T")


class TestEtcdStore(StoreConformance):
    largest_value = MAX_ETCD_VALUE
    largest_at_once = MAX_ETCD_VALUE


# -- waiting -------------------------------------------------------------------------------------


def without_silence(
    store: EtcdStore, monkeypatch: pytest.MonkeyPatch, read: Callable[..., T], *args: Any
) -> T:
    """The result of a read that must not depend on a look at a watch that is silent."""
    monkeypatch.setattr(external_job, "WATCH_TIMEOUT_S", 1000.0)
    with in_background() as call:
        reading = call(read, *args, 1000.0)
        try:
            return reading.result(PATIENCE)
        except BaseException:
            store.close()  # or it would be waited for
            raise


def test_a_watch_that_breaks_is_begun_again(store: EtcdStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(external_job, "WATCH_TIMEOUT_S", 1000.0)
    streams = store._backing._streams
    with in_background() as call:
        getting, waiting = call(store.get, "key"), call(store.wait, ["key", "other"])
        for _ in range(3):
            until(lambda: len(streams) == 2)
            for stream in [*streams]:
                stream.shutdown()
                until(lambda stream=stream: stream not in streams)
        store.multi_set(["key", "other"], [b"value", b""])
        assert getting.result(30) == b"value"
        waiting.result(30)


def test_a_watch_from_a_revision_that_was_compacted_looks_again(
    server: EtcdServer, store: EtcdStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The key comes, and etcd forgets how, between a look and the watch."""
    stream, missed = Gateway.stream, []

    def late(self: Gateway, *args: Any) -> JsonStream:
        if not missed:
            store.set("key", b"value")
            missed.append(server.ask("kv/put", key=b"/beside", value=b"")["header"]["revision"])
            server.ask("kv/compaction", revision=missed[0])
        return stream(self, *args)

    monkeypatch.setattr(Gateway, "stream", late)
    assert without_silence(store, monkeypatch, store.get, "key") == b"value"
    assert missed


def test_what_comes_between_a_look_and_the_watch_is_seen(
    store: EtcdStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(etcd, "_MAX_OPERATIONS", 4)  # keys of one look
    read, keys, looks = etcd._EtcdBacking._read, [f"key {i}" for i in range(8)], []

    def reading(self: etcd._EtcdBacking, ranges: list[Any]) -> Any:
        found = read(self, ranges)
        looks.append(len(ranges))
        if len(looks) == 1:  # the other half has not been looked at
            store.set(keys[0], b"")
        return found

    store.multi_set(keys[1:5], [b""] * 4)
    store.multi_set(keys[5:], [b""] * 3)
    monkeypatch.setattr(etcd._EtcdBacking, "_read", reading)
    without_silence(store, monkeypatch, store.wait, keys)
    assert looks == [4, 4, 4, 4]


def test_a_document_may_come_in_pieces_and_several_in_one() -> None:
    class Response:
        def stream(self, amount: int) -> Iterator[bytes]:
            text = (
                '{"result":{"created":true}}\n{"result":{"events":[{"kv":{"key":"YQ=="}}]}}\n\n{"error":{}}\n'
            )
            yield from (text[i : i + 1].encode() for i in range(30))
            yield text[30:].encode()
            yield b'{"result":{"canceled"'

    import urllib3

    documents = JsonStream(Response(), urllib3).documents(etcd._Watched)  # type: ignore[arg-type]
    first, second, third = itertools.islice(documents, 3)
    assert (first.result.created, len(second.result.events), third.result.canceled) == (True, 1, True)
    with pytest.raises(etcd.StreamEnded, match="ended"):
        next(documents)


# -- limits --------------------------------------------------------------------------------------


def test_multi_set_is_one_step_or_an_error(store: EtcdStore) -> None:
    keys = [str(i) for i in range(127)]
    store.multi_set(keys, keys)
    assert store.multi_get(keys) == [key.encode() for key in keys]
    with pytest.raises(StoreError, match=r"128 keys and 6.. bytes.*at most 127 keys and 1048576 bytes"):
        store.multi_set([*keys, "one more"], ["new"] * 128)
    with pytest.raises(StoreError, match=r"2 keys and 1200002 bytes"):
        store.multi_set(["0", "1"], [bytes(600_000)] * 2)
    assert store.num_keys() == 127
    assert store.get("0") == b"0"


def test_many_keys_are_read_in_several_messages(store: EtcdStore) -> None:
    keys = [f"{'long' * 2000}{i:03}" for i in range(260)]
    for part in (keys[:100], keys[100:200], keys[200:]):
        store.multi_set(part, [key[-3:] for key in part])
    assert store.multi_get(keys) == [key[-3:].encode() for key in keys]
    assert store.list_keys() == keys
    with pytest.raises(StoreTimeout, match="and 244 more"):
        store.wait([key + "x" for key in keys], 0)


def test_values_too_long_for_one_step_are_appended_to_one_by_one(store: EtcdStore) -> None:
    for key in ("a", "b"):
        store.set(key, bytes(MAX_ETCD_VALUE - 1))
    assert store.together([Append("a", b"x"), Append("b", b"x"), Add("counter", 1)]) == [None, None, 1]
    assert [len(each) for each in store.multi_get(["a", "b"])] == [MAX_ETCD_VALUE] * 2


def test_the_longest_key_may_have_the_longest_value(store: EtcdStore) -> None:
    key = "k" * MAX_ETCD_KEY
    store.set(key, bytes(MAX_ETCD_VALUE))
    assert store.append(key, b"") is None
    assert store.compare_set(key, bytes(MAX_ETCD_VALUE), b"\1" * MAX_ETCD_VALUE)[0] == 1
    with pytest.raises(StoreError, match="a key of 16385 bytes"):
        store.set(key + "k", b"")


def test_a_full_database_is_named(tmp_path: Path) -> None:
    with (
        EtcdServer(tmp_path, "only", None, "--quota-backend-bytes", "3000000") as server,
        EtcdStore([server.address], timeout=60) as store,
    ):
        fill = (store.set(str(i), bytes(MAX_ETCD_VALUE)) for i in range(20))
        with pytest.raises(StoreError, match=r"etcd at 127.*is full \(NOSPACE\).*quota-backend-bytes"):
            list(fill)
        assert store.get("0", 0) == bytes(MAX_ETCD_VALUE)


def test_writes_that_fill_the_database_together_were_done_or_are_errors(tmp_path: Path) -> None:
    """etcd does those that were on their way when the others filled it, and answers that it is full."""
    value = bytes(MAX_ETCD_VALUE // 4)
    numbers = map(str, itertools.count())
    errors: dict[str, BaseException | None] = {}
    with (
        EtcdServer(tmp_path, "only", None, "--quota-backend-bytes", "3000000") as server,
        EtcdStore([server.address], timeout=60) as store,
        in_background() as call,
    ):
        while not any("NOSPACE" in str(each) for each in errors.values()):
            writes = {key: call(store.set, key, value) for key in itertools.islice(numbers, 32)}
            errors.update((key, each.exception(60)) for key, each in writes.items())
        there = set(store.list_keys())
    for key, error in errors.items():
        if not isinstance(error, StoreTimeout):  # with which a write may have been done
            assert (key in there) == (error is None), (key, error)


# -- servers -------------------------------------------------------------------------------------


def test_servers_are_tried_in_turn(server: EtcdServer, job: str) -> None:
    with EtcdStore([f"127.0.0.1:{free_port()}", server.address], job, timeout=60) as store:
        store.set("key", b"value")
        store._backing.job.client._at = 0  # it has answered last, say
        with in_background() as call:
            getting = call(store.get, "other")
            store.set("other", b"value")
            assert getting.result(30) == b"value"


def test_a_server_that_does_not_answer_is_passed_over(
    server: EtcdServer, job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway, "_FIRST_READ_TIMEOUT_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        servers = [f"127.0.0.1:{silent.getsockname()[1]}", server.address]
        with EtcdStore(servers, job, timeout=60) as store:
            store.set("key", b"value")
            assert store._backing.job.client.server == store.host + ":" + server.address.split(":")[1]


def test_servers_that_are_not_there_are_named() -> None:
    dead = [f"127.0.0.1:{free_port()}" for _ in range(2)]
    with pytest.raises(StoreTimeout, match=rf"etcd at {', '.join(dead)} did not answer within 0\.1 s \(Conn"):
        EtcdStore(dead, timeout=0.1)


def test_what_is_no_etcd_is_named(server: EtcdServer) -> None:
    with pytest.raises(StoreError, match=f"{server.peers} is not etcd .*404"):
        EtcdStore([server.peers], timeout=60)


def test_a_server_that_goes_away_for_good_is_an_error_in_words(tmp_path: Path) -> None:
    with EtcdServer(tmp_path) as server, EtcdStore([server.address], timeout=60) as store:
        store.set("key", b"value")
        server.kill()
        store.timeout = 0.1
        with pytest.raises(StoreTimeout, match=r"did not answer within 0\.1 s \(Conn.*nothing was sent"):
            store.set("key", b"new")
        with pytest.raises(StoreTimeout, match=r"waited 0\.1 s.*'key' \(as far as known: etcd at"):
            store.get("key")


# -- the lease -----------------------------------------------------------------------------------


def test_all_keys_are_on_the_lease_of_the_job(server: EtcdServer, store: EtcdStore) -> None:
    with EtcdStore([server.address], store._backing.job.name, timeout=60) as other, store.clone() as third:
        other.add("counter", 1)
        third.append("log", b"x")
        store.multi_set(["a", "b"], [b"1", b"2"])
        assert other.num_keys() == 4
    assert store.num_keys() == 4
    server.ask("lease/revoke", ID=store._backing.job.lease)
    assert server.count(store.prefix) == 0


def test_a_store_whose_lease_has_ended_says_so_and_begins_no_new_life(
    server: EtcdServer, store: EtcdStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.set("key", b"value")
    with in_background() as call:
        waiting = call(store.get, "never")
        until(lambda: store._backing._streams)
        server.ask("lease/revoke", ID=store._backing.job.lease)
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
            assert server.count(store.prefix) == 0
            other = EtcdStore([server.address], store._backing.job.name, timeout=60)
            other.set("key", b"of the new life")
    with other:
        assert other.list_keys() == ["key"]


def test_who_asks_for_it_gets_the_life_that_began_after(server: EtcdServer, store: EtcdStore) -> None:
    store.set("key", b"value")
    with store.clone(accept_new_data=True) as same:
        assert same.get("key") == b"value"
    server.ask("lease/revoke", ID=store._backing.job.lease)
    with (
        store.clone(accept_new_data=True) as first,
        store.clone(accept_new_data=True) as second,
        first.clone() as third,
    ):
        first.set("key", b"new")
        assert second.get("key") == third.get("key") == b"new"
    with pytest.raises(StoreError, match="keys have expired"):
        store.get("key", 0)


def test_the_lease_is_kept_alive(server: EtcdServer, job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, keep_once = threading.Semaphore(0), etcd_job.EtcdJob._keep_once

    def noting(*args: Any) -> bool:
        lives = keep_once(*args)
        kept.release()
        return lives

    monkeypatch.setattr(etcd_job.EtcdJob, "_keep_once", noting)
    monkeypatch.setattr(external_job, "KEEP_ALIVE_INTERVAL_S", 0.01)
    with EtcdStore([server.address], job, timeout=60) as store:
        for _ in range(3):
            assert kept.acquire(timeout=60)
        store.set("key", b"")


def _hold(address: str, job: str, ready: Any) -> None:
    external_job.KEY_TTL_S = 5.0
    store = EtcdStore([address], job, timeout=60)
    store.set("key", b"value")
    ready.send(None)
    store.get("never", 600)


def test_nothing_is_left_when_all_processes_were_killed(server: EtcdServer, job: str) -> None:
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    processes = [context.Process(target=_hold, args=(server.address, job, there)) for _ in range(2)]
    prefix = f"/shoal/{job.replace(' ', '%20')}/"
    with here, there:
        try:
            for process in processes:
                process.start()
            for _ in processes:
                assert here.poll(60)
                here.recv()
            assert server.count(prefix) >= 3
        finally:
            for process in processes:
                process.kill()
                process.join()
                process.close()
    until(lambda: server.count(prefix) == 0)


# -- where it is named ---------------------------------------------------------------------------


def test_it_may_be_named_wherever_a_store_is(
    server: EtcdServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"etcd://127.0.0.1:{free_port()},{server.address}"
    run_a_job(url, tmp_path)
    monkeypatch.setenv("SHOAL_JOB", "third")
    with open_store(url, timeout=60) as store:
        assert isinstance(store, EtcdStore)
        assert (store.prefix, store.get("key")) == ("/shoal/third/", b"value")


def test_ranks_come_as_they_arrive_where_the_record_of_their_job_is_kept(
    server: EtcdServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    meet_by_arrival(f"etcd://{server.address}", tmp_path, monkeypatch)
