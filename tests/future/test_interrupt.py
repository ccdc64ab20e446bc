"""Ctrl-C ends a wait at once and leaves the operation running."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable

import pytest

from shoal.future import Future, wait_all, wait_any

from .sources import InstantSource, ManualSource


def _interrupt_when_waiting(future: Future[int], source: ManualSource) -> threading.Thread:
    """Start a thread that sends SIGINT to the main thread once that waits for ``future``."""

    def interrupt() -> None:
        while not (source.entered.is_set() or future._subscribers):
            time.sleep(0.001)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    return thread


@pytest.mark.parametrize(
    "wait",
    [
        pytest.param(lambda f: f.wait(), id="wait"),
        pytest.param(lambda f: f.wait(50), id="wait-timeout"),
        pytest.param(lambda f: wait_all([f]), id="wait_all"),
        pytest.param(lambda f: wait_any([f]), id="wait_any"),
    ],
)
@pytest.mark.parametrize("sourced", [True, False])
def test_ctrl_c_ends_the_wait_and_not_the_operation(
    wait: Callable[[Future[int]], object], sourced: bool
) -> None:
    source = ManualSource()
    future = Future(source, finish=lambda: 1) if sourced else Future[int]()
    thread = _interrupt_when_waiting(future, source)
    with pytest.raises(KeyboardInterrupt):
        wait(future)
    thread.join()
    assert not future.done()
    if sourced:
        source.complete()
    else:
        future.set_result(1)
    assert future.wait(10) == 1


def test_an_engine_is_never_asked_to_block_for_long() -> None:
    """Native code does not see signals: they are handled between the slices."""
    source = ManualSource()
    future = Future(source, finish=lambda: 1)

    def complete() -> None:
        end = time.monotonic() + 30
        while len(source.timeouts) < 3 and time.monotonic() < end:
            time.sleep(0.01)
        source.complete()

    completing = threading.Thread(target=complete)
    completing.start()
    assert future.wait() == 1
    completing.join()
    assert len(source.timeouts) >= 3
    assert all(timeout is not None and timeout <= 0.1 for timeout in source.timeouts)


def test_ctrl_c_during_finish_does_not_lose_the_completion() -> None:
    calls = []

    def finish() -> int:
        calls.append(threading.current_thread())
        if len(calls) == 1:
            signal.raise_signal(signal.SIGINT)
        return 7

    future = Future(InstantSource(), finish=finish)
    with pytest.raises(KeyboardInterrupt):
        future.wait()
    assert future.wait(10) == 7
    assert len(calls) == 2
    assert calls[1] is not threading.main_thread()


def test_ctrl_c_while_completing_reaches_every_subscriber() -> None:
    future: Future[int] = Future()
    seen = []

    def interrupted(_: Future[int]) -> None:
        seen.append(1)
        if len(seen) == 1:
            signal.raise_signal(signal.SIGINT)

    future._subscribe(interrupted)
    future._subscribe(lambda _: seen.append(2))
    child = future.then(lambda f: f.value())
    with pytest.raises(KeyboardInterrupt):
        future.set_result(3)
    assert child.wait(10) == 3
    assert seen == [1, 1, 2]
