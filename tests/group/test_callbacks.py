"""Collectives issued in callbacks, whose order differs from rank to rank."""

from __future__ import annotations

import random
import time

import pytest
import torch

from shoal.future import Future, wait_all
from shoal.group import ProcessGroup
from shoal.testing import run_threads
from tests.support.topologies import TOPOLOGIES, topology_options

ROUNDS = 300
BURST = 20
SIZE = 3


@pytest.mark.concurrency
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_equal_collectives_of_callbacks_and_main_thread_never_mix(topology: str) -> None:
    def race(group: ProcessGroup) -> None:
        delay = random.Random(group.rank)

        def nested(done: Future[torch.Tensor]) -> torch.Tensor:
            time.sleep(delay.random() * 0.0005)
            x = done.value() + group.rank
            return group.all_reduce(x).wait()

        for start in range(0, ROUNDS, BURST):
            values = range(start, start + BURST)
            chained = [group.all_reduce(torch.tensor([v])).then(nested) for v in values]
            time.sleep(delay.random() * 0.0005)
            plain = [group.all_reduce(torch.tensor([-v])) for v in values]
            assert [x.item() for x in wait_all(plain)] == [-v * SIZE for v in values]
            expected = [v * SIZE * SIZE + sum(range(SIZE)) for v in values]
            assert [x.item() for x in wait_all(chained)] == expected

    run_threads(race, SIZE, timeout=120, **topology_options(topology, SIZE))


@pytest.mark.concurrency
def test_a_callback_issues_several_operations_and_waits_for_them_at_any_depth() -> None:
    def deep(group: ProcessGroup) -> int:
        def level(depth: int, done: Future[torch.Tensor]) -> int:
            if depth == 0:
                return int(done.value())
            futures = [group.all_reduce(done.value() + i) for i in range(3)]
            return sum(wait_all([future.then(lambda f: level(depth - 1, f)) for future in futures]))

        return group.all_reduce(torch.tensor(1)).then(lambda f: level(3, f)).wait()

    def expected(depth: int, value: int) -> int:
        return value if depth == 0 else sum(expected(depth - 1, (value + i) * SIZE) for i in range(3))

    assert run_threads(deep, SIZE, timeout=60) == [expected(3, SIZE)] * SIZE


@pytest.mark.concurrency
def test_callbacks_of_one_group_use_another() -> None:
    def across(group: ProcessGroup) -> None:
        part = group.split(0)
        assert part is not None
        chained = [
            own.all_reduce(torch.tensor([i])).then(lambda f, other=other: other.all_reduce(f.value()).wait())
            for i in range(50)
            for own, other in ((group, part), (part, group), (part, part))
        ]
        assert [x.item() for x in wait_all(chained)] == [i * 4 for i in range(50) for _ in range(3)]
        part.close()

    run_threads(across, 2, timeout=60)
