"""wait_all, wait_any, collect_all, and futures made from others."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from shoal.errors import UsageError, WaitTimeout
from shoal.future import Future, FutureAsSource, collect_all, wait_all, wait_any

from .sources import InstantSource, ManualSource


class Boom(Exception):
    pass


def _failed() -> Future[int]:
    future: Future[int] = Future()
    future.set_exception(Boom())
    return future


def test_wait_all_gives_the_values_in_order() -> None:
    source = ManualSource()
    futures = [Future(source, finish=lambda: 1), Future(), Future(InstantSource(), finish=lambda: 3)]
    threading.Timer(0.01, lambda: (futures[1].set_result(2), source.complete())).start()
    assert wait_all(iter(futures)) == [1, 2, 3]
    assert wait_all([]) == []


def test_wait_all_raises_a_failure_without_waiting_for_the_others() -> None:
    with pytest.raises(Boom):
        wait_all([Future[int](), _failed()])
    with pytest.raises(Boom):
        wait_all([_failed(), Future[int]()])


def test_wait_all_has_one_deadline_for_all() -> None:
    done: Future[int] = Future()
    done.set_result(1)
    for timeout in (0, 0.15):
        with pytest.raises(WaitTimeout, match="2 of 3 futures pending"):
            wait_all([done, Future(), Future(ManualSource())], timeout=timeout)


def test_wait_any_returns_the_first_that_is_complete() -> None:
    source = ManualSource()
    own: Future[int] = Future()
    futures = [Future(source, finish=lambda: 1), own]
    threading.Timer(0.01, own.set_result, [2]).start()
    assert wait_any(futures) is own
    source.complete()
    assert wait_any(futures) is futures[0]
    failed = _failed()
    assert wait_any([Future(), failed]) is failed


def test_wait_any_sees_an_engine_complete_an_operation() -> None:
    source = ManualSource()
    futures = [Future[int](), Future(source, finish=lambda: 1)]
    threading.Timer(0.01, source.complete).start()
    assert wait_any(futures) is futures[1]


def test_wait_any_times_out_and_leaves_nothing_with_the_futures() -> None:
    future: Future[int] = Future()
    for _ in range(3):
        with pytest.raises(WaitTimeout, match="any of 1 futures"):
            wait_any([future], timeout=0.001)
        with pytest.raises(WaitTimeout):
            future.wait(0.001)
    assert future._subscribers == []


def test_wait_any_needs_a_future() -> None:
    with pytest.raises(UsageError, match="at least one"):
        wait_any([])


@pytest.mark.parametrize("combine", [wait_all, wait_any, collect_all])
def test_something_else_than_futures_is_refused_by_name(combine: Callable[[Any], object]) -> None:
    with pytest.raises(UsageError, match=rf"{combine.__name__}: expected futures of shoal, got int"):
        combine([Future(), 1])
    with pytest.raises(UsageError, match=rf"{combine.__name__}: expected a list of futures"):
        combine(Future())


def test_collect_all_completes_with_its_last_future() -> None:
    futures: list[Future[int]] = [Future(), Future(), Future()]
    collection = collect_all(futures)
    total = collection.then(lambda f: sum(future.value() for future in f.value()))
    for index, future in enumerate(reversed(futures)):
        assert not collection.done()
        future.set_result(index)
    assert collection.value() == futures
    assert total.wait(10) == 3


def test_collect_all_of_nothing_is_complete() -> None:
    assert collect_all([]).value() == []


def test_collect_all_fails_with_the_first_failure() -> None:
    futures: list[Future[int]] = [Future(), Future(), Future()]
    collection = collect_all(futures)
    errors = [Boom(), Boom()]
    futures[1].set_exception(errors[0])
    assert collection.exception() is errors[0]
    futures[0].set_exception(errors[1])
    futures[2].set_result(1)
    assert collection.exception() is errors[0]


def test_a_future_made_from_another_has_a_value_of_its_own() -> None:
    source = ManualSource()
    inner = Future(source, finish=lambda: 2)
    outer = Future(FutureAsSource(inner), finish=lambda: inner.value() * 10)
    child = outer.then(lambda f: f.value() + 1)
    with pytest.raises(WaitTimeout):
        outer.wait(0.01)
    assert not outer.done()
    source.complete()
    assert child.wait(10) == 21
    assert outer.wait() == 20
    assert inner.wait() == 2


def test_a_future_made_from_a_failed_one_fails_alike() -> None:
    inner = _failed()
    outer: Future[int] = Future(FutureAsSource(inner), finish=lambda: pytest.fail("finish ran"))
    with pytest.raises(Boom) as raised:
        outer.wait()
    assert raised.value is inner.exception()
