"""then and add_done_callback: where callbacks run, in which order, and what becomes of their results."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
import textwrap
import threading
from typing import Any

import pytest

from shoal.errors import InvalidFutureState, UsageError
from shoal.future import Future, pool
from tests.support.waiting import until

from .sources import ManualSource


class Boom(Exception):
    pass


def test_then_gives_a_future_of_what_the_callback_returns() -> None:
    future: Future[int] = Future()
    child = future.then(lambda f: f.value() + 1)
    grandchild = child.then(lambda f: str(f.value()))
    assert not grandchild.done()
    future.set_result(1)
    assert grandchild.wait(10) == "2"
    assert child.value() == 2


def test_the_callback_of_a_completed_future_runs_too() -> None:
    future: Future[int] = Future()
    future.set_result(1)
    assert future.then(lambda f: f.value() + 1).wait(10) == 2


def test_an_exception_in_a_callback_becomes_that_of_its_future() -> None:
    error = Boom()

    def fail(_: Future[int]) -> int:
        raise error

    future: Future[int] = Future()
    child = future.then(fail)
    future.set_result(1)
    with pytest.raises(Boom) as raised:
        child.wait(10)
    assert raised.value is error
    assert raised.traceback[-1].name == "fail"


def test_even_an_exit_in_a_callback_is_only_its_exception() -> None:
    def leave(_: Future[int]) -> int:
        raise SystemExit(3)

    future: Future[int] = Future()
    child = future.then(leave)
    future.set_result(1)
    with pytest.raises(SystemExit):
        child.wait(10)


def test_callbacks_run_for_failed_futures_and_see_the_exception() -> None:
    future: Future[int] = Future()
    error = Boom()
    seen = future.then(lambda f: f.exception())
    passed_on = future.then(lambda f: f.value())
    future.set_exception(error)
    assert seen.wait(10) is error
    with pytest.raises(Boom) as raised:
        passed_on.wait(10)
    assert raised.value is error


def test_a_future_that_a_callback_returns_is_not_flattened() -> None:
    inner: Future[int] = Future()
    future: Future[int] = Future()
    child = future.then(lambda _: inner)
    future.set_result(1)
    assert child.wait(10) is inner


def test_an_exception_in_a_done_callback_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    future: Future[int] = Future()

    def fail(_: Future[int]) -> None:
        raise Boom("loudly")

    with caplog.at_level(logging.ERROR, "shoal"):
        future.add_done_callback(fail)
        future.set_result(1)
        assert pool.shutdown(10)
    assert "loudly" in caplog.text


def test_a_result_that_its_callback_did_not_give_is_not_overwritten(caplog: pytest.LogCaptureFixture) -> None:
    future: Future[int] = Future()
    started, leave = threading.Event(), threading.Event()

    def slow(_: Future[int]) -> int:
        started.set()
        leave.wait()
        return 1

    child = future.then(slow)
    future.set_result(0)
    started.wait()
    child.set_result(7)
    leave.set()
    assert pool.shutdown(10)
    assert child.value() == 7
    assert InvalidFutureState.__name__ in caplog.text


@pytest.mark.parametrize("sourced", [False, True])
def test_callbacks_run_neither_here_nor_on_the_completing_thread(sourced: bool) -> None:
    source = ManualSource()
    future: Future[None] = Future(source) if sourced else Future()
    names: list[str] = []
    before = future.then(lambda _: names.append(threading.current_thread().name))
    if sourced:
        source.complete()
    else:
        future.set_result(None)
    after = future.then(lambda _: names.append(threading.current_thread().name))
    before.wait(10)
    after.wait(10)
    assert len(names) == 2
    assert all(name.startswith("shoal-callback-") for name in names)


def test_callbacks_start_in_the_order_of_registration() -> None:
    future: Future[None] = Future()
    order: list[int] = []
    turn = [threading.Event() for _ in range(20)]

    def callback(index: int) -> None:
        # Each waits for the one before, so they all end only if none of those was left behind.
        if index:
            turn[index - 1].wait()
        order.append(index)
        turn[index].set()

    children = [future.then(lambda _, index=index: callback(index)) for index in range(20)]
    future.set_result(None)
    for child in children:
        child.wait(10)
    assert order == list(range(20))


def test_a_callback_may_wait_for_what_a_later_callback_completes() -> None:
    assert pool.shutdown(10)
    assert len(pool._threads) == 0
    future: Future[None] = Future()
    inner: Future[int] = Future()
    waiting = future.then(lambda _: inner.wait(30))
    future.add_done_callback(lambda _: inner.set_result(4))
    future.set_result(None)
    assert waiting.wait(30) == 4


def test_callbacks_that_all_block_on_the_last_one_do_not_deadlock() -> None:
    depth = 30
    future: Future[int] = Future()
    chain: list[Future[int]] = [Future() for _ in range(depth + 1)]
    results = [
        future.then(lambda _, index=index: chain[index].set_result(chain[index + 1].wait(30)))
        for index in range(depth)
    ]
    future.add_done_callback(lambda _: chain[depth].set_result(1))
    future.set_result(0)
    for result in results:
        result.wait(30)
    assert chain[0].wait(30) == 1


def test_a_callback_may_block_on_something_foreign() -> None:
    future: Future[None] = Future()
    gate = threading.Barrier(12)
    children = [future.then(lambda _: gate.wait(30)) for _ in range(12)]
    future.set_result(None)
    assert sorted(child.wait(30) for child in children) == list(range(12))


def test_a_burst_of_short_callbacks_takes_few_threads() -> None:
    future: Future[None] = Future()
    names: set[str] = set()
    children = [future.then(lambda _: names.add(threading.current_thread().name)) for _ in range(300)]
    future.set_result(None)
    for child in children:
        child.wait(30)
    assert len(names) < 100


def test_a_pool_ends_its_idle_threads_and_starts_again() -> None:
    before = set(threading.enumerate())
    for _ in range(2):
        future: Future[None] = Future()
        child = future.then(lambda _: threading.current_thread().daemon)
        future.set_result(None)
        assert child.wait(10)
        assert len(pool._threads) > 0
        assert pool.shutdown(10)
        assert len(pool._threads) == 0
        assert set(threading.enumerate()) <= before


def test_shutting_down_says_when_a_callback_does_not_end() -> None:
    future: Future[None] = Future()
    leave = threading.Event()
    started = threading.Event()
    future.add_done_callback(lambda _: (started.set(), leave.wait()))
    future.set_result(None)
    started.wait()
    assert not pool.shutdown(0.01)
    leave.set()
    assert pool.shutdown(10)


def test_a_process_lets_callbacks_end_before_python_does() -> None:
    """A daemon thread that Python ends within torch would abort the process."""
    program = """
        import atexit, threading
        atexit.register(lambda: print(threading.active_count()))  # the last one to be called
        from shoal.future import Future, pool
        end = pool.shutdown
        pool.shutdown = lambda timeout: end(30)  # how long it may take is not tested
        future = Future()
        future.set_result(1)
        future.then(lambda f: f.value()).wait()
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (result.stdout, result.returncode) == ("1\n", 0), result.stderr


class Stubborn(Exception):
    """An exception whose own methods raise."""

    def __str__(self) -> str:
        raise SystemExit(3)

    def with_traceback(self, traceback: object) -> Any:
        raise SystemExit(4)

    __repr__ = __str__


@pytest.mark.parametrize("error", [Stubborn(), SystemExit(3), asyncio.CancelledError()], ids=["a", "b", "c"])
def test_whatever_a_callback_raises_its_future_completes(error: BaseException) -> None:
    def fail(_: object) -> None:
        raise error

    future: Future[None] = Future()
    child = future.then(fail)
    future.set_result(None)
    later = child.then(lambda done: done.exception())
    assert later.wait(timeout=10) is error


def test_a_logging_handler_that_raises_ends_no_thread(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise SystemExit(3)

    def fail(_: object) -> None:
        raise Stubborn

    logger, broken = logging.getLogger("shoal"), Broken()
    logger.addHandler(broken)
    running = pool._running
    try:
        for _ in range(6):  # more than run at once
            future: Future[None] = Future()
            future.add_done_callback(fail)
            future.set_result(None)
        assert future.then(lambda _: 1).wait(timeout=10) == 1
        until(lambda: pool._running <= running, lambda: f"{pool._running} jobs count as running")
    finally:
        logger.removeHandler(broken)


def test_a_callback_that_cannot_be_called_is_refused() -> None:
    future: Future[int] = Future()
    for register in future.then, future.add_done_callback:
        with pytest.raises(UsageError, match=f"{register.__name__}: expected a function .* got int"):
            register(3)  # type: ignore[operator]
