"""Workers of RPC in tests: as threads and as processes, their ends, harm, and what is left of them."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
import torch

from shoal import RemoteError, UsageError
from shoal.errors import UnknownWorker, WorkerLost
from shoal.rpc import Agent, RRef, current
from shoal.testing import Agents, no_leaks, run_agents
from tests.support.waiting import until

both = pytest.mark.parametrize("processes", [False, True], ids=["threads", "processes"])
kept: list[RRef[object]] = []


def push(agent: Agent, *_: object) -> float:
    ps = agent.peer("ps")
    return float(ps.call(torch.add, torch.ones(2), 1).wait().sum())


def pid(agent: Agent) -> int:
    return os.getpid()


def fail(agent: Agent) -> None:
    raise KeyError("a bad day")


def fail_when_closed(agent: Agent) -> None:
    agent.wait()
    fail(agent)


def fail_when_called(agent: Agent) -> None:
    while not agent.stats()["handled"]:
        time.sleep(0.001)
    fail(agent)


def wait_for_bad(agent: Agent) -> str:
    with pytest.raises(WorkerLost) as caught:
        agent.peer("bad").call(wait_unwanted).wait()
    return caught.value.worker


begun = threading.Event()


def note_begun() -> None:
    begun.set()


def hang(agent: Agent) -> None:
    agent.peer("a").call(note_begun).wait()
    agent.wait()


def note_begun_and_wait() -> None:
    current().agent.peer("a").call(note_begun).wait()
    wait_unwanted()


def keep_own(value: object) -> RRef[object]:
    kept.append(RRef(value, current().agent))
    return kept[-1]


def let_go() -> None:
    kept.clear()


@both
def test_workers_call_one_another_and_their_results_come_by_name(processes: bool) -> None:
    work = {"ps": None, "t0": push, "t1": push}
    with no_leaks():
        assert run_agents(work, "unused", processes=processes) == {"t0": 4.0, "t1": 4.0}


def test_workers_are_processes_of_their_own() -> None:
    found = run_agents({"a": pid, "b": pid}, processes=True)
    assert len({*found.values(), os.getpid()}) == 3


@both
def test_a_failure_is_told_with_its_worker_and_ends_the_waiting_of_others(processes: bool) -> None:
    with no_leaks(), pytest.raises(RemoteError) as caught:
        run_agents({"bad": fail_when_called, "good": wait_for_bad}, processes=processes)
    text = str(caught.value)
    assert text.startswith("1 of 2 workers failed, worker 'bad' first")
    assert "worker 'bad' raised" in text
    assert "KeyError: 'a bad day'" in text
    assert isinstance(caught.value.__cause__, KeyError)


@both
def test_the_deadline_shows_where_a_worker_stands(processes: bool) -> None:
    begun.clear()
    with Agents(timeout=0.2) as workers:
        workers.join("a")
        (workers.start if processes else workers.run)("late", hang)
        assert begun.wait(60)
        described = workers.outcome("late").describe()
    assert described.startswith("worker 'late' was still running at the deadline")
    assert " in hang" in described


@both
def test_a_failure_that_nobody_asks_for_ends_the_block_with_it(processes: bool) -> None:
    def use() -> None:
        with Agents() as workers:
            (workers.start if processes else workers.run)("bad", fail)
            until(workers._workers["bad"].has_ended)

    with pytest.raises(RemoteError, match="worker 'bad' raised"):
        use()


def test_a_killed_worker_has_an_outcome_and_its_name_is_free() -> None:
    with no_leaks(), Agents() as workers:
        a = workers.join("a")
        workers.start("b")
        pending = a.peer("b").call(time.sleep, 60)
        workers.kill("b")
        with pytest.raises(WorkerLost):
            pending.wait()
        outcome = workers.outcome("b")
        assert (outcome.worker, outcome.exitcode) == ("b", -signal.SIGKILL)
        assert outcome.describe() == "worker 'b' was ended by SIGKILL"
        again = workers.start("b")
        assert a.peer("b", timeout=30).call(os.getpid).wait() == again == workers.pids["b"]


def test_a_worker_leaves_in_good_order() -> None:
    with Agents() as workers:
        a = workers.join("a")
        workers.start("b")
        a.peer("b").call(os.getpid).wait()
        workers.leave("b")
        assert workers.outcome("b").exitcode == 0
        with pytest.raises(UnknownWorker):
            a.peer("b", timeout=0)


def test_a_stopped_worker_goes_on() -> None:
    with Agents() as workers:
        b = workers.join("a").peer("b") if workers.start("b") else None
        assert b is not None
        b.call(os.getpid).wait()
        workers.stop("b")
        future = b.call(os.getpid)
        assert not future.done()
        workers.resume("b")
        assert future.wait() == workers.pids["b"]
        workers.delay("b", 0.05)
        assert b.call(os.getpid).wait() == workers.pids["b"]


def wait_unwanted() -> None:
    until(current().cancelled)


def wait_at(name: str) -> str:
    try:
        current().agent.peer(name).call(wait_unwanted).wait()
    except WorkerLost as error:
        return error.worker
    return "nothing was lost"


@pytest.mark.parametrize("host", [None, "elsewhere"], ids=["same host", "TCP"])
@pytest.mark.parametrize("pair", ["ab", "bc", "ad"])
def test_a_cut_ends_what_is_pending_and_the_next_call_connects_anew(pair: str, host: str | None) -> None:
    with Agents() as workers:
        a = workers.join("a")
        workers.join("d", host_id=host)
        workers.start("b")
        workers.start("c", host_id=host)
        caller, callee = a.peer(pair[0]), pair[1]
        assert caller.call(peer_pid, callee).wait() == workers.pids.get(callee, os.getpid())
        before = a.peer(callee).call(stats_handled).wait()
        pending = caller.call(wait_at, callee)
        end = time.monotonic() + 30
        while a.peer(callee).call(stats_handled).wait() <= before:  # it is being served there
            assert time.monotonic() < end
        assert workers.cut(*pair) >= 1
        assert pending.wait() == callee
        assert caller.call(peer_pid, callee).wait() == workers.pids.get(callee, os.getpid())


def peer_pid(name: str) -> int:
    return current().agent.peer(name).call(os.getpid).wait()


def stats_handled() -> int:
    return current().agent.stats()["handled"]


def test_what_is_left_at_any_worker_is_told() -> None:
    with Agents() as workers:
        a = workers.join("a")
        workers.start("b")
        b = a.peer("b")
        with workers.no_leaks():
            ref = b.remote(dict)
            assert ref.to_here() == {}
            del ref
            b.call(keep_own, 1).wait()
            b.call(let_go).wait()
        waiting = workers.no_leaks(patience=0.1)
        waiting.__enter__()
        mine = b.remote(dict)
        mine.to_here()
        begun.clear()
        pending = b.call(note_begun_and_wait)
        assert begun.wait(60)
        with pytest.raises(AssertionError) as caught:
            waiting.__exit__(None, None, None)
        text = str(caught.value)
        assert "worker 'a' holds 1 reference to " in text
        assert "worker 'b' keeps dict" in text
        assert "worker 'a' waits for calls: 1" in text
        assert "worker 'b' serves calls: 1" in text
        pending.cancel()


def test_what_only_processes_can_is_refused_for_threads() -> None:
    with Agents() as workers:
        workers.join("a")
        with pytest.raises(UsageError, match="worker 'a' is an agent of this process"):
            workers.kill("a")
        with pytest.raises(UsageError, match="worker 'x' is not there"):
            workers.stop("x")
        with pytest.raises(UsageError, match="define the function at the top level"):
            workers.start("b", lambda agent: None)
        workers.start("b")
        with pytest.raises(UsageError, match="worker 'b' is already a running process"):
            workers.start("b")


def test_a_function_that_still_runs_at_the_end_of_the_block_is_cut_off_in_silence() -> None:
    with no_leaks(), Agents() as workers:
        workers.run("a", fail_when_closed)
        workers.start("b", fail_when_closed)
