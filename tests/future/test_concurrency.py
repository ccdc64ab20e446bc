"""Many threads on the same futures at once."""

from __future__ import annotations

import asyncio
import contextlib
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from shoal.errors import InvalidFutureState
from shoal.future import Future, collect_all, pool, wait_all, wait_any

from .sources import ManualSource

pytestmark = pytest.mark.concurrency


@pytest.fixture(autouse=True)
def frequent_switches() -> Iterator[None]:
    """Threads change places two thousand times as often as usual."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(2e-6)
    yield
    sys.setswitchinterval(interval)


def _hesitate(rng: random.Random) -> None:
    delay = rng.choice((None, 0.0, rng.random() * 1e-4))
    if delay is not None:
        time.sleep(delay)


def _together(*functions: Callable[[], object]) -> None:
    """Run the functions at once, each in a thread; raise what any of them raised."""
    start = threading.Barrier(len(functions))
    errors: list[BaseException] = []

    def run(function: Callable[[], object]) -> None:
        try:
            start.wait(30)
            function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def _trial(value: int, sourced: bool) -> None:
    source = ManualSource()
    finished: list[int] = []
    runs: Counter[int] = Counter()
    children: list[Future[int]] = []
    outcomes: list[int] = []

    def finish() -> int:
        finished.append(value)
        return value

    future = Future(source, finish=finish) if sourced else Future[int]()

    def complete(rng: random.Random) -> None:
        _hesitate(rng)
        if sourced:
            source.complete()
        else:
            future.set_result(value)

    def callback(index: int) -> Future[int]:
        return future.then(lambda f: (runs.update([index]), f.value())[1])

    def register(rng: random.Random) -> None:
        for index in range(3):
            _hesitate(rng)
            children.append(callback(index))

    def wait(rng: random.Random) -> None:
        _hesitate(rng)
        outcomes.append(future.wait(30))

    def poll(_: random.Random) -> None:
        while not future.done():
            time.sleep(0)
        outcomes.append(future.value())

    def ask_any(_: random.Random) -> None:
        outcomes.append(wait_any([Future(), future], 30).value())

    async def awaited() -> int:
        return await future

    def await_it(_: random.Random) -> None:
        outcomes.append(asyncio.run(awaited()))

    actors = (complete, register, register, wait, wait, poll, ask_any, await_it)
    _together(*(partial(actor, random.Random(f"{value} {i}")) for i, actor in enumerate(actors)))
    assert wait_all(children, 30) == [value] * 6
    assert outcomes == [value] * 5
    assert runs == Counter({0: 2, 1: 2, 2: 2})
    assert finished == ([value] if sourced else [])


@pytest.mark.parametrize("sourced", [True, False])
def test_everyone_sees_one_completion_and_every_callback_runs_once(sourced: bool) -> None:
    for value in range(60):
        _trial(value, sourced)


def test_of_two_that_set_an_outcome_one_wins() -> None:
    def attempt(future: Future[int], value: int, won: list[int]) -> None:
        with contextlib.suppress(InvalidFutureState):
            future.set_result(value)
            won.append(value)

    for _ in range(200):
        future: Future[int] = Future()
        won: list[int] = []
        _together(partial(attempt, future, 1, won), partial(attempt, future, 2, won))
        assert won == [future.value()]


def test_collections_complete_once_whatever_the_order() -> None:
    def complete(futures: list[Future[int]], order: list[int]) -> None:
        for index in order:
            futures[index].set_result(index)

    for trial in range(50):
        futures: list[Future[int]] = [Future() for _ in range(6)]
        order = random.Random(trial).sample(range(6), 6)
        done = collect_all(futures).then(lambda f: [future.value() for future in f.value()])
        _together(partial(complete, futures, order[:3]), partial(complete, futures, order[3:]))
        assert done.wait(30) == list(range(6))


def test_the_pool_ends_and_starts_again_under_load() -> None:
    rng = random.Random(0)
    for _ in range(20):
        futures: list[Future[int]] = [Future() for _ in range(30)]
        children = [future.then(lambda f: f.value() + 1) for future in futures]
        ending = threading.Thread(target=pool.shutdown)
        ending.start()
        for index, future in enumerate(futures):
            future.set_result(index)
            _hesitate(rng)
        assert wait_all(children, 30) == list(range(1, 31))
        ending.join()


def test_callbacks_that_wait_for_callbacks_of_many_futures_all_end() -> None:
    futures: list[Future[int]] = [Future(key=index + 1) for index in range(40)]
    inner: list[Future[int]] = [Future() for _ in range(40)]
    children = []
    for index, future in enumerate(futures):
        partner = inner[39 - index]
        children.append(future.then(lambda f, partner=partner: partner.wait(30) + f.value()))
        future.add_done_callback(lambda f, own=inner[index]: own.set_result(f.value()))
    _together(*(partial(future.set_result, index) for index, future in enumerate(futures)))
    assert wait_all(children, 30) == [39] * 40
