"""What a call promises, whatever lies between the two workers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import shoal
from shoal.errors import (
    CallCancelled,
    CallTimeout,
    RemoteError,
    UsageError,
    WaitTimeout,
)
from shoal.rpc import Agent, Peer
from shoal.rpc.executor import CALLS
from shoal.testing import Agents
from tests.rpc import handlers

PATIENCE = handlers.PATIENCE


@pytest.fixture(scope="module", params=["threads", "threads, TCP", "processes", "processes, TCP"])
def stage(request: pytest.FixtureRequest) -> Iterator[Agents]:
    """Workers ``a``, an agent of this process, and ``b``."""
    other: dict[str, Any] = {"host_id": "elsewhere"} if "TCP" in request.param else {}
    handlers.noted.clear()
    with Agents() as stage:
        stage.a = stage.join("a", timeout=PATIENCE)
        if "processes" in request.param:
            stage.start("b", timeout=PATIENCE, **other)
        else:
            stage.join("b", timeout=PATIENCE, **other)
        yield stage


@pytest.fixture
def a(stage: Any) -> Agent:
    return stage.a


@pytest.fixture
def b(a: Agent) -> Peer:
    return a.peer("b")


def wait_for(b: Peer, key: str) -> Any:
    return b.call(handlers.wait_for, key).wait()


# -- values ----------------------------------------------------------------------------------------


def test_a_function_runs_there_and_its_result_comes_back(b: Peer) -> None:
    assert b.call(torch.add, torch.ones(2), 1).wait().tolist() == [2, 2]
    assert b.call(handlers.echo, 1, x={"a": (None, "b")}).wait() == ((1,), {"x": {"a": (None, "b")}})
    assert b.call(int).wait() == 0
    assert b.call("{}-{}".format, 1, 2).wait() == "1-2"


@pytest.mark.parametrize("bytes", [0, 4, 16 * 1024, 70_000, 2**20, 9_000_001])
def test_tensors_of_every_length_arrive_both_ways(b: Peer, bytes: int) -> None:
    x = torch.arange(bytes, dtype=torch.int32).to(torch.uint8)
    y = b.call(handlers.echo, x).wait()
    assert torch.equal(x, y)
    y += 1  # it is the receiver's own


def test_views_share_memory_there(b: Peer) -> None:
    x = torch.zeros(4)
    first, second = b.call(handlers.grow_first, [x, x[:2]]).wait()
    assert second.tolist() == [1, 1]
    second += 1
    assert first.tolist() == [2, 2, 1, 1]
    assert x.tolist() == [0, 0, 0, 0]


def test_many_tensors_in_one_call(b: Peer) -> None:
    xs = [torch.full((i,), float(i)) for i in range(500)]
    assert all(torch.equal(x, y) for x, y in zip(xs, b.call(handlers.echo, xs).wait(), strict=True))


def test_closures_go_by_value(b: Peer) -> None:
    bias = torch.ones(2)
    assert b.call(lambda x: x + bias, torch.ones(2)).wait().tolist() == [2, 2]


def test_a_function_goes_by_number_once_the_other_end_has_it(a: Agent, b: Peer) -> None:
    b.call(handlers.pid).wait()
    sent = a.connection("b", PATIENCE).sent_functions
    number, confirmed = sent.number_of(handlers.pid)
    assert confirmed
    assert number < 4096
    assert b.call(handlers.pid).wait() == b.call(handlers.pid).wait()


def test_a_worker_calls_itself(a: Agent) -> None:
    assert a.peer("a").call(handlers.caller).wait() == "a"


# -- what goes wrong --------------------------------------------------------------------------------


def test_an_exception_comes_back_as_what_it_is(b: Peer) -> None:
    with pytest.raises(ValueError, match="no such thing") as caught:
        b.call(handlers.fail, "value").wait()
    assert caught.value.args == ("no such thing", 7)
    cause = caught.value.__cause__
    assert isinstance(cause, RemoteError)
    assert cause.worker == "b"
    assert "in fail" in cause.traceback
    assert "worker 'a': tests.rpc.handlers.fail at 'b' raised at 'b' (process " in str(cause)
    with pytest.raises(handlers.NotFound) as own:
        b.call(handlers.fail, "own").wait()
    assert own.value.code == 404


@pytest.mark.parametrize(("kind", "text"), [("odd", "Odd: odd: 3"), ("holding", "Holding: holding a lock")])
def test_an_exception_that_cannot_be_rebuilt_is_told(b: Peer, kind: str, text: str) -> None:
    with pytest.raises(RemoteError, match=text) as caught:
        b.call(handlers.fail, kind).wait()
    assert caught.value.worker == "b"
    assert "in fail" in caught.value.traceback


@pytest.mark.parametrize("kind", ["half a character", "half a syntax error"])
def test_an_exception_that_is_hard_to_tell_ends_its_call_and_nothing_else(b: Peer, kind: str) -> None:
    """Those of file names are hard; the handler's thread must live on, that of an actor above all."""
    expected = (RemoteError, ValueError, SyntaxError)
    with pytest.raises(expected, match=r"caf|flawed"):
        b.call(handlers.fail_unencodably, kind).wait(PATIENCE)
    actor = b.actor(handlers.Failing)
    with pytest.raises(expected, match=r"caf|flawed"):
        actor.fail(kind).wait(PATIENCE)
    assert actor.live().wait(PATIENCE) == "alive"


def test_a_stop_iteration_ends_no_iteration_of_the_caller(b: Peer) -> None:
    with pytest.raises(RemoteError, match=r"next at 'b' raised at 'b' .*StopIteration"):
        b.call(next, iter([])).wait(PATIENCE)


def test_what_pickling_raises_says_which_call_it_was(b: Peer) -> None:
    deep: list[Any] = []
    for _ in range(10_000):
        deep = [deep]
    for value, why in ((deep, "RecursionError"), (handlers.Refusing(), "it will not go")):
        with pytest.raises(UsageError, match=rf"worker 'a': .*echo at 'b' cannot be sent: .*{why}"):
            b.call(handlers.echo, value)
    with pytest.raises(UsageError, match=r"the result of .*Refusing at 'b' cannot be sent: .*will not go"):
        b.call(handlers.Refusing).wait()


def test_what_cannot_be_sent_is_refused_by_name(b: Peer) -> None:
    with pytest.raises(
        UsageError, match=r"worker 'a': tests.rpc.handlers.echo at 'b' cannot be sent: .*lock"
    ):
        b.call(handlers.echo, threading.Lock())
    with pytest.raises(UsageError, match=r"MulBackward0.*detach"):
        b.call(handlers.echo, handlers.graph())
    with pytest.raises(UsageError, match=r"the result of tests.rpc.handlers.lock at 'b' cannot be sent"):
        b.call(handlers.lock).wait()
    with pytest.raises(UsageError, match=r"the result of tests.rpc.handlers.graph at 'b'.*detach"):
        b.call(handlers.graph).wait()
    with pytest.raises(UsageError, match="7 cannot be called"):
        b.call(7)  # type: ignore[arg-type]
    assert b.call(handlers.echo, 1).wait() == 1


# -- time -------------------------------------------------------------------------------------------


def test_a_call_that_takes_too_long_fails_and_its_function_hears_of_it(b: Peer) -> None:
    b.call(handlers.pid).wait()  # connecting takes none of the time
    for trial in range(20):
        key = f"slow {trial}"
        with pytest.raises(
            CallTimeout, match=r"worker 'a': .*until_cancelled at 'b' had no reply within 0\.3 s"
        ):
            b.options(timeout=0.3).call(handlers.until_cancelled, key).wait()
        if b.call(handlers.recall, f"{key} runs").wait():  # it had begun: on a busy machine it may not have
            break
    wait_for(b, f"{key} ended")


def test_waiting_may_give_up_while_the_call_goes_on(b: Peer) -> None:
    future = b.call(handlers.wait_for, "go on")
    with pytest.raises(WaitTimeout):
        future.wait(0.01)
    b.call(handlers.note, "go on").wait()
    assert future.wait() is True


def test_a_function_knows_how_long_its_caller_waits(b: Peer) -> None:
    left = b.options(timeout=1000).call(handlers.seconds_left).wait()
    assert left is not None
    assert PATIENCE < left <= 1000
    assert b.options(timeout=float("inf")).call(handlers.seconds_left).wait() is None


# -- cancelling -------------------------------------------------------------------------------------


@pytest.mark.parametrize("fn", [handlers.until_cancelled, handlers.until_cancelled_async])
def test_a_running_call_is_cancelled(b: Peer, fn: Any) -> None:
    key = fn.__name__
    future = b.call(fn, key)
    wait_for(b, f"{key} runs")
    assert future.cancel()
    with pytest.raises(CallCancelled, match=f"worker 'a': .*{key} at 'b' was cancelled"):
        future.wait()
    wait_for(b, f"{key} ended")
    assert not future.cancel()


def test_a_call_that_has_ended_cannot_be_cancelled(b: Peer) -> None:
    future = b.call(handlers.echo, 1)
    future.wait()
    assert not future.cancel()


# -- handlers ---------------------------------------------------------------------------------------


def test_handlers_may_be_coroutines(b: Peer) -> None:
    assert [f.wait() for f in [b.call(handlers.async_double, i) for i in range(20)]] == list(range(0, 40, 2))


def test_a_handler_may_reply_later(b: Peer) -> None:
    assert b.call(handlers.later, 5).wait() == 5
    with pytest.raises(UsageError, match="no_future is marked async_execution"):
        b.call(handlers.no_future).wait()


def test_a_handler_knows_who_called(b: Peer) -> None:
    assert b.call(handlers.caller).wait() == "a"
    with pytest.raises(UsageError, match="not called by another worker"):
        shoal.rpc.current()


def test_calls_nest_fifty_deep(b: Peer) -> None:
    assert b.call(handlers.countdown, 50, "a", "b").wait() == 50


def test_nobody_hears_of_a_post_but_it_runs(b: Peer) -> None:
    b.post(handlers.note, "posted", 3)
    assert wait_for(b, "posted") == 3


def test_thousands_of_calls_at_once(b: Peer) -> None:
    futures = [b.call(handlers.echo, i) for i in range(2000)]
    assert [future.wait() for future in futures] == list(range(2000))


def test_many_threads_call_at_once(b: Peer) -> None:
    wrong: list[Any] = []

    def work(k: int) -> None:
        for i in range(100):
            x = torch.full((10,), float(k * i))
            if not torch.equal(b.call(handlers.echo, x).wait(), x):
                wrong.append((k, i))

    threads = [threading.Thread(target=work, args=(k,)) for k in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# -- futures ----------------------------------------------------------------------------------------


def test_the_future_of_a_call_is_like_any_other(b: Peer) -> None:
    doubled = b.call(handlers.echo, 2).then(lambda f: 2 * f.value())
    assert doubled.wait(PATIENCE) == 4
    both = shoal.collect_all([b.call(handlers.echo, 1), b.call(handlers.echo, 2)])
    assert [f.value() for f in both.wait(PATIENCE)] == [1, 2]

    async def main() -> Any:
        with pytest.raises(ValueError, match="no such thing"):
            await b.call(handlers.fail, "value")
        return await b.call(handlers.echo, 3)

    assert asyncio.run(main()) == 3


def test_calls_are_in_torchs_profiler_at_both_ends(stage: Any, b: Peer) -> None:
    settings = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], experimental_config=settings
    ) as run:
        b.call(torch.add, torch.ones(2), 1).wait()
    b.call(torch.sub, torch.ones(2), 1).wait()
    times = {event.key: event.count for event in run.key_averages() if event.key.startswith("rpc:")}
    # One is the call; where the handler is a thread of this process, the other one is the handler.
    assert times == {"rpc:torch.add(a->b)": 1 if stage.pids else 2}


def test_the_threads_of_handlers_do_not_pile_up(a: Agent) -> None:
    """A burst of short calls takes few threads."""
    assert CALLS == 0
    assert a.stats()["threads"] < 100
