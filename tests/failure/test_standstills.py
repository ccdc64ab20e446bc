"""Ranks that are stopped and go on: the whole job goes on with them, a single one is given up and told so.

No rank is given up that a debugger holds, or that computes without letting another thread run.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import random
import select
import signal
import time

import psutil
import pytest
import torch

from shoal import PeerLost, ProcessGroup
from shoal.errors import StoreTimeout
from shoal.testing import Outcome, Ranks, faults, no_leaks, processes
from tests.support.debugger import held
from tests.support.topologies import TOPOLOGIES, topology_options

from .ranks import PATIENCE

#: seconds without a word until a rank is given up
HEARTBEAT = 1.5
#: seconds for which ranks are stopped, held or busy: more than two until one of the same host is given up
STANDSTILL = 3.0
#: seconds until a rank that stays stopped must have been given up; the promise is 2 on an idle machine
PROMISE = 30.0


def work_until_told(group: ProcessGroup) -> int:
    """Collectives one after another until the store says that it is enough; how many there were."""
    count = 0
    x, enough = torch.ones(1000), torch.zeros(1)
    while not enough.item():
        look = count % 16 == 0  # the store is slower than the collectives
        enough.fill_(float(look and group.rank == 0 and group.store.check(["enough"])))
        group.broadcast(enough, 0).wait()
        group.all_reduce(x.fill_(1)).wait()
        assert x.eq(group.size).all()
        count += 1
        if count == 10:
            group.store.set(f"ready/{group.rank}", b"")
        if look and group.store.check(["stopped"]):
            group.store.set(f"again/{group.rank}", b"")
    return count


def stop(ranks: Ranks, *which: int) -> None:
    for rank in which:
        ranks.stop(rank)
    for rank in which:
        while psutil.Process(ranks.pids[rank]).status() != psutil.STATUS_STOPPED:
            time.sleep(0.001)


def end(ranks: Ranks) -> None:
    """All ranks still work; they end in good order."""
    ranks.store.set("stopped", b"")
    with contextlib.suppress(StoreTimeout):  # the outcomes say more
        ranks.store.wait([f"again/{rank}" for rank in range(len(ranks.pids))], PATIENCE)
    ranks.store.set("enough", b"")
    outcomes = ranks.join()
    assert all(outcome.ok for outcome in outcomes), [outcome.describe() for outcome in outcomes]
    assert len({outcome.value for outcome in outcomes}) == 1


@pytest.mark.parametrize(
    "options", [{}, {"transport": "tcp"}, {"hosts": ["a", "b", "a"]}], ids=["shm", "tcp", "mixed"]
)
def test_a_job_that_was_stopped_as_a_whole_goes_on(options: dict[str, object]) -> None:
    with no_leaks(), processes(work_until_told, 3, heartbeat_timeout=HEARTBEAT, **options) as ranks:
        everybody = range(3)
        ranks.store.wait([f"ready/{rank}" for rank in everybody], PATIENCE)
        for _ in range(2):
            stop(ranks, *everybody)
            time.sleep(STANDSTILL)  # what is tested is that time passes
            for rank in everybody:
                os.kill(ranks.pids[rank], signal.SIGCONT)
                time.sleep(HEARTBEAT / 8)  # a shell resumes them one after another, too
        end(ranks)


def test_ranks_of_a_stopped_job_that_are_continued_long_after_one_another_go_on() -> None:
    with no_leaks(), processes(work_until_told, 2) as ranks:
        ranks.store.wait(["ready/0", "ready/1"], PATIENCE)
        for first, standstill in ((0, 0.2), (1, 1.0)):  # also where no rank misses a beat
            stop(ranks, 0, 1)
            time.sleep(standstill)
            for rank in (first, 1 - first):
                os.kill(ranks.pids[rank], signal.SIGCONT)
                time.sleep(STANDSTILL if rank == first else HEARTBEAT / 8)
        end(ranks)


def test_a_rank_that_a_debugger_holds_is_waited_for() -> None:
    with no_leaks(), processes(work_until_told, 3) as ranks:
        ranks.store.wait([f"ready/{rank}" for rank in range(3)], PATIENCE)
        with held(ranks.pids[1]):
            time.sleep(STANDSTILL)  # what is tested is that time passes
        end(ranks)


def burn(group: ProcessGroup) -> float:
    """Ranks 1 and 2 take the processors, and hold the interpreter nearly all the time."""
    group.barrier().wait()
    end = time.monotonic() + (STANDSTILL if group.rank > 0 else 0)
    while time.monotonic() < end:
        sum(itertools.repeat(1, 20_000_000))
    return float(group.all_reduce(torch.ones(1)).wait().item())


def test_a_rank_that_computes_for_long_is_waited_for() -> None:
    with no_leaks(), processes(burn, 3) as ranks:
        outcomes = ranks.join()
        assert [outcome.value for outcome in outcomes] == [3.0] * 3, [o.describe() for o in outcomes]


def hold(group: ProcessGroup) -> float:
    """Ranks 1 and 2 hold the interpreter for ten seconds without a moment's pause."""
    group.barrier().wait()
    if group.rank > 0:
        ctypes.PyDLL(None).sleep(10)
    return float(group.all_reduce(torch.ones(1)).wait().item())


@pytest.mark.stress
@pytest.mark.parametrize("hosts", [None, "aab"], ids=["one host", "two hosts"])
def test_a_rank_that_holds_the_interpreter_is_waited_for(hosts: str | None) -> None:
    with no_leaks(), processes(hold, 3, **({"hosts": hosts} if hosts else {})) as ranks:
        outcomes = ranks.join()
        assert [outcome.value for outcome in outcomes] == [3.0] * 3, [o.describe() for o in outcomes]


def reduce_until_told(group: ProcessGroup) -> int:
    """Reductions of 12 MB in ordinary memory until the store says that it is enough; how many there were."""
    count = 0
    x, enough = torch.empty(3_000_000), torch.zeros(1)
    while not enough.item():
        group.all_reduce(x.fill_(count + group.rank)).wait()
        assert x.eq(2 * count + 1).all()
        enough.fill_(float(group.rank == 0 and group.store.check(["enough"])))
        group.broadcast(enough, 0).wait()
        count += 1
        group.store.set(f"ready/{group.rank}", b"")
    return count


def test_ranks_that_stand_still_in_the_middle_of_a_reduction_go_on() -> None:
    choose = random.Random(1)
    with no_leaks(), processes(reduce_until_told, 2) as ranks:
        ranks.store.wait(["ready/0", "ready/1"], PATIENCE)
        for turn in range(20):
            stop(ranks, turn % 2)
            time.sleep(choose.uniform(0.0, 0.02))  # what is tested is that the others wait meanwhile
            os.kill(ranks.pids[turn % 2], signal.SIGCONT)
            time.sleep(choose.uniform(0.0, 0.02))  # another moment of an operation
        ranks.store.set("enough", b"")
        outcomes = ranks.join()
        assert all(outcome.ok for outcome in outcomes), [outcome.describe() for outcome in outcomes]
        assert outcomes[0].value == outcomes[1].value


def work_until_given_up(group: ProcessGroup) -> tuple[tuple[int, ...], str]:
    try:
        work_until_told(group)
    except PeerLost as error:
        group.store.set(f"lost/{group.rank}", b"")
        if group.rank != 1:
            group.store.wait(["lost/1"], PATIENCE)  # the others are there when it resumes
        return error.ranks, str(error)
    raise AssertionError("nothing happened")


def ends_after_a_standstill(ranks: Ranks, *others: int) -> list[Outcome]:
    """Stop rank 1 until these others have lost a rank, and let all come to their ends."""
    ranks.store.wait([f"ready/{rank}" for rank in range(len(ranks.pids))], PATIENCE)
    stop(ranks, 1)
    with contextlib.suppress(StoreTimeout):  # the outcomes say more
        ranks.store.wait([f"lost/{rank}" for rank in others], PATIENCE)
    os.kill(ranks.pids[1], signal.SIGCONT)
    return ranks.join()


def outcomes_after_a_standstill(ranks: Ranks) -> list[Outcome]:
    """The same with both others of three, where all end well."""
    outcomes = ends_after_a_standstill(ranks, 0, 2)
    assert all(outcome.ok for outcome in outcomes), [outcome.describe() for outcome in outcomes]
    return outcomes


def test_a_rank_that_was_given_up_while_it_was_stopped_says_so() -> None:
    with (
        no_leaks(),
        processes(work_until_given_up, 3, transport="tcp", heartbeat_timeout=HEARTBEAT) as ranks,
    ):
        outcomes = outcomes_after_a_standstill(ranks)
        for rank in (0, 2):
            lost, message = outcomes[rank].value
            assert lost == (1,)
            assert "rank 1 is lost: no message came from its host for" in message
            assert "it is stopped or starved, or the network is cut" in message
        lost, message = outcomes[1].value
        assert lost == (1,)
        assert "this rank did not run for" in message
        assert "; the others gave it up: rank 1 is lost" in message


def keep_what_is_there(group: ProcessGroup, registered: bool) -> tuple[float, str]:
    """When the stopped rank was given up, and how; what the survivors have, they keep."""
    survivors = [0, 2]
    part = group.subgroup(survivors) if group.rank != 1 else None
    count = 1_000_000
    tensors = [group.empty(count) if registered else torch.empty(count) for _ in range(4)]
    done = 0

    def work() -> None:
        nonlocal done
        while True:
            group.all_reduce(tensors[done % 4].fill_(done)).wait()
            done += 1
            if done == 10:
                group.store.set(f"ready/{group.rank}", b"")

    with pytest.raises(PeerLost) as caught:
        work()
    told = time.monotonic()
    group.store.set(f"lost/{group.rank}", b"")
    assert caught.value.ranks == (1,), str(caught.value)
    if part is not None:
        after = part.all_reduce(torch.full((count,), 5.0)).wait()
        group.store.wait(["lost/1"], PATIENCE)
        assert after.eq(10).all()
        for number in range(done - 3, done):
            assert tensors[number % 4].eq(3 * number).all()
        assert part.all_reduce(torch.ones(count)).wait().eq(2).all()
        part.close()
    return told, str(caught.value)


@pytest.mark.concurrency
@pytest.mark.parametrize("registered", [False, True], ids=["ordinary", "registered"])
@pytest.mark.parametrize("options", [{}, {"hosts": ["a", "a", "b"]}], ids=["shm", "mixed"])
def test_a_rank_that_stays_stopped_is_given_up_by_its_host(
    options: dict[str, object], registered: bool
) -> None:
    # On a starved machine the other host's heartbeats would be the first to end.
    options = {**options, "heartbeat_timeout": PATIENCE}
    with no_leaks(), processes(keep_what_is_there, 3, registered, **options) as ranks:
        ranks.store.wait([f"ready/{rank}" for rank in range(3)], PATIENCE)
        since = time.monotonic()
        outcomes = outcomes_after_a_standstill(ranks)
        for rank in (0, 2):
            told, message = outcomes[rank].value
            assert "rank 1 is lost: its process is stopped" in message
            assert told - since < PROMISE
        _, message = outcomes[1].value
        assert "this rank did not run for" in message
        assert "; the others gave it up: rank 1 is lost: its process is stopped" in message


def work_until_given_up_by_one_that_dies(group: ProcessGroup) -> tuple[tuple[int, ...], str]:
    if group.rank == 0:
        faults.die_at(group, "gave up")
    return work_until_given_up(group)


def test_a_rank_that_was_given_up_says_so_though_nobody_has_told_it() -> None:
    options = {"hosts": ["a", "a", "b"], "heartbeat_timeout": PATIENCE}
    with no_leaks(), processes(work_until_given_up_by_one_that_dies, 3, **options) as ranks:
        outcomes = ends_after_a_standstill(ranks, 2)
        assert outcomes[0].exitcode == -signal.SIGKILL, outcomes[0].describe()
        assert outcomes[1].ok, outcomes[1].describe()
        lost, message = outcomes[1].value
        assert lost == (1,), message
        assert "this rank did not run for" in message
        assert "; the others gave it up: rank 1 is lost: its process is stopped" in message
        lost, message = outcomes[2].value
        assert 0 in lost, message


def receive_until_given_up(group: ProcessGroup) -> str:
    """A group of pairs goes on without the lost rank, so nobody but the mark tells that one."""
    pairs = group.subgroup(range(2), scope="pair")
    pairs.send(torch.ones(1), 1 - group.rank)
    pairs.recv(None, 1 - group.rank).wait()
    group.store.set(f"ready/{group.rank}", b"")
    with pytest.raises(PeerLost) as caught:
        pairs.recv(None, 1 - group.rank).wait()
    group.store.set(f"lost/{group.rank}", b"")
    group.store.wait(["lost/1"], PATIENCE)
    return str(caught.value)


def test_a_rank_that_was_given_up_in_a_group_of_pairs_hears_of_it() -> None:
    with no_leaks(), processes(receive_until_given_up, 2) as ranks:
        outcomes = ends_after_a_standstill(ranks, 0)
        assert all(outcome.ok for outcome in outcomes), [outcome.describe() for outcome in outcomes]
        assert "rank 1 is lost: its process is stopped" in outcomes[0].value
        assert "this rank did not run for" in outcomes[1].value
        assert "; the others gave it up: rank 1 is lost: its process is stopped" in outcomes[1].value


def wait_for_two_deaths(group: ProcessGroup) -> tuple[tuple[int, ...], str, tuple[int, ...]]:
    """An operation hangs on the dead; afterwards all of them are named."""
    group.barrier().wait()
    group.store.set(f"ready/{group.rank}", b"")
    if group.rank in (1, 3):
        signal.pause()
    group.store.wait(["dead"], PATIENCE)
    with pytest.raises(PeerLost) as first:
        group.all_reduce(torch.ones(10)).wait()
    with pytest.raises(PeerLost) as second:
        group.barrier()
    return first.value.ranks, str(first.value), second.value.ranks


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_all_ranks_that_are_known_dead_are_named(topology: str) -> None:
    with no_leaks(), processes(wait_for_two_deaths, 4, **topology_options(topology, 4)) as ranks:
        ranks.store.wait([f"ready/{rank}" for rank in range(4)], PATIENCE)
        handles = [os.pidfd_open(ranks.pids[rank]) for rank in (1, 3)]
        ranks.kill(1)
        ranks.kill(3)
        for handle in handles:
            ended = select.poll()
            ended.register(handle, select.POLLIN)
            assert ended.poll(PATIENCE * 1000)
            os.close(handle)
        ranks.store.set("dead", b"")
        outcomes = ranks.join()
        for rank in (0, 2):
            assert outcomes[rank].ok, outcomes[rank].describe()
            first, message, second = outcomes[rank].value
            assert first == second == (1, 3)
            assert "rank 1 is lost" in message
            assert "rank 3 is lost" in message
