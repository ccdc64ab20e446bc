"""One thread settles a future, whatever many threads and Ctrl-C do at once, between any two steps."""

from __future__ import annotations

import asyncio
import ctypes
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from types import FrameType
from typing import Any

import pytest

from shoal.errors import InvalidFutureState, PeerLost
from shoal.future import Future, future, pool, state
from shoal.recorder import FlightRecorder
from shoal.spec import OpKind
from tests.support.bytecodes import enable_opcode_events

from .sources import ManualSource

pytestmark = pytest.mark.concurrency

#: Where a future may be cut off.
FILES = {future.__file__, state.__file__}


class Record:
    """A recorder's record that counts how often completion was written to it."""

    kind = OpKind.BARRIER
    number = -1
    failure: str | None = None

    def __init__(self) -> None:
        self.notes = 0
        self._ended = 0

    @property
    def ended(self) -> int:
        return self._ended

    @ended.setter
    def ended(self, moment: int) -> None:
        self._ended = moment
        self.notes += 1


class YieldingSource(ManualSource):
    """Lets other threads go first at the beginning and end of everything it is asked."""

    def wait(self, timeout: float | None) -> bool:
        time.sleep(0)
        done = super().wait(timeout)
        time.sleep(0)
        return done

    def done(self) -> bool:
        time.sleep(0)
        done = super().done()
        time.sleep(0)
        return done

    def exception(self) -> BaseException | None:
        time.sleep(0)
        error = super().exception()
        time.sleep(0)
        return error


@pytest.fixture
def hesitation() -> Iterator[None]:
    """Every thread that is started may give way to another one at every bytecode of the future."""
    rng = random.Random(0)

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        if frame.f_code.co_filename not in FILES:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode" and rng.random() < 0.2:
            time.sleep(rng.choice((0, 0, 2e-5)))
        return trace

    interval, before = sys.getswitchinterval(), threading.gettrace()
    sys.setswitchinterval(1e-6)
    threading.settrace(trace)
    yield
    threading.settrace(before)  # type: ignore[arg-type]
    sys.setswitchinterval(interval)


def _outcome(ask: Callable[[], object]) -> object:
    try:
        return ask()
    except PeerLost as error:
        return error


def _poll(subject: Future[int]) -> object:
    while not subject.done():
        time.sleep(0)
    return subject.value()


async def _awaited(subject: Future[int]) -> int:
    return await subject


def _many_at_once(
    source: ManualSource, subject: Future[int], error: PeerLost | None, expected: object
) -> None:
    record, outcomes, called = Record(), [], []
    actors: list[Callable[[], object]] = [
        lambda: subject.wait(),
        lambda: subject.wait(),
        lambda: subject.wait(30),
        lambda: _poll(subject),
        lambda: asyncio.run(_awaited(subject)),
    ]
    others: list[Callable[[], object]] = [
        lambda: source.complete(error),
        lambda: subject.set_record(record),
        lambda: subject.add_done_callback(lambda done: called.append(_outcome(done.value))),
        lambda: subject.add_done_callback(lambda done: called.append(_outcome(done.value))),
    ]
    start = threading.Barrier(len(actors) + len(others))

    def run(actor: Callable[[], object], says: bool) -> None:
        start.wait(30)
        try:
            said = _outcome(actor)
        except BaseException as raised:  # compared below, where it fails the test
            said, says = raised, True
        if says:
            outcomes.append(said)

    threads = [threading.Thread(target=run, args=(actor, actor in actors)) for actor in actors + others]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert pool.shutdown(30)
    assert outcomes == [expected] * len(actors)
    assert called == [expected] * 2
    assert record.notes == 1
    assert (record.failure is None) == (error is None)
    outcome = "done with int" if error is None else "failed with PeerLost"
    assert repr(subject) == f"<shoal.Future of barrier {outcome}>"


@pytest.mark.usefixtures("hesitation")
def test_one_of_many_threads_settles_a_success() -> None:
    for _ in range(40):
        source = YieldingSource()
        _many_at_once(source, Future(source, value=42), None, 42)


@pytest.mark.usefixtures("hesitation")
def test_one_of_many_threads_runs_what_finishes_it() -> None:
    for _ in range(40):
        source = YieldingSource()
        _many_at_once(source, Future(source, finish=count(42).__next__), None, 42)


@pytest.mark.usefixtures("hesitation")
def test_one_of_many_threads_settles_a_failure() -> None:
    for _ in range(40):
        source, error = YieldingSource(), PeerLost("rank 1 died", [1])
        _many_at_once(source, Future(source, value=42), error, error)


def _interrupted(act: Callable[[], object], steps: int) -> tuple[bool, bool]:
    """Act, with Ctrl-C after so many bytecodes of the future: whether it came to that, and whether it struck.

    C code raises the signal, so that Python handles it where it handles those of a terminal, which is not
    between any two bytecodes.
    """
    raise_signal = ctypes.PYFUNCTYPE(None, *[ctypes.py_object] * 3)(("PyErr_SetInterrupt", ctypes.pythonapi))
    left, struck = steps, False

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal left
        if frame.f_code.co_filename not in FILES:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            left -= 1
            if left == 0:
                return raise_signal  # from here on this frame's trace function
        return trace

    def handle(_: int, frame: FrameType | None) -> None:
        nonlocal struck
        if not struck and frame is not None and frame.f_code is not trace.__code__:
            struck = True
            raise KeyboardInterrupt

    enable_opcode_events()
    before, handler = sys.gettrace(), signal.signal(signal.SIGINT, handle)
    try:
        sys.settrace(trace)
        try:
            act()
        finally:
            sys.settrace(before)
    except KeyboardInterrupt:
        pass
    finally:
        signal.signal(signal.SIGINT, handler)
    return left <= 0, struck


def _interrupted_at_every_step(act: Callable[[Future[int]], object], *, sourced: bool, finished: bool) -> int:
    """Run ``act`` on a future again and again, with Ctrl-C one step later each time; how often it struck."""
    struck = 0
    for steps in range(1, 1000):
        source = ManualSource()
        if not sourced:
            subject: Future[int] = Future()
        elif finished:
            subject = Future(source, finish=count(7).__next__)
        else:
            subject = Future(source, value=7)
        record, woken = Record(), threading.Event()
        subject.set_record(record)
        subject._subscribe(lambda _, woken=woken: woken.set())
        with source._lock:  # complete, and nobody was told
            source._done.set()
        source._listeners.clear()
        reached, interrupted = _interrupted(partial(act, subject), steps)
        if not reached:
            return struck
        struck += interrupted
        if not sourced and not subject._claims:
            subject.set_result(7)
        assert subject.wait(10) == 7
        assert woken.wait(10), f"Ctrl-C after {steps} steps: who waited was not woken"
        assert pool.shutdown(10)
        assert record.notes == 1, f"Ctrl-C after {steps} steps"
    raise AssertionError("it did not come to its end")


@pytest.mark.parametrize("finished", [False, True])
@pytest.mark.parametrize("act", [Future.wait, Future.done, lambda f: f.wait(20)])
def test_ctrl_c_between_any_two_steps_loses_nothing(
    act: Callable[[Future[int]], object], finished: bool
) -> None:
    assert _interrupted_at_every_step(act, sourced=True, finished=finished) > 20


def test_ctrl_c_between_any_two_steps_of_setting_a_result_loses_nothing() -> None:
    def act(subject: Future[int]) -> None:
        try:
            subject.set_result(7)
        except InvalidFutureState:
            pytest.fail("nobody else set it")

    assert _interrupted_at_every_step(act, sourced=False, finished=False) > 20


def test_a_record_that_is_handed_over_during_completion_is_noted_once() -> None:
    for _ in range(300):
        recorder = FlightRecorder("world", 0)
        subject: Future[int] = Future()
        thread = threading.Thread(target=subject.set_result, args=(7,))
        thread.start()
        recorder.add(subject, OpKind.BARRIER, 0, 0, None, 0)
        thread.join()
        assert [entry.state for entry in recorder.entries()] == ["completed"]


def test_an_error_that_cannot_be_put_into_words_completes_its_future() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise ValueError("no words")

    recorder = FlightRecorder("world", 0)
    subject: Future[int] = Future()
    recorder.add(subject, OpKind.BARRIER, 0, 0, None, 0)
    subject.set_exception(Mute())
    assert [entry.failure for entry in recorder.entries()] == ["Mute"]
