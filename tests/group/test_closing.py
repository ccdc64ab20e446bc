"""Closing waits for what can still be completed, and for nothing else."""

from __future__ import annotations

import gc
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from shoal import Future, GroupClosed
from shoal.group import ProcessGroup
from shoal.testing import run_threads
from tests.support.topologies import TOPOLOGIES, topology_options

#: seconds that a close may take which waits in vain; a close that does not is far from it
LONG = 60.0
LARGE = 300_000  # elements: more than travels before its receiver has asked for it


def on_ranks(
    fn: Callable[[ProcessGroup], Any], topology: str, size: int, *, together: bool = True
) -> list[Any]:
    """``together``: nobody closes before all have submitted what they submit."""
    submitted = threading.Barrier(size)

    def timed(group: ProcessGroup) -> Any:
        value = fn(group)
        if together:
            submitted.wait(LONG)
            time.sleep(random.choice((0.0, 0.001, 0.004)))
        before = time.monotonic()
        group.world.close(LONG)
        assert time.monotonic() - before < LONG / 2, "it waited in vain"
        return value() if callable(value) else value

    return run_threads(timed, size, timeout=3 * LONG, **topology_options(topology, size))


def ends_in_vain(*futures: Future[Any]) -> Callable[[], None]:
    def check() -> None:
        for future in futures:
            with pytest.raises(GroupClosed):
                future.wait()

    return check


@pytest.fixture(params=TOPOLOGIES)
def topology(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_receives_that_nobody_sends_to_end_at_once(topology: str) -> None:
    def fn(group: ProcessGroup) -> Callable[[], None]:
        others = [rank for rank in range(group.size) if rank != group.rank]
        named = [group.recv(torch.empty(5), rank) for rank in others]
        return ends_in_vain(*named, group.recv(), group.recv(torch.empty(LARGE), tag=3))

    on_ranks(fn, topology, 3)


def test_a_group_of_one_has_nobody_to_wait_for() -> None:
    on_ranks(lambda group: ends_in_vain(group.recv()), "shm", 1)


def test_large_messages_that_nobody_receives_end_at_once(topology: str) -> None:
    def fn(group: ProcessGroup) -> Callable[[], None]:
        others = [rank for rank in range(group.size) if rank != group.rank]
        return ends_in_vain(*(group.send(torch.ones(LARGE), rank) for rank in others))

    on_ranks(fn, topology, 3)


def test_operations_that_some_never_submit_end_at_once(topology: str) -> None:
    def fn(group: ProcessGroup) -> Callable[[], None]:
        # Rank 0 waits for a message of rank 1, which waits for rank 0 in a collective.
        if group.rank == 0:
            return ends_in_vain(group.recv(torch.empty(2), 1))
        return ends_in_vain(group.all_reduce(torch.ones(LARGE)), group.barrier())

    on_ranks(fn, topology, 3)


def test_what_a_late_rank_still_sends_arrives(topology: str) -> None:
    early = threading.Barrier(3)

    def fn(group: ProcessGroup) -> Callable[[], None]:
        if group.rank == 2:
            early.wait(LONG)
            time.sleep(random.uniform(0.0, 0.1))
            futures = [group.send(torch.full((n,), 7.0), dst) for n in (3, LARGE) for dst in (0, 1)]
            ends = []
        else:
            futures = [group.recv(torch.empty(n), src) for n, src in ((3, 2), (LARGE, -1))]
            ends = [group.recv(torch.empty(1), 2), group.recv(tag=9)]
            early.wait(LONG)

        def check() -> None:
            for future in futures:
                value = future.wait()
                assert value is None or value.eq(7).all()
            ends_in_vain(*ends)()

        return check

    on_ranks(fn, topology, 3, together=False)


def test_so_do_the_groups_that_a_world_closes_in_any_order(topology: str) -> None:
    def fn(group: ProcessGroup) -> Callable[[], None]:
        # Each waits in a group for a rank that waits for it in another group.
        first, second = group.subgroup([0, 1], "first"), group.subgroup([0, 1], "second")
        waits = first if group.rank == 0 else second
        in_vain = ends_in_vain(waits.recv(torch.empty(1), 1 - group.rank), group.recv())

        def check() -> None:
            assert first.state == second.state == "closed"
            in_vain()

        return check

    on_ranks(fn, topology, 2)


def closing_at_random(topology: str, size: int, seed: int) -> None:
    """Messages and collectives at random, some without a counterpart; each ends as it must."""
    script = random.Random(seed)
    kinds = script.choices(["matched", "large", "any", "lonely recv", "lonely send", "reduce"], k=8)
    pairs = [script.sample(range(size), 2) for _ in kinds]
    missing = script.randrange(size) if script.random() < 0.5 else -1  # leaves out the last collectives

    def fn(group: ProcessGroup) -> Callable[[], None]:
        own = random.Random(seed * 31 + group.rank)
        good: list[tuple[Future[Any], float]] = []
        vain: list[Future[Any]] = []
        for tag, (kind, (source, target)) in enumerate(zip(kinds, pairs, strict=True)):
            if own.random() < 0.3:
                time.sleep(own.uniform(0.0, 0.003))
            count = LARGE if kind == "large" else 50
            if kind == "reduce":
                good.append((group.all_reduce(torch.ones(5000)), float(group.size)))
            elif kind == "lonely recv" and group.rank == target:
                vain.append(group.recv(torch.empty(4), own.choice((source, -1)), tag))
            elif kind == "lonely send" and group.rank == source:
                vain.append(group.send(torch.ones(LARGE), target, tag))
            elif kind in ("matched", "large", "any") and group.rank == source:
                good.append((group.send(torch.full((count,), 2.0), target, tag), 2.0))
            elif kind in ("matched", "large", "any") and group.rank == target:
                where = -1 if kind == "any" else source
                good.append((group.recv(torch.empty(count), where, tag), 2.0))
        if missing >= 0 and group.rank != missing:
            vain += [group.all_reduce(torch.ones(n)) for n in (10, LARGE)]
        # So no rank has left before all close: who still goes on would rightly break its group over that.
        vain += [group.recv(tag=99), *(group.recv(None, r, 100) for r in range(size) if r != group.rank)]

        def check() -> None:
            for future, expected in good:
                value = future.wait()
                assert value is None or value.eq(expected).all()
            ends_in_vain(*vain)()

        return check

    on_ranks(fn, topology, size)


@pytest.mark.concurrency
@pytest.mark.parametrize("size", [2, 3, 4])
def test_whatever_can_be_completed_is_and_the_rest_ends(topology: str, size: int) -> None:
    for seed in range(5):
        closing_at_random(topology, size, seed)


@pytest.mark.stress
def test_that_many_times(topology: str) -> None:
    for seed in range(5, 300):
        closing_at_random(topology, 2 + seed % 3, seed)


def test_what_a_member_finished_reaches_one_that_comes_after_it_has_left(topology: str) -> None:
    left = threading.Event()

    def finish_one_and_leave(group: ProcessGroup) -> None:
        part = group.subgroup(range(group.size))
        part.broadcast(torch.full((8,), 7.0), root=0).wait()
        pending = part.all_reduce(torch.ones(8))
        part.close(timeout=0.1)
        with pytest.raises(GroupClosed):
            pending.wait()

    def fn(group: ProcessGroup) -> float:
        if group.rank == 0:
            finish_one_and_leave(group)
            gc.collect()  # nothing but the engine knows the group any more
            left.set()
            return 7.0
        part = group.subgroup(range(group.size))
        assert left.wait(LONG)
        got = torch.zeros(8)
        part.broadcast(got, root=0).wait(LONG / 4)
        part.close()
        return float(got.sum()) / 8

    assert run_threads(fn, 3, timeout=LONG, **topology_options(topology, 3)) == [7.0] * 3
