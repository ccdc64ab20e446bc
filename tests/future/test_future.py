"""One future: waiting, asking, completing."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from shoal.errors import GroupError, InvalidFutureState, UsageError, WaitTimeout
from shoal.future import Future, collect_all, pool
from shoal.group.submission import map_future
from shoal.streams import DeviceEvents

from .sources import InstantSource, ManualSource


class Boom(Exception):
    pass


@pytest.fixture
def without_collector() -> Iterator[None]:
    """Nothing is freed but by reference counts."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_a_future_gives_the_value_that_was_set() -> None:
    future: Future[int] = Future()
    assert not future.done()
    future.set_result(3)
    assert future.done()
    assert future.wait() == future.result() == future.value() == 3
    assert future.exception() is None


def test_a_future_raises_the_very_exception_that_was_set() -> None:
    future: Future[int] = Future()
    error = Boom("why")
    future.set_exception(error)
    assert future.exception() is error
    for ask in (future.wait, future.result, future.value):
        with pytest.raises(Boom) as raised:
            ask()
        assert raised.value is error


def test_raising_an_exception_again_does_not_lengthen_its_traceback() -> None:
    def fail() -> int:
        raise Boom

    own: Future[int] = Future()
    own.set_exception(Boom())
    for future in (own, Future(InstantSource(), finish=fail), own.then(lambda f: fail())):
        depths = set()
        for ask in (future.wait, future.wait, future.value, future.value):
            with pytest.raises(Boom) as raised:
                ask()
            depths.add(len(raised.traceback))
        assert len(depths) == 1
        assert future is own or raised.traceback[-1].name == "fail"


def test_waiting_blocks_until_another_thread_sets_the_result() -> None:
    future: Future[str] = Future()
    waiting = threading.Event()
    got: list[str] = []

    def wait() -> None:
        waiting.set()
        got.append(future.wait())

    threads = [threading.Thread(target=wait) for _ in range(3)]
    for thread in threads:
        thread.start()
    waiting.wait()
    future.set_result("x")
    for thread in threads:
        thread.join()
    assert got == ["x"] * 3


def test_there_is_no_value_before_completion() -> None:
    for future in (Future[int](), Future(ManualSource(), finish=lambda: 1)):
        with pytest.raises(InvalidFutureState, match="no value yet"):
            future.value()
        with pytest.raises(InvalidFutureState, match="no outcome yet"):
            future.exception()


def test_an_outcome_can_be_set_only_once() -> None:
    future: Future[int] = Future()
    future.set_result(1)
    with pytest.raises(InvalidFutureState, match="outcome already"):
        future.set_result(2)
    with pytest.raises(InvalidFutureState, match="outcome already"):
        future.set_exception(Boom())
    assert future.value() == 1


def test_nobody_else_may_complete_the_future_of_an_engine() -> None:
    future = Future(ManualSource(), finish=lambda: 1)
    with pytest.raises(InvalidFutureState, match="its engine"):
        future.set_result(2)
    with pytest.raises(InvalidFutureState, match="its engine"):
        future.set_exception(Boom())


def test_only_exceptions_can_be_set_as_exceptions() -> None:
    with pytest.raises(UsageError, match="got str: 'oops'"):
        Future[int]().set_exception("oops")  # type: ignore[arg-type]


def test_a_wait_that_times_out_leaves_the_operation_running() -> None:
    source = ManualSource()
    for future, complete in (
        (own := Future[int](), lambda: own.set_result(5)),
        (Future(source, finish=lambda: 5), source.complete),
    ):
        for timeout in (0, 0.01, -1.0):
            with pytest.raises(WaitTimeout, match=f"after {timeout} s .*continues"):
                future.wait(timeout)
        assert not future.done()
        complete()
        assert future.wait(0) == 5


def test_waiting_without_blocking_waits_for_results_on_the_host() -> None:
    future: Future[int] = Future()
    with pytest.raises(WaitTimeout):
        future.wait(0.01, blocking=False)
    future.set_result(1)
    assert future.wait(blocking=False) == 1


def test_an_endless_timeout_is_none() -> None:
    future: Future[int] = Future()
    threading.Timer(0.01, future.set_result, [1]).start()
    assert future.wait(float("inf")) == 1
    assert Future(InstantSource(), finish=lambda: 2).wait(float("inf")) == 2


def test_the_waiting_thread_goes_straight_into_the_engine() -> None:
    source = ManualSource()
    future = Future(source, finish=lambda: threading.current_thread().name)
    threading.Timer(0.01, source.complete).start()
    assert future.wait() == threading.current_thread().name
    assert source.timeouts
    assert all(timeout is not None and timeout <= 0.1 for timeout in source.timeouts)


def test_without_finish_the_value_is_none() -> None:
    assert Future[None](InstantSource()).wait() is None


def test_asking_done_completes_the_future() -> None:
    source = ManualSource()
    future = Future(source, finish=lambda: "value")
    assert not future.done()
    source.complete()
    assert future.done()
    assert future.value() == "value"


def test_the_engines_exception_is_raised_and_finish_does_not_run() -> None:
    source = ManualSource()
    future: Future[None] = Future(source, finish=lambda: pytest.fail("finish ran"))
    error = Boom()
    source.complete(error)
    with pytest.raises(Boom) as raised:
        future.wait()
    assert raised.value is error


def test_what_finish_raises_is_the_exception() -> None:
    def finish() -> int:
        raise Boom("in finish")

    future = Future(InstantSource(), finish=finish)
    with pytest.raises(Boom, match="in finish"):
        future.wait()
    assert isinstance(future.exception(), Boom)


def test_an_engine_that_cannot_tell_its_outcome_fails_the_future() -> None:
    class Confused(InstantSource):
        def exception(self) -> BaseException | None:
            raise Boom("unknown status")

    future: Future[None] = Future(Confused())
    with pytest.raises(Boom, match="unknown status"):
        future.wait()


def test_nobody_sees_the_completion_before_finish_has_run() -> None:
    source = ManualSource()
    entered, leave = threading.Event(), threading.Event()

    def finish() -> int:
        entered.set()
        leave.wait()
        return 1

    future = Future(source, finish=finish)
    source.complete()
    first = threading.Thread(target=future.wait)
    first.start()
    entered.wait()
    assert not future.done()
    with pytest.raises(InvalidFutureState):
        future.value()
    got: list[int] = []
    second = threading.Thread(target=lambda: got.append(future.wait()))
    second.start()
    callback = future.then(lambda f: f.value() + 1)
    leave.set()
    first.join()
    second.join()
    assert got == [1]
    assert callback.wait(10) == 2


def test_a_future_tells_its_state_and_key() -> None:
    future: Future[int] = Future(key=255)
    assert repr(future) == "<shoal.Future 0xff pending>"
    future.set_result(1)
    assert repr(future) == "<shoal.Future 0xff done with int>"
    failed: Future[int] = Future()
    failed.set_exception(Boom())
    assert repr(failed) == "<shoal.Future failed with Boom>"


@pytest.mark.usefixtures("without_collector")
def test_what_is_kept_for_the_operation_is_freed_on_completion() -> None:
    kept, captured = torch.ones(2), torch.ones(2)
    references = [weakref.ref(kept), weakref.ref(captured)]
    source = ManualSource()
    future = Future(source, finish=lambda captured=captured: None, keep=kept)
    del kept, captured
    assert all(reference() is not None for reference in references)
    source.complete()
    future.wait()
    assert all(reference() is None for reference in references)


@pytest.mark.usefixtures("without_collector")
def test_a_dropped_future_frees_its_tensor_without_the_garbage_collector() -> None:
    future: Future[torch.Tensor] = Future()
    child = future.then(lambda f: f.value())
    tensor = torch.ones(3)
    reference = weakref.ref(tensor)
    future.set_result(tensor)
    assert child.wait(10) is tensor
    del future, child, tensor
    assert pool.shutdown(10)
    assert reference() is None


@pytest.mark.usefixtures("without_collector")
def test_futures_that_never_complete_are_freed_with_their_callbacks() -> None:
    tensor = torch.ones(3)
    reference = weakref.ref(tensor)
    future: Future[torch.Tensor] = Future(keep=tensor)
    child = future.then(lambda f: f.value())
    with pytest.raises(WaitTimeout):
        child.wait(0)
    del future, tensor
    assert reference() is None


@pytest.mark.usefixtures("without_collector")
@pytest.mark.parametrize("ask", [Future[None].wait, Future[None].result, Future[None].value])
def test_a_raised_exception_leads_to_no_cycle(ask: Callable[[Future[None]], None]) -> None:
    references = []

    def failed() -> Future[None]:
        future: Future[None] = Future()
        future.set_exception(Boom())
        references.append(weakref.ref(future))
        return future

    with pytest.raises(Boom) as raised:
        ask(failed())
    del raised
    assert [reference() for reference in references] == [None]


@pytest.mark.usefixtures("without_collector")
def test_an_error_passed_on_through_callbacks_keeps_nothing_alive() -> None:
    def chain() -> list[weakref.ref[Future[None]]]:
        first: Future[None] = Future()
        second = first.then(lambda f: f.value())
        third = second.then(lambda f: f.wait())
        first.set_exception(Boom())
        return [weakref.ref(first), weakref.ref(second), weakref.ref(third)]

    references = chain()
    assert pool.shutdown(10)
    assert [reference() for reference in references] == [None, None, None]


@pytest.mark.usefixtures("without_collector")
def test_an_error_of_a_callback_keeps_nothing_alive() -> None:
    def fails(future: Future[None]) -> None:
        raise Boom

    def failed() -> weakref.ref[torch.Tensor]:
        kept = torch.ones(2)  # of a frame of the traceback
        future: Future[None] = Future()
        future.set_result(None)
        with pytest.raises(Boom):
            future.then(fails).wait(10)
        return weakref.ref(kept)

    reference = failed()
    assert pool.shutdown(10)
    assert reference() is None


def test_a_forked_child_can_use_futures_of_its_own() -> None:
    occupied, leave = threading.Event(), threading.Event()
    blocker: Future[None] = Future()
    blocker.add_done_callback(lambda f: (occupied.set(), leave.wait()))
    blocker.set_result(None)
    occupied.wait()
    with pool.lock:  # as another thread might hold it while this one forks
        pid = os.fork()
    if pid == 0:
        future: Future[int] = Future()
        child = future.then(lambda f: f.value() + 1)
        future.set_result(1)
        os._exit(0 if child.wait(10) == 2 and len(pool._threads) == 1 else 1)
    leave.set()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


class _Cancellable(ManualSource):
    def __init__(self, can: bool) -> None:
        super().__init__()
        self._can = can

    def cancel(self) -> bool:
        if self._can:
            self.complete(GroupError("cancelled"))
        return self._can


def test_a_future_is_cancelled_if_its_engine_can() -> None:
    future: Future[int] = Future(_Cancellable(True), value=1)
    derived = map_future(future, lambda value: value)
    assert derived.cancel()
    for each in (derived, future):
        with pytest.raises(GroupError, match="cancelled"):
            each.wait(10)
        assert not each.cancel()


def test_what_cannot_be_cancelled_goes_on() -> None:
    source = _Cancellable(False)
    future: Future[int] = Future(source, value=1)
    plain: Future[int] = Future()
    futures = [future, plain, Future(ManualSource()), future.then(lambda f: f.value()), collect_all([future])]
    assert not any(each.cancel() for each in futures)
    source.complete()
    assert future.wait(10) == 1
    assert not future.cancel()


def test_a_stop_iteration_in_the_place_of_a_value_is_an_error() -> None:
    """It ends no iteration but that of whoever calls for the value."""
    device = DeviceEvents()
    for future in (
        Future(InstantSource(), finish=iter([]).__next__),
        Future(InstantSource(), finish=iter([]).__next__, device=device),
    ):
        with pytest.raises(RuntimeError, match=r"\(finish\) raised StopIteration"):
            future.wait()


def test_a_value_that_contains_itself_completes_its_future() -> None:
    value: dict[str, Any] = {}
    value["self"] = value
    future: Future[Any] = Future()
    future.set_result(value)
    assert future.then(lambda done: done.value()["self"]).wait(timeout=10) is value


def test_an_event_that_cannot_be_recorded_fails_the_future(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("the device failed")

    monkeypatch.setattr("shoal.future.state.completion_events", fail)
    future: Future[int] = Future()
    future.set_result(1)
    with pytest.raises(RuntimeError, match="the device failed"):
        future.wait(timeout=10)
