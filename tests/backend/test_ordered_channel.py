"""A channel that takes operations in one order only sees one order on every rank, whatever callbacks do."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from shoal.backend.registry import register_backend, unregister_backend
from shoal.errors import (
    CollectiveMismatch,
    GroupAborted,
    GroupClosed,
    OperationTimeout,
    RemoteError,
    UnsupportedOperation,
)
from shoal.future import Future, wait_all
from shoal.group import ProcessGroup, ordered_channel
from shoal.spec import Operation
from shoal.testing import run_threads
from tests.support.waiting import until

pytestmark = pytest.mark.concurrency

#: What the channel of a rank was given, in order: (name of the group, rank) -> (number, key) of operations.
Seen = dict[tuple[str, int], list[tuple[int, int]]]


@pytest.fixture
def seen(third_party_package: None) -> Iterator[Seen]:
    """The backend "ordered", and what its channels see."""
    from .ordered_mailbox import OrderedBackend, seen

    seen.clear()
    register_backend("ordered", OrderedBackend)
    yield seen
    unregister_backend("ordered")


def _busy(group: ProcessGroup, rounds: int) -> list[float]:
    """Numbered operations, and operations in callbacks that begin when chance has it."""
    rng = random.Random(group.rank)
    results = []

    def again(weight: int) -> Any:
        def run(future: Future[torch.Tensor]) -> float:
            time.sleep(rng.random() * 2e-3)
            first = group.all_reduce(future.value() * weight)
            second = group.all_reduce(torch.full((1,), float(weight)), op="max")
            return float(first.wait() + second.wait())

        return run

    for number in range(rounds):
        future = group.all_reduce(torch.full((1,), float(number)))
        results += [future.then(again(weight)) for weight in (1, 2, 3)]
        results.append(future.then(again(5)).then(lambda f: f.value()))
    return [result.wait(60) for result in results]


def test_operations_of_callbacks_come_in_one_order_on_all_ranks(
    seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ordered_channel, "_KEYS_PER_PAGE", 8)
    values = run_threads(_busy, 3, 12, backend="ordered", timeout=60)
    assert values[0] == values[1] == values[2]
    assert values[0] == [9.0 * n * w + w for n in range(12) for w in (1, 2, 3, 5)]
    for name, kept in (("world", 12), ("world/callbacks", 12 * 4 * 2)):
        orders = [seen[name, rank] for rank in range(3)]
        assert orders[0] == orders[1] == orders[2]
        assert len(orders[0]) == kept
    assert all(key == 0 for _, key in seen["world", 0])


def test_the_keys_of_the_past_are_removed_from_the_store(seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ordered_channel, "_KEYS_PER_PAGE", 8)

    def count(group: ProcessGroup) -> None:
        _busy(group, 6)
        group.barrier().wait()
        # The last ones are removed after their operations are complete.
        until(lambda: not group.store.list_keys("callbacks/"))
        group.barrier().wait()  # a rank that leaves writes a key that says so

    run_threads(count, 2, backend="ordered", timeout=60)


def test_an_operation_of_a_callback_that_rank_0_never_issues_is_given_up(seen: Seen) -> None:
    def alone(group: ProcessGroup) -> None:
        future = group.all_reduce(torch.ones(1))
        future.then(lambda f: group.all_reduce(f.value()).wait()).wait(30)
        if group.rank == 1:
            future.then(lambda f: group.all_reduce(f.value(), timeout=0.3).wait()).wait(30)
        else:
            group.store.get("over", timeout=30)

    def until_over(group: ProcessGroup) -> None:
        try:
            alone(group)
        finally:
            group.store.set("over", "")

    with pytest.raises(RemoteError, match="rank 0 did not issue it") as caught:
        run_threads(until_over, 2, backend="ordered", timeout=60)
    assert OperationTimeout.__name__ in str(caught.value)


def test_a_rank_0_that_closes_ends_what_it_will_not_issue(seen: Seen) -> None:
    def leave(group: ProcessGroup) -> None:
        future = group.all_reduce(torch.ones(1))
        future.wait()
        if group.rank == 1:
            with pytest.raises(GroupClosed, match="rank 0 closed the group"):
                future.then(lambda f: group.all_reduce(f.value()).wait()).wait(30)

    run_threads(leave, 2, backend="ordered", timeout=60)


@pytest.mark.parametrize("waiting", [0, 1])
@pytest.mark.parametrize("aborting", [0, 1])
def test_an_abort_ends_what_waits_for_its_turn(seen: Seen, waiting: int, aborting: int) -> None:
    issued, ended = threading.Event(), threading.Event()

    def abort(group: ProcessGroup) -> None:
        future = group.all_reduce(torch.ones(1))
        future.wait()
        if group.rank == waiting:

            def issue(f: Future[torch.Tensor]) -> object:
                waits = group.all_reduce(f.value())
                issued.set()
                return waits.wait()

            waits = future.then(issue)
        assert issued.wait(30)
        if group.rank == aborting:
            group.abort("enough")
        if group.rank == waiting:
            with pytest.raises(GroupAborted):
                waits.wait(30)
            ended.set()
        assert ended.wait(40)  # before anybody closes the group

    run_threads(abort, 2, backend="ordered", timeout=60)


def test_what_a_channel_does_not_support_is_refused_in_words(seen: Seen) -> None:
    def refuse(group: ProcessGroup) -> float:
        for call in (
            lambda: group.all_reduce(torch.ones(1, dtype=torch.int8)),
            lambda: group.recv(torch.ones(1, dtype=torch.int8), 1 - group.rank),
        ):
            with pytest.raises(
                UnsupportedOperation, match=f"rank {group.rank} cannot do (all_reduce|recv) of"
            ):
                call()
        return float(group.all_reduce(torch.ones(1)).wait())

    assert run_threads(refuse, 2, backend="ordered", timeout=60) == [2.0, 2.0]


def test_messages_of_a_batch_are_handed_over_together(monkeypatch: pytest.MonkeyPatch) -> None:
    from shoal_mailbox.channel import MailboxChannel

    batches: list[int] = []
    submit_all = MailboxChannel.submit_all

    def counted(channel: Any, operations: list[Operation]) -> list[Future[Any]]:
        batches.append(len(operations))
        return submit_all(channel, operations)

    monkeypatch.setattr(MailboxChannel, "submit_all", counted)

    def exchange(group: ProcessGroup) -> float:
        theirs = torch.empty(1)
        with group.batch() as batch:
            batch.send(torch.full((1,), float(group.rank)), 1 - group.rank)
            batch.recv(theirs, 1 - group.rank)
        wait_all(batch.futures, 30)
        return float(theirs)

    assert run_threads(exchange, 2, backend="mailbox", timeout=60) == [1.0, 0.0]
    assert batches == [2, 2]


@pytest.mark.parametrize("connected", [True, False])
def test_a_failure_of_numbered_operations_ends_those_of_callbacks(seen: Seen, connected: bool) -> None:
    """At once, whether an operation has begun, connects the channel or waits for its turn."""

    def fail(group: ProcessGroup) -> None:
        future = group.all_reduce(torch.ones(1))
        if connected:
            future.then(lambda f: group.barrier().wait()).wait(30)
        issued = threading.Event()

        def issue(f: Future[torch.Tensor]) -> object:
            begins = group.all_reduce(f.value())
            issued.set()
            return begins.wait()

        if group.rank == 1:
            future.then(lambda f: None)  # so its operation is not the one that rank 0 begins
        waits = future.then(issue)
        assert issued.wait(30)
        while connected and len(seen["world/callbacks", 0]) < 2:  # rank 0's operation has begun
            time.sleep(1e-3)
        numbered = group.all_reduce(torch.ones(1 + group.rank))
        with pytest.raises(CollectiveMismatch):
            numbered.wait(30)
        with pytest.raises(CollectiveMismatch, match="the ranks disagree on operation number 2"):
            waits.wait(30)
        assert group.state == "broken"

    run_threads(fail, 2, backend="ordered", timeout=60)


def test_a_failure_of_operations_of_callbacks_ends_numbered_ones(seen: Seen) -> None:
    def fail(group: ProcessGroup) -> None:
        future = group.all_reduce(torch.ones(1))
        numbered = group.recv(None, 1 - group.rank)
        if group.rank == 1:
            late = future.then(lambda f: group.all_reduce(f.value(), timeout=0.2).wait())
            with pytest.raises(OperationTimeout, match="rank 0 did not issue it"):
                late.wait(30)
        with pytest.raises(GroupAborted, match=r"rank 1 aborted the group: .* rank 0 did not issue it"):
            numbered.wait(30)
        with pytest.raises(GroupAborted if group.rank == 0 else OperationTimeout, match="did not issue it"):
            group.barrier()

    run_threads(fail, 2, backend="ordered", timeout=60)
