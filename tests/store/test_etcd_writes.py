"""Writes to a store in a real etcd: each is done once, whatever becomes of its answer, and in one step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest

from shoal.errors import StoreError, StoreTimeout
from shoal.net import Deadline
from shoal.store.etcd import store as etcd
from shoal.store.etcd.gateway import DatabaseFull, Gateway, OutcomeUnknown
from shoal.store.etcd.job import TransactionReply, at, put
from shoal.store.etcd.store import Changes, EtcdStore
from shoal.store.requests import Add, Append, CompareSet, Set
from shoal.testing import linearize
from tests.support.etcd_server import EtcdServer, needs_etcd

from .conformance import in_background
from .etcd_store import server, store
from .losses import Losses

__all__ = ["server", "store"]  # fixtures

pytestmark = needs_etcd

SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.stress) for seed in range(1, 8))]


def lose_answers(monkeypatch: pytest.MonkeyPatch, every: int) -> None:
    """Lose every ``every``-th answer to a write, half of them before the server has heard of it."""
    losses, call = Losses(every, OutcomeUnknown), Gateway.call

    def calling(self: Gateway, path: str, *args: Any, writes: bool = False) -> Any:
        ask = partial(call, self, path, *args, writes=writes)
        return losses.of(ask) if writes else ask()

    monkeypatch.setattr(Gateway, "call", calling)


@pytest.mark.parametrize("seed", SEEDS)
def test_it_is_linearizable(seed: int, store: EtcdStore) -> None:
    linearize.play(store, seed=seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_it_is_linearizable_though_answers_are_lost(
    seed: int, store: EtcdStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    lose_answers(monkeypatch, every=4)
    linearize.play(store, seed=seed)


def test_a_store_that_does_not_note_its_writes_is_found_out(
    store: EtcdStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    lose_answers(monkeypatch, every=4)
    settle = etcd._EtcdBacking._resolve_outcome
    monkeypatch.setattr(etcd._EtcdBacking, "_resolve_outcome", lambda *args: (settle(*args)[0], False))
    with pytest.raises(AssertionError, match="no order of its"):
        linearize.play(store)


@contextmanager
def first_answer_lost(
    monkeypatch: pytest.MonkeyPatch,
    *,
    done: bool,
    meanwhile: Callable[[], object] = bool,
    answer: Exception | None = None,
) -> Iterator[Callable[[], bool]]:
    """Lose the answer to the first write, which was done, or is on the way until the function is called.

    ``meanwhile`` is called before it is known that the answer was lost, or is ``answer``; the function says
    whether the write is done then.
    """
    call, held = Gateway.call, []

    def calling(self: Gateway, *args: Any, writes: bool = False) -> Any:
        if writes and not held:
            held.append((self, *args))
            if done:
                call(*held[0])
            meanwhile()
            raise answer or OutcomeUnknown("on the way for long")
        return call(self, *args, writes=writes)

    with monkeypatch.context() as patch:
        patch.setattr(Gateway, "call", calling)
        yield lambda: call(*held[0]).succeeded


def test_a_write_that_arrives_late_does_nothing(store: EtcdStore, monkeypatch: pytest.MonkeyPatch) -> None:
    with first_answer_lost(monkeypatch, done=False) as arrives:
        store.set("key", b"old")
    store.set("key", b"new")
    assert not arrives()
    assert store.get("key") == b"new"


def test_a_write_that_arrives_after_it_was_refused_does_nothing(
    store: EtcdStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though the key holds again what it held when the write was sent."""
    store.add("counter", 1)
    with store.clone() as other:
        text = partial(other.set, "counter", b"text")
        with (
            first_answer_lost(monkeypatch, done=False, meanwhile=text) as arrives,
            pytest.raises(StoreError, match="no counter"),
        ):
            store.add("counter", 1)
        other.delete("counter")
        other.add("counter", 1)
        assert not arrives()
        assert store.get("counter") == b"1"
        taken = partial(other.set, "lock", b"other")
        with first_answer_lost(monkeypatch, done=False, meanwhile=taken) as arrives:
            assert store.compare_set("lock", b"", b"mine") == b"other"
        other.delete("lock")
        assert not arrives()
        assert not store.check(["lock"])


def is_fence(transaction: Any, writes: bool = False) -> bool:
    """Whether it writes, and may be repeated all the same."""
    return not writes and any("request_put" in each for each in transaction["success"])


@pytest.mark.parametrize("done", [False, True])
def test_a_fence_may_arrive_twice(done: bool, store: EtcdStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first answer is lost too, and the second one meets what it has put there."""
    store.add("counter", 1)
    with first_answer_lost(monkeypatch, done=done) as arrives:
        call = Gateway.call

        def twice(self: Gateway, path: str, body: Any, *args: Any, **how: Any) -> Any:
            if is_fence(body, **how):
                call(self, path, body, *args, **how)
            return call(self, path, body, *args, **how)

        monkeypatch.setattr(Gateway, "call", twice)
        assert store.add("counter", 1) == 2
        assert not arrives()
    assert store.get("counter") == b"2"


@contextmanager
def full(monkeypatch: pytest.MonkeyPatch, *, fills: bool) -> Iterator[None]:
    """Fences are answered that the database is full, and done all the same if they fill it."""
    call = Gateway.call

    def calling(self: Gateway, path: str, body: Any, *args: Any, **how: Any) -> Any:
        fence = path == "kv/txn" and is_fence(body, **how)
        if fills or not fence:
            answer = call(self, path, body, *args, **how)
        if fence:
            raise DatabaseFull("its database is full")
        return answer

    with monkeypatch.context() as patch:
        patch.setattr(Gateway, "call", calling)
        yield


@pytest.mark.parametrize("done", [False, True])
def test_where_no_fence_is_taken_it_is_said_what_is_known(
    done: bool, store: EtcdStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.add("counter", 1)
    with first_answer_lost(monkeypatch, done=done), full(monkeypatch, fills=False):
        if done:
            assert store.add("counter", 1) == 2
        else:
            with pytest.raises(StoreTimeout, match="database is full; it is unknown whether"):
                store.add("counter", 1)


def test_a_fence_that_fills_the_database_counts(store: EtcdStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.add("counter", 1)
    with first_answer_lost(monkeypatch, done=False) as arrives, full(monkeypatch, fills=True):
        assert store.add("counter", 1) == 2
        assert not arrives()
    assert store.get("counter") == b"2"


@pytest.mark.parametrize("done", [False, True])
def test_a_write_that_fills_the_database_is_told_from_one_that_was_not_done(
    done: bool, store: EtcdStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.add("counter", 1)
    with first_answer_lost(monkeypatch, done=done, answer=DatabaseFull("its database is full")):
        if done:
            assert store.add("counter", 1) == 2
        else:
            with pytest.raises(DatabaseFull):
                store.add("counter", 1)
    assert store.get("counter") == (b"2" if done else b"1")


def test_what_nobody_says_of_a_write_to_a_full_database_is_unknown(
    store: EtcdStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def calling(self: Gateway, *args: Any, writes: bool = False) -> Any:
        raise DatabaseFull("its database is full") if writes else StoreTimeout("no server did answer")

    with monkeypatch.context() as patch:
        patch.setattr(Gateway, "call", calling)
        with pytest.raises(StoreTimeout, match="database is full; it is unknown whether"):
            store.set("key", b"value")


@pytest.mark.parametrize("done", [False, True])
def test_a_job_that_fills_the_database_has_begun(
    done: bool, server: EtcdServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = Gateway.call

    def calling(self: Gateway, *args: Any, writes: bool = False) -> Any:
        if not writes:
            return call(self, *args)
        if done:
            call(self, *args)
        raise DatabaseFull("its database is full")

    monkeypatch.setattr(Gateway, "call", calling)
    if done:
        EtcdStore([server.address], "begins", timeout=60).close()
    else:
        with pytest.raises(DatabaseFull):
            EtcdStore([server.address], "does not begin", timeout=60)


def test_after_a_lost_answer_another_server_is_asked(
    store: EtcdStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway = store._backing.job.client
    monkeypatch.setattr(gateway, "_urls", [gateway._urls[0], "http://another:1"])
    monkeypatch.setattr(gateway, "_request", lambda *args: (_ for _ in ()).throw(OutcomeUnknown("lost")))
    with pytest.raises(OutcomeUnknown):
        gateway.call("kv/txn", {}, TransactionReply, Deadline(1), store._backing.closed, writes=True)
    assert gateway.server == "another:1"
    monkeypatch.undo()
    gateway._at = 0


def test_a_write_without_time_for_a_second_attempt_was_not_done(
    store: EtcdStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.add("counter", 1)
    hasty = store.clone(timeout=0.0)
    with hasty, first_answer_lost(monkeypatch, done=False) as arrives:
        with pytest.raises(StoreTimeout, match="on the way for long; it was not done"):
            hasty.add("counter", 1)
        assert not arrives()
    assert store.get("counter") == b"1"


def test_a_total_is_known_though_the_answer_is_lost(
    server: EtcdServer, store: EtcdStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forget() -> None:
        revision = server.ask("kv/put", key=b"/beside", value=b"")["header"]["revision"]
        server.ask("kv/compaction", revision=revision)

    def count_and_forget() -> None:
        other.add("counter", 1)
        forget()

    store.add("counter", 1)
    with store.clone() as other:
        with first_answer_lost(monkeypatch, done=True, meanwhile=forget):
            assert store.add("counter", 1) == 2
        with first_answer_lost(monkeypatch, done=True, meanwhile=partial(other.add, "counter", 1)):
            assert store.add("counter", 1) == 3
        with (
            first_answer_lost(monkeypatch, done=True, meanwhile=count_and_forget),
            pytest.raises(StoreError, match=r"was done, but its result is not known: .*compacted"),
        ):
            store.add("counter", 1)
    assert store.get("counter") == b"6"


def test_the_number_of_keys_that_were_removed_is_known_though_the_answer_is_lost(
    store: EtcdStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.multi_set(["a/1", "a/2", "b"], [b"", b"", b""])
    with first_answer_lost(monkeypatch, done=True):
        assert store.delete_prefix("a/") == 2
    assert store.list_keys() == ["b"]


def test_what_is_done_together_is_one_transaction(store: EtcdStore) -> None:
    store.together([Set("a", b""), Add("b", 1), Append("c", b"x"), CompareSet("d", b"", b"x")])
    found = store._backing._read([at(store._backing._name(key)) for key in "abcd"])
    assert len({each.only.mod_revision for each in found}) == 1


@pytest.mark.parametrize("every", [0, 3])
def test_those_who_count_do_not_come_between_each_other(
    every: int, store: EtcdStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert store.add("counter", 5) == 5
    store.add("counter", -4)
    store.add("counter", 1)
    if every:
        lose_answers(monkeypatch, every)
    refused: list[str] = []
    monkeypatch.setattr(etcd._EtcdBacking, "swap_failed", lambda self, key, times: refused.append(key))

    def count(number: int) -> list[int]:
        totals = []
        with store.clone() as mine:
            for _ in range(10):
                totals.append(mine.add("counter", 1))
                totals.append(mine.together([Set(f"here/{number}", b""), Add("counter", 1)])[1])
        return totals

    with in_background() as call:
        found = [total for each in [call(count, number) for number in range(6)] for total in each.result(60)]
    assert sorted(found) == list(range(3, 123))
    assert store.get("counter") == b"122"
    assert every or not refused


def test_what_cannot_be_counted_up_is_changed_as_other_values(store: EtcdStore) -> None:
    for amount in (2**62, 1, 2**62 - 2, -(2**40), 2**40):
        store.add("counter", amount)
    assert store.get("counter") == b"%d" % (2**63 - 1)
    with pytest.raises(StoreError, match="does not fit in 64 bits"):
        store.add("counter", 1)
    store._backing._write(lambda _: Changes([put(store._backing._name("odd"), b"\0+x", 0)]))
    assert store.get("odd") == b"\0+x"  # nobody of ours has written that
