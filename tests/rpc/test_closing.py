"""The agents of a group are closed together: each serves until no call is pending at any of them."""

from __future__ import annotations

import threading

import pytest

import shoal
from shoal.errors import UnknownWorker, WorkerLost
from shoal.rpc import Agent, current
from shoal.rpc.join import join
from shoal.testing import no_leaks, processes, run_threads
from tests.rpc import handlers

#: seconds of a close whose time is never up in these tests
LONG = 60.0


def rank_of(name: str) -> int:
    return int(name.removeprefix("rank"))


def call_on(steps: int, size: int) -> int:
    """Have the next worker in a ring call on; how many steps there were."""
    agent = current().agent
    if steps == 0:
        return 0
    there = agent.peer((rank_of(agent.name) + 1) % size)
    return 1 + int(there.call(call_on, steps - 1, size).wait())


def begin_chain(steps: int, size: int) -> None:
    """Begin a chain of calls for which nobody waits but the handlers themselves."""
    agent = current().agent
    there = agent.peer((rank_of(agent.name) + 1) % size)
    if steps:
        there.call(begin_chain, steps - 1, size)
    else:
        there.call(handlers.note, "end of the chain")


def test_a_rank_that_is_through_serves_the_others() -> None:
    def rank(group: shoal.ProcessGroup) -> int:
        total = 0
        with join(group=group, timeout=LONG) as agent:
            if group.rank == 0:  # the others are at the end of their blocks
                group.store.wait(["through/1", "through/2"])
                total = sum(agent.peer(other).call(call_on, 5, 3).wait() for other in (1, 2) * 10)
            else:
                group.store.set(f"through/{group.rank}", b"")
        return total

    with no_leaks():
        assert run_threads(rank, 3) == [100, 0, 0]


def test_nobody_leaves_while_handlers_still_make_calls() -> None:
    handlers.noted.clear()

    def rank(group: shoal.ProcessGroup) -> bool:
        with join(group=group, timeout=LONG) as agent:
            if group.rank == 0:
                agent.peer(1).call(begin_chain, 100, 3)
        return "end of the chain" in handlers.noted

    assert run_threads(rank, 3) == [True] * 3


def test_a_group_may_have_agents_again() -> None:
    def rank(group: shoal.ProcessGroup) -> list[int]:
        found = []
        for _ in range(3):
            with join(group=group, timeout=LONG) as agent:
                found.append(agent.peer(1 - group.rank).call(call_on, 1, 2).wait())
        return found

    assert run_threads(rank, 2) == [[1, 1, 1]] * 2


def test_two_groups_of_one_process_close_apart() -> None:
    def rank(group: shoal.ProcessGroup) -> int:
        part = group.split(int(group.rank == 2))
        assert part is not None
        with part, join(group=part, timeout=LONG) as agent:  # the third rank is alone, and waits for nobody
            value = agent.peer((part.rank + 1) % part.size).call(int, 7).wait()
        return int(value)

    assert run_threads(rank, 3) == [7, 7, 7]


def test_who_leaves_after_an_error_is_not_waited_for() -> None:
    def rank(group: shoal.ProcessGroup) -> str:
        try:
            with join(group=group, timeout=LONG):
                if group.rank == 1:
                    raise KeyError("a bad day")
        except KeyError:
            return "raised"
        return "left"

    assert run_threads(rank, 3) == ["left", "raised", "left"]


def test_closing_ends_when_its_time_is_up_and_names_who_did_not_come() -> None:
    ended, joined = threading.Event(), threading.Event()

    def rank(group: shoal.ProcessGroup) -> tuple[str, bool]:
        if group.rank == 2:
            ended.wait(LONG)
            return "", True
        agent = join(group=group, timeout=LONG)
        if group.rank == 1:
            joined.set()
            ended.wait(LONG)
            agent.close(graceful=False)
            return "", True
        try:
            joined.wait(LONG)
            agent.close(timeout=0.3)
        except UnknownWorker as error:
            return str(error), agent.closed
        finally:
            ended.set()
        return "", False

    text, closed = run_threads(rank, 3)[0]
    assert text == (
        "worker 'rank0': 'rank1', rank 2 (which has not joined) did not call close, or had calls pending, "
        "for 0.3 s"
    )
    assert closed


@pytest.mark.parametrize("where", [0, 1])
@pytest.mark.parametrize("others", [0.2, LONG], ids=["all have little time", "others have more"])
def test_a_handler_that_does_not_end_holds_up_nobody_beyond_its_time(where: int, others: float) -> None:
    handlers.noted.clear()

    def rank(group: shoal.ProcessGroup) -> str:
        agent = join(group=group, timeout=LONG)
        if group.rank == where:
            agent.peer(where).call(handlers.blocked, "never")
        group.barrier().wait()
        try:
            agent.close(timeout=0.2 if group.rank == where else others)
        except UnknownWorker as error:
            return str(error)
        finally:
            if group.rank == where:
                handlers.note("never")
        return "left"

    with no_leaks():
        texts = run_threads(rank, 2, timeout=LONG / 2)
    assert "calls were still pending or served" in texts[where] or "had calls pending" in texts[where]
    if others == LONG:  # the one that gave up is waited for no more
        assert texts[1 - where] == "left"


def die_in_between(group: shoal.ProcessGroup, dies: int) -> tuple[str, str]:
    with join(group=group, timeout=LONG) as agent:
        for other in range(group.size):
            agent.peer(other).call(int).wait()
        group.store.set(f"there/{group.rank}", b"")
        if group.rank == dies:
            threading.Event().wait()
        try:
            agent.close(LONG)
        except WorkerLost as error:
            return error.worker, str(error)
    return "", "nobody died"


@pytest.mark.parametrize("hosts", [None, ["a", "b", "a"]], ids=["same host", "TCP"])
def test_a_death_ends_the_waiting_and_is_named(hosts: list[str] | None) -> None:
    with no_leaks(), processes(die_in_between, 3, 1, hosts=hosts) as ranks:
        ranks.store.wait([f"there/{rank}" for rank in range(3)])
        ranks.kill(1)
        outcomes = ranks.join()
    for rank in (0, 2):
        assert outcomes[rank].ok, outcomes[rank].describe()
        worker, text = outcomes[rank].value
        assert worker == "rank1", text
        assert text.startswith(f"worker 'rank{rank}': 'rank1'")


def close_twice(agent: Agent) -> None:
    agent.close()
    agent.close(graceful=False)


def test_a_second_close_does_nothing() -> None:
    def rank(group: shoal.ProcessGroup) -> bool:
        agent = join(group=group, timeout=LONG)
        close_twice(agent)
        return agent.closed

    assert run_threads(rank, 2) == [True, True]
