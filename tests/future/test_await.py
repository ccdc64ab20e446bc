"""Futures in asyncio."""

from __future__ import annotations

import asyncio
import threading

import pytest

from shoal.future import Future, callback_scope

from .sources import ManualSource


class Boom(Exception):
    pass


def test_awaiting_gives_the_value_and_lets_the_loop_run() -> None:
    async def main() -> tuple[int, int]:
        source = ManualSource()
        future = Future(source, finish=lambda: 3)
        other: Future[int] = Future()
        waiters = asyncio.gather(_awaited(future), _awaited(other))
        await asyncio.sleep(0)
        assert not waiters.done()
        await asyncio.to_thread(source.complete)
        threading.Timer(0.01, other.set_result, [4]).start()
        first, second = await waiters
        return first, second

    assert asyncio.run(main()) == (3, 4)


def test_awaiting_a_completed_future_gives_its_value_at_once() -> None:
    future: Future[int] = Future()
    future.set_result(1)
    # No loop is needed when there is nothing to wait for.
    with pytest.raises(StopIteration) as stop:
        future.__await__().send(None)
    assert stop.value.value == 1


def test_awaiting_raises_the_very_exception() -> None:
    error = Boom()

    async def main() -> None:
        for done_before in (True, False):
            future: Future[int] = Future()
            complete = threading.Timer(0.01, future.set_exception, [error])
            if done_before:
                future.set_exception(error)
            else:
                complete.start()
            with pytest.raises(Boom) as raised:
                await future
            assert raised.value is error

    asyncio.run(main())


def test_a_cancelled_await_leaves_the_operation_running() -> None:
    async def main() -> int:
        future: Future[int] = Future()
        task = asyncio.ensure_future(_awaited(future))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(_awaited(future), 0.01)
        assert not future.done()
        assert future._subscribers == []
        threading.Timer(0.01, future.set_result, [5]).start()
        return await future

    assert asyncio.run(main()) == 5


def test_a_future_may_outlive_the_loop_that_awaited_it() -> None:
    future: Future[int] = Future()

    async def main() -> None:
        # Abandoned, not cancelled: the loop ends with the waiter in place.
        iterator = future.__await__()
        iterator.send(None)
        abandoned.append(iterator)

    abandoned: list[object] = []
    asyncio.run(main())
    child = future.then(lambda f: f.value() + 1)
    future.set_result(1)
    assert child.wait(10) == 2


def test_a_callback_may_run_a_loop_of_its_own() -> None:
    future: Future[int] = Future(key=1)
    inner: Future[int] = Future()

    async def main() -> bool:
        await inner
        return callback_scope.get() is not None

    child = future.then(lambda _: asyncio.run(main()))
    future.set_result(0)
    inner.set_result(0)
    assert child.wait(10)


async def _awaited(future: Future[int]) -> int:
    return await future
