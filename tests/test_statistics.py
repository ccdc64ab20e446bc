"""What ``group.stats()`` counts, and for whom a rank waits."""

from __future__ import annotations

import threading
from itertools import pairwise

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from shoal import ProcessGroup
from shoal._core import LATENCIES
from shoal.errors import OperationTimeout, UnsupportedOperation
from shoal.statistics import GroupStatistics, latency_of
from shoal.testing import run_threads

#: two hosts of two ranks each
HOSTS = ("a", "a", "b", "b")


def late_times(statistics: GroupStatistics) -> dict[int, int]:
    return {each.rank: each.times for each in statistics.late if each.times}


def test_operations_of_every_kind_are_counted_with_their_bytes_and_latencies() -> None:
    def rank(group: ProcessGroup) -> tuple[GroupStatistics, GroupStatistics]:
        x = torch.ones(10)
        group.all_reduce(x).wait()
        group.broadcast(x, root=0).wait()
        group.all_gather([torch.empty(10) for _ in range(3)], x).wait()
        group.barrier().wait()
        if group.rank == 0:
            group.send(x, 1).wait()
        elif group.rank == 1:
            group.recv(x, 0).wait()
        group.all_reduce(x).then(lambda _: group.all_reduce(x)).wait().wait()
        before = group.stats()
        group.all_reduce(x).wait()
        return before, group.stats()

    for number, (before, after) in enumerate(run_threads(rank, 3)):
        message = number < 2
        assert (before.completed, before.failed, before.pending) == (6 + message, 0, 0)
        assert before.bytes == 40 + 40 + 120 + 0 + 40 + 40 + 40 * message
        assert sum(before.latencies) == before.completed
        assert 0 < (before.latency(0.0) or 0) <= (before.latency() or 0) <= (before.latency(1.0) or 0) < 60
        assert after.completed == before.completed + 1
        assert after.bytes == before.bytes + 40


@pytest.mark.parametrize(
    ("hosts", "options"),
    [(None, {}), (None, {"transport": "tcp"}), (HOSTS, {})],
    ids=["one host", "over links", "two hosts"],
)
@pytest.mark.parametrize("late", [1, 3])
def test_the_rank_that_arrives_last_is_named_by_all_others(
    late: int, hosts: tuple[str, ...] | None, options: dict[str, str]
) -> None:
    """Also where an algorithm waits for another rank, which itself waited for the late one."""
    called = threading.Barrier(4)
    last = threading.Event()

    def rank(group: ProcessGroup) -> tuple[GroupStatistics, GroupStatistics]:
        group.barrier().wait()
        before = group.stats()
        for _ in range(3):
            called.wait(30)
            if group.rank == late:
                last.wait(0.05)  # nobody sets it: the others have time to wait
            group.barrier().wait()
            called.wait(30)
            if group.rank == late:
                last.wait(0.05)
            group.all_reduce(torch.ones(5)).wait()
        return before, group.stats()

    for number, (before, after) in enumerate(run_threads(rank, 4, hosts=hosts, **options)):
        named = late_times(after)
        for other, times in late_times(before).items():
            named[other] -= times
        named = {other: times for other, times in named.items() if times}
        waited = after.waited_s - before.waited_s
        assert number not in [each.rank for each in after.late]
        if number == late:
            assert waited < 0.2
        else:
            assert named == {late: 6}
            assert waited >= 0.25
            assert after.waits - before.waits >= 6
            assert after.late[0].rank == late


def test_an_operation_that_nobody_else_calls_is_pending_then_failed() -> None:
    def rank(group: ProcessGroup) -> GroupStatistics:
        if group.rank == 0:
            future = group.all_reduce(torch.ones(1), timeout=0.2)
            assert group.stats().pending == 1
            with pytest.raises(OperationTimeout):
                future.wait()
        else:
            group._submitter.channel.on_failure = None
            while group.state == "open":
                last.wait(0.01)
        return group.stats()

    last = threading.Event()
    alone, other = run_threads(rank, 2)
    assert (alone.completed, alone.failed, alone.pending) == (0, 1, 0)
    assert late_times(alone) == {}  # it never arrived
    assert [late.rank for late in alone.late] == [1]
    assert alone.late[0].seconds == pytest.approx(alone.waited_s)
    assert alone.waited_s >= 0.15
    assert alone.latency() is None
    assert (other.completed, other.failed, other.pending) == (0, 0, 0)


def test_a_backend_that_counts_nothing_says_so(store_backend: str) -> None:
    def rank(group: ProcessGroup) -> None:
        with pytest.raises(UnsupportedOperation, match=r"group 'world' on rank \d has no statistics"):
            group.stats()

    run_threads(rank, 2, backend=store_backend)


def test_buckets_cover_all_times() -> None:
    assert LATENCIES[0] == 0
    assert all(a < b <= max(256, 1.25 * a) for a, b in pairwise(LATENCIES))
    assert LATENCIES[-1] > 300e9


@given(st.lists(st.integers(0, len(LATENCIES) - 2), min_size=1), st.floats(0, 1))
def test_a_quantile_is_in_the_bucket_of_its_operation(buckets: list[int], quantile: float) -> None:
    counts = [buckets.count(bucket) for bucket in range(len(LATENCIES))]
    found = latency_of(counts, quantile)
    assert found is not None
    wanted = sorted(buckets)[min(int(quantile * len(buckets)), len(buckets) - 1)]
    below = sorted(buckets)[max(int(quantile * len(buckets)) - 1, 0)]
    assert LATENCIES[below] <= found * 1e9 * (1 + 1e-9)
    assert found * 1e9 <= LATENCIES[wanted + 1] * (1 + 1e-9)


def test_a_quantile_of_nothing_and_one_out_of_range() -> None:
    assert latency_of([0] * len(LATENCIES), 0.5) is None
    with pytest.raises(ValueError, match="quantile must be from 0 to 1, got 99"):
        latency_of([1], 99)
