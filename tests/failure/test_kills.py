"""SIGKILL in the middle of the work: every survivor names the dead rank at once, and nothing stays.

``make test`` runs 20 trials, ``make stress`` 200 more (20 with ``STRESS=short``).
"""

from __future__ import annotations

import contextlib
import os
import random
import select
import signal
import time
from collections.abc import Iterator, Sequence

import pytest
import torch

from shoal import PeerLost, ProcessGroup
from shoal.errors import StoreTimeout
from shoal.testing import Ranks, no_leaks, processes
from tests.support.topologies import TOPOLOGIES, topology_options

from .ranks import PATIENCE, Report, fork_worker, left_behind, work_until_killed_at, work_until_lost

#: seconds from a death until every survivor has raised; on an idle machine it takes milliseconds
PROMISE = 10.0
SIZES = (2, 3, 4)


@contextlib.contextmanager
def death_of(ranks: Ranks, victim: int) -> Iterator[list[float]]:
    """Gives a list that holds, after the block, the moment by which the victim was dead."""
    handle = os.pidfd_open(ranks.pids[victim])
    moments: list[float] = []
    try:
        yield moments
        poll = select.poll()
        poll.register(handle, select.POLLIN)
        assert poll.poll(PATIENCE * 1000), f"rank {victim} is still alive"
        moments.append(time.monotonic())
    finally:
        os.close(handle)


def check(ranks: Ranks, victim: int, killed_at: float, workers: bool = False) -> None:
    """All survivors noticed the death of ``victim`` in time, and have nothing of it left."""
    size = len(ranks.pids)
    survivors = [rank for rank in range(size) if rank != victim]
    # Without a word from all of them the outcomes below say more than a timeout here.
    with contextlib.suppress(StoreTimeout):
        ranks.store.wait([f"lost/{rank}" for rank in survivors], 20.0)
    if workers:
        # It has lived long enough to delay the news; it holds the pipe on which the victim would report.
        with contextlib.suppress(ProcessLookupError):  # it does not live for ever
            os.kill(int(ranks.store.get(f"worker/{victim}")), signal.SIGKILL)
    outcomes = ranks.join()
    assert outcomes[victim].exitcode == -signal.SIGKILL, outcomes[victim].describe()
    for rank in survivors:
        report = outcomes[rank].value
        assert isinstance(report, Report), outcomes[rank].describe()
        assert report.lost == report.again == (victim,), report
        assert report.known == {victim}, report
        assert f"rank {victim} is lost" in report.message
        assert report.completed is not None  # they met before
        if "completed here" in report.message:
            assert f"(last operation completed here: {report.completed})" in report.message
        assert report.state == "broken"
        assert report.at - killed_at < PROMISE, f"noticed after {report.at - killed_at:.3f} s: {report}"
        assert report.closed_within < PROMISE, report
        assert report.left == [], report


def kill_at_random(trial: int) -> None:
    """One trial; what varies follows from its number, so that every combination has its turn."""
    size = SIZES[trial % 3]
    topology = TOPOLOGIES[trial // 3 % 3]
    workers = bool((trial // 9 + trial) % 2)
    choose = random.Random(trial)
    victim = choose.randrange(size)
    with (
        no_leaks(),
        processes(work_until_lost, size, trial, workers, **topology_options(topology, size)) as ranks,
    ):
        ranks.store.wait([f"ready/{rank}" for rank in range(size)], PATIENCE)
        time.sleep(choose.uniform(0.0, 0.1))
        killed_at = time.monotonic()
        ranks.kill(victim)
        check(ranks, victim, killed_at, workers)


@pytest.mark.parametrize("trial", range(20))
def test_every_survivor_of_a_kill_names_the_dead_rank_at_once(trial: int) -> None:
    kill_at_random(trial)


@pytest.mark.stress
@pytest.mark.parametrize("trial", range(20, 40 if os.environ.get("STRESS") == "short" else 220))
def test_every_survivor_of_many_kills_names_the_dead_rank_at_once(trial: int) -> None:
    kill_at_random(trial)


EVERYBODY = range(4)
POINTS = [
    ("writing", "shm", 2, EVERYBODY),
    ("writing", "shm", 4, EVERYBODY),
    ("writing", "shm", 2, ()),
    ("writing", "shm", 2, (0,)),
    ("writing", "shm", 4, (1, 3)),
    ("reduced", "shm", 2, EVERYBODY),
    ("reduced", "shm", 4, EVERYBODY),
    ("finished", "shm", 3, EVERYBODY),
    ("finished", "shm", 2, ()),
    ("finished", "tcp", 3, EVERYBODY),
    ("finished", "hierarchical", 3, EVERYBODY),
]


@pytest.mark.concurrency
@pytest.mark.parametrize(("point", "topology", "size", "registered"), POINTS)
def test_a_death_inside_the_engine_leaves_right_results_or_an_error(
    point: str, topology: str, size: int, registered: Sequence[int]
) -> None:
    victim = size - 1
    with (
        no_leaks(),
        processes(
            work_until_killed_at, size, point, victim, registered, **topology_options(topology, size)
        ) as ranks,
    ):
        with death_of(ranks, victim) as died_at:
            ranks.store.set("watched", b"")
        check(ranks, victim, died_at[0])


def go_on_without(group: ProcessGroup, victim: int) -> list[str]:
    """The world is lost, and a group of the survivors works as before."""
    survivors = [rank for rank in range(group.size) if rank != victim]
    part = group.subgroup(survivors) if group.rank != victim else None
    group.barrier().wait()
    group.store.set(f"through/{group.rank}", b"")
    if part is None:
        group.store.wait([f"through/{rank}" for rank in survivors])
        group.store.set("ready", b"")
        signal.pause()
        raise AssertionError("a signal that does not kill")
    with pytest.raises(PeerLost):
        group.barrier().wait()
    for n in (1, 1_000_000):
        x = part.empty(n).fill_(1.0)
        assert bool((part.all_reduce(x).wait() == len(survivors)).all())
        assert bool((part.all_reduce(torch.ones(n)).wait() == len(survivors)).all())
    assert part.state == "open"
    del x
    part.close()
    group.close()
    return left_behind()


@pytest.mark.parametrize(("topology", "victim"), [("shm", 0), ("shm", 1), ("tcp", 0), ("hierarchical", 0)])
def test_a_group_without_the_dead_rank_goes_on(topology: str, victim: int) -> None:
    with no_leaks(), processes(go_on_without, 3, victim, **topology_options(topology, 3)) as ranks:
        ranks.store.wait(["ready"], PATIENCE)
        ranks.kill(victim)
        outcomes = ranks.join()
        survivors = [outcome for outcome in outcomes if outcome.rank != victim]
        assert [outcome.value for outcome in survivors] == [[], []], [o.describe() for o in survivors]


def die_before_it_was_heard(group: ProcessGroup) -> object:
    """Rank 0 sends and dies at once; what it sent still arrives."""
    if group.rank == 0:
        worker = fork_worker(group)
        group.send(torch.full((50_000,), 3.0), 1).wait()
        group.send(torch.full((5,), 4.0), 1).wait()
        os.kill(worker, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)
    first = group.recv(torch.empty(50_000), 0).wait()
    last = None
    with contextlib.suppress(PeerLost):
        last = group.recv(torch.empty(5), 0).wait()
    # The second was small enough to leave at once; the group may break before it is asked for.
    assert last is None or last[0].eq(4.0).all()
    with pytest.raises(PeerLost) as caught:
        group.recv(torch.empty(5), 0).wait()
    return first[0].eq(3.0).all().item(), caught.value.ranks


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_what_was_sent_before_a_death_arrives(transport: str) -> None:
    with no_leaks(), processes(die_before_it_was_heard, 2, transport=transport) as ranks:
        outcomes = ranks.join()
        assert outcomes[1].value == (True, (0,)), outcomes[1].describe()
