"""The threads of handlers, over a mailbox of this test."""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from shoal.errors import AgentClosed
from shoal.future.pool import STALL_TIMEOUT_S
from shoal.rpc.executor import CALLS, Executor
from shoal.testing import no_leaks

Job = Callable[[], Any]
_LONG = 20.0


class MessageSource:
    """Letters are functions; as the endpoint does, it tells of those that wait while no thread is free."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._boxes: dict[int, deque[Job]] = defaultdict(deque)
        self._free = 0
        self._closed = False
        self.add_thread: Callable[[], None] = lambda: None
        self.watcher = threading.Thread(target=self._watch)

    def open(self, mailbox: int) -> None:
        """All are open."""

    def put(self, job: Job, mailbox: int = CALLS) -> None:
        with self._condition:
            self._boxes[mailbox].append(job)
            self._condition.notify_all()

    def take(self, mailbox: int, timeout: float | None, most: int) -> list[Any] | None:
        with self._condition:
            self._free += mailbox == CALLS
            found = self._condition.wait_for(lambda: self._boxes[mailbox] or self._closed, timeout)
            self._free -= mailbox == CALLS
            if self._boxes[mailbox]:
                return [self._boxes[mailbox].popleft() for _ in range(min(most, len(self._boxes[mailbox])))]
            return None if found else []

    def close(self) -> None:
        with self._condition:
            self._closed = True
            self._condition.notify_all()

    def _watch(self) -> None:
        while not self._closed:
            time.sleep(STALL_TIMEOUT_S)
            if self._boxes[CALLS] and not self._free:
                self.add_thread()


@pytest.fixture
def inbox() -> MessageSource:
    return MessageSource()


@pytest.fixture
def executor(inbox: MessageSource) -> Iterator[Executor]:
    with no_leaks():
        executor = Executor(inbox, lambda job: job(), 8, "a")
        inbox.add_thread = executor.add_thread
        executor.start()
        inbox.watcher.start()
        yield executor
        inbox.close()
        inbox.watcher.join()
        assert executor.close(_LONG)
        assert executor.thread_count() == 0


def test_short_calls_take_few_threads(inbox: MessageSource, executor: Executor) -> None:
    done = [threading.Event() for _ in range(50)]
    for event in done:
        inbox.put(event.set)
        assert event.wait(_LONG)
    assert executor.thread_count() <= 5, "one would do, and a busy machine may stop it within a call"


def test_calls_that_wait_for_one_another_get_a_thread_each(inbox: MessageSource, executor: Executor) -> None:
    barrier = threading.Barrier(8)
    ended = threading.Semaphore(0)

    def meet() -> None:
        barrier.wait(_LONG)
        ended.release()

    for _ in range(8):
        inbox.put(meet)
    assert all(ended.acquire(timeout=_LONG) for _ in range(8))


def test_no_more_handlers_run_than_allowed(inbox: MessageSource, executor: Executor) -> None:
    full, go, late = threading.Semaphore(0), threading.Event(), threading.Event()

    def block() -> None:
        full.release()
        go.wait(_LONG)

    for _ in range(8):
        inbox.put(block)
    assert all(full.acquire(timeout=_LONG) for _ in range(8))
    inbox.put(late.set)
    for _ in range(5):
        executor.add_thread()
    assert executor.thread_count() == 8
    assert not late.is_set()
    go.set()
    assert late.wait(_LONG)


def test_a_mailbox_is_served_in_order_by_one_thread(inbox: MessageSource, executor: Executor) -> None:
    executor.start_mailbox(5)
    seen: list[tuple[int, int]] = []
    for i in range(200):
        inbox.put(lambda i=i: seen.append((i, threading.get_ident())), 5)
    ended = threading.Event()
    inbox.put(ended.set, 5)
    assert ended.wait(_LONG)
    assert [i for i, _ in seen] == list(range(200))
    assert len({thread for _, thread in seen}) == 1


def test_coroutines_share_a_loop_and_end_with_it(inbox: MessageSource, executor: Executor) -> None:
    loops, ended = set(), threading.Semaphore(0)

    async def turn() -> int:
        loops.add(asyncio.get_running_loop())
        await asyncio.sleep(0)
        return 1

    for _ in range(3):
        executor.run_coroutine(turn(), lambda task: ended.release() if task.result() == 1 else None)
    assert all(ended.acquire(timeout=_LONG) for _ in range(3))
    assert len(loops) == 1
    # What still runs when the executor is closed is cancelled.
    executor.run_coroutine(asyncio.sleep(3600), lambda task: ended.release())


def test_a_coroutine_is_cancelled_from_outside(executor: Executor) -> None:
    running, outcome = threading.Event(), threading.Event()

    async def sleep() -> None:
        running.set()
        await asyncio.sleep(3600)

    task = executor.run_coroutine(sleep(), lambda task: outcome.set() if task.cancelled() else None)
    assert running.wait(_LONG)
    task.cancel()
    assert outcome.wait(_LONG)
    task.cancel()


def test_a_coroutine_that_comes_to_a_closed_executor_is_refused_and_leaves_nothing(
    inbox: MessageSource, executor: Executor
) -> None:
    inbox.close()
    assert executor.close(_LONG)
    coroutine = asyncio.sleep(0)
    with no_leaks(), pytest.raises(AgentClosed, match="before a coroutine began"):
        executor.run_coroutine(coroutine, lambda task: None)
    assert inspect.getcoroutinestate(coroutine) == inspect.CORO_CLOSED


def test_a_call_that_cannot_be_answered_ends_no_thread(
    inbox: MessageSource, executor: Executor, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise SystemExit(3)

    for mailbox in (CALLS, 5):
        if mailbox != CALLS:
            executor.start_mailbox(mailbox)
        before, done = executor.thread_count(), threading.Event()
        inbox.put(fail, mailbox)
        inbox.put(done.set, mailbox)
        assert done.wait(_LONG)
        assert executor.thread_count() >= before  # a busy machine may have taken a second one
    assert caplog.text.count("a call could not be answered") == 2


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, asyncio.CancelledError, GeneratorExit])
def test_the_loop_goes_on_whatever_a_coroutine_raises(executor: Executor, kind: type[BaseException]) -> None:
    ended: list[Any] = []
    both = threading.Semaphore(0)

    def end(task: Any) -> None:
        ended.append(task.cancelled() or task.exception())
        both.release()

    async def fail() -> None:
        raise kind

    async def work() -> None:
        await asyncio.sleep(0)

    executor.run_coroutine(fail(), end)
    assert both.acquire(timeout=_LONG)
    executor.run_coroutine(work(), end)
    assert both.acquire(timeout=_LONG)
    assert ended[0] is True or isinstance(ended[0], kind)
    assert ended[1] is None
