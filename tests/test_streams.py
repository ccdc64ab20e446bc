"""Futures of work on devices: played on a fake device, and a little on a real one."""

from __future__ import annotations

import asyncio
import gc
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from shoal.errors import PeerLost, UnsupportedOperation, UsageError, WaitTimeout
from shoal.future import Future, collect_all, pool, wait_all
from shoal.group.submission import map_future
from shoal.streams import CudaRuntime, DeviceEvents, device_tensors, register_runtime, runtime_of
from tests.support.fake_streams import FakeRuntime

#: Two types of device that need no hardware.  The CPU is one of them: its tensors then count as a device's.
META = torch.device("meta")
CPU = torch.device("cpu")


@pytest.fixture
def runtime() -> Iterator[FakeRuntime]:
    fake = FakeRuntime(held=True)
    register_runtime("meta", fake)
    register_runtime("cpu", fake)
    yield fake
    register_runtime("meta", None)
    register_runtime("cpu", None)
    assert pool.shutdown(10)
    fake.close()


def _engine_future(
    runtime: FakeRuntime,
    value: torch.Tensor,
    *,
    high_priority: bool = False,
    check: Callable[[float], bool] | None = None,
) -> Future[torch.Tensor]:
    """What an engine returns that has enqueued "reduce" on a stream of its own."""
    stream = runtime.stream(value.device, "engine")
    with runtime.use(stream):
        runtime.enqueue(value.device, "reduce")
    events = DeviceEvents(high_priority=high_priority, check=check)
    events.record({value.device: stream})
    future: Future[torch.Tensor] = Future(device=events)
    future.set_result(value)
    return future


def test_a_future_is_done_as_soon_as_its_work_is_enqueued(runtime: FakeRuntime) -> None:
    value = torch.empty(1, device=META)
    future = _engine_future(runtime, value)
    assert future.done()
    assert future.value() is value
    assert runtime.done == []


def test_a_blocking_wait_returns_when_the_work_has_run(runtime: FakeRuntime) -> None:
    value = torch.empty(1, device=META)
    future = _engine_future(runtime, value)
    runtime.release()
    assert future.wait() is value
    assert runtime.done == ["reduce"]


def test_a_wait_that_does_not_block_orders_the_callers_stream_behind_the_work(runtime: FakeRuntime) -> None:
    value = torch.empty(1, device=META)
    future = _engine_future(runtime, value)
    assert future.wait(blocking=False) is value
    runtime.enqueue(META, "use")
    assert runtime.done == []
    assert runtime.blocked == 0
    runtime.release()
    runtime.finish(META)
    assert runtime.done == ["reduce", "use"]


def test_awaiting_does_not_block_the_loop_on_the_device(runtime: FakeRuntime) -> None:
    async def main() -> None:
        await _engine_future(runtime, torch.empty(1, device=META))

    asyncio.run(main())
    assert runtime.done == []
    assert runtime.blocked == 0
    runtime.release()
    runtime.finish(META)
    assert runtime.done == ["reduce"]


def test_a_callback_has_a_fresh_stream_that_waits_for_the_work(runtime: FakeRuntime) -> None:
    value = torch.empty(1, device=META)
    before = runtime.current_stream(META)

    def double(f: Future[torch.Tensor]) -> torch.Tensor:
        assert runtime.current_stream(META) is runtime.pool[-1]
        runtime.enqueue(META, "double")
        return f.value()

    child = _engine_future(runtime, value).then(double)
    grandchild = child.then(lambda f: runtime.enqueue(META, "sum"))
    grandchild.wait(10, blocking=False)
    assert runtime.done == []
    assert [stream.name for stream in runtime.pool] == ["meta low 0", "meta low 1"]
    runtime.release()
    grandchild.wait(10)
    assert runtime.done == ["reduce", "double", "sum"]
    assert runtime.current_stream(META) is before


@pytest.mark.parametrize(("high_priority", "name"), [(False, "meta low 0"), (True, "meta high 0")])
def test_the_priority_of_callbacks_is_chosen_where_the_future_is_made(
    runtime: FakeRuntime, high_priority: bool, name: str
) -> None:
    future = _engine_future(runtime, torch.empty(1, device=META), high_priority=high_priority)
    runtime.release()
    child = future.then(lambda _: runtime.current_stream(META).name)
    assert child.wait(10) == name
    second = child.then(lambda _: runtime.current_stream(META).name)
    assert second.wait(10) == name.replace("0", "1")


def test_callbacks_of_several_devices_have_a_stream_on_each(runtime: FakeRuntime) -> None:
    runtime.release()
    values = [torch.empty(1, device=META), torch.empty(1)]
    events = DeviceEvents([META, CPU])
    future: Future[list[torch.Tensor]] = Future(device=events)
    runtime.enqueue(META, "a")
    runtime.enqueue(CPU, "b")
    future.set_result(values)
    names = future.then(lambda _: [runtime.current_stream(device).name for device in (META, CPU)])
    assert names.wait(10) == ["meta low 0", "cpu low 1"]
    assert sorted(runtime.done) == ["a", "b"]


def test_memory_is_tied_to_every_stream_that_works_on_it(runtime: FakeRuntime) -> None:
    value, source = torch.empty(1, device=META), torch.empty(1, device=META)
    runtime.release()
    stream = runtime.stream(META, "engine")
    events = DeviceEvents()
    events.record({META: stream})
    future: Future[dict[str, torch.Tensor]] = Future(device=events, keep=[source])
    future.set_result({"out": value})
    assert runtime.streams_of(value) == runtime.streams_of(source) == {"engine"}
    future.then(lambda _: None).wait(10)
    assert runtime.streams_of(value) == {"engine", "meta low 0"}
    for blocking in (True, False):
        runtime.recorded.clear()
        future.wait(blocking=blocking)
        assert runtime.streams_of(value) == {runtime.current_stream(META).name}
    assert runtime.streams_of(source) == set()


def test_a_result_on_a_device_is_recognised_without_being_announced(runtime: FakeRuntime) -> None:
    runtime.release()
    register_runtime("cpu", None)
    future: Future[int] = Future()
    child = future.then(lambda _: (runtime.enqueue(META, "make"), torch.empty(1, device=META))[1])
    future.set_result(1)
    child.wait(10)
    assert runtime.done == ["make"]


def test_a_collection_waits_for_the_work_of_all_its_futures(runtime: FakeRuntime) -> None:
    runtime.release()
    values = [torch.empty(1, device=META), torch.empty(2, device=META)]
    futures = [_engine_future(runtime, value) for value in values]
    runtime.recorded.clear()
    collection = collect_all(futures).then(lambda f: [future.value() for future in f.value()])
    collection.wait(10)
    assert runtime.done == ["reduce", "reduce"]
    assert all("meta low 0" in runtime.streams_of(value) for value in values)
    assert wait_all(futures) == values


def test_a_wait_gives_up_on_work_that_the_device_does_not_do_in_time(runtime: FakeRuntime) -> None:
    value = torch.empty(1, device=META)
    future = _engine_future(runtime, value)
    with pytest.raises(WaitTimeout, match="work on the device is not done"):
        future.wait(0.01)
    with pytest.raises(WaitTimeout, match="work on the device is not done"):
        wait_all([future, future], 0.01)
    runtime.release()
    assert wait_all([future, future], 10) == [value, value]


def test_ctrl_c_ends_a_wait_for_a_device(runtime: FakeRuntime) -> None:
    future = _engine_future(runtime, torch.empty(1, device=META))

    def interrupt() -> None:
        while not runtime.blocked:
            time.sleep(1e-3)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        future.wait()
    thread.join()
    runtime.release()
    future.wait(10)


def test_waiting_for_all_need_not_block_the_host(runtime: FakeRuntime) -> None:
    values = [torch.empty(1, device=META), torch.empty(2, device=META)]
    assert wait_all([_engine_future(runtime, value) for value in values], blocking=False) == values
    runtime.enqueue(META, "use")
    assert (runtime.done, runtime.blocked) == ([], 0)
    runtime.release()
    runtime.finish(META)
    assert sorted(runtime.done[:2]) == ["reduce", "reduce"]
    assert runtime.done[2:] == ["use"]


def test_a_failure_of_the_device_is_that_of_the_future(runtime: FakeRuntime) -> None:
    future = _engine_future(runtime, torch.empty(1, device=META))
    derived = map_future(future, lambda value: value)
    broken = RuntimeError("the device fell off the bus")
    runtime.stream_named("engine").fail(broken)
    assert future.exception() is None  # nobody has asked the device yet
    for _ in range(2):
        with pytest.raises(RuntimeError, match="fell off") as caught:
            future.wait(10)
        assert caught.value is broken
    assert future.exception() is broken
    with pytest.raises(RuntimeError, match="fell off"):
        future.value()
    assert future.then(lambda f: f.exception()).wait(10) is broken
    with pytest.raises(RuntimeError, match="fell off"):
        derived.wait(10)


def test_a_failure_of_the_device_leads_to_no_cycle(runtime: FakeRuntime) -> None:
    references = []

    def broken() -> Future[torch.Tensor]:
        future = _engine_future(runtime, torch.empty(1, device=META))
        runtime.stream_named("engine").fail(RuntimeError("the device fell off the bus"))
        references.append(weakref.ref(future))
        return future

    gc.collect()
    gc.disable()
    try:
        with pytest.raises(RuntimeError, match="fell off") as raised:
            broken().wait(10)
        del raised
        assert [reference() for reference in references] == [None]
    finally:
        gc.enable()


def test_a_collection_that_failed_waits_for_no_device(runtime: FakeRuntime) -> None:
    first: Future[torch.Tensor] = Future()
    second: Future[torch.Tensor] = Future()
    collection = collect_all([first, second])
    first.set_exception(PeerLost("rank 1 died", [1]))
    second.set_result(torch.empty(1, device=META))  # on a stream that is held
    with pytest.raises(PeerLost):
        collection.wait(10)
    assert collection.then(lambda f: f.exception()).wait(10) is first.exception()
    assert runtime.pool == []


def test_what_an_engine_finds_broken_after_the_events_fails_all_that_was_made_of_the_result(
    runtime: FakeRuntime,
) -> None:
    runtime.release()
    found: list[Exception] = []

    def check(timeout: float) -> bool:
        if found:
            raise found[0]
        return True

    def made() -> list[Future[Any]]:
        future = _engine_future(runtime, torch.empty(1, device=META), check=check)
        return [
            future,
            future.then(lambda f: f.value()),
            map_future(future, lambda value: value),
            collect_all([future]),
        ]

    wait_all(made(), 10)
    futures = made()
    wait_all(futures, 10, blocking=False)
    found.append(PeerLost("rank 1 is gone", [1]))
    for future in futures:
        with pytest.raises(PeerLost):
            future.wait(10)


def test_what_finishes_a_result_runs_on_streams_that_wait_for_it(runtime: FakeRuntime) -> None:
    value = torch.empty(1, device=META)

    def copy_back(given: torch.Tensor) -> torch.Tensor:
        assert runtime.current_stream(META) is runtime.pool[-1]
        runtime.enqueue(META, "copy back")
        return given

    staged = map_future(_engine_future(runtime, value), copy_back)
    again = map_future(staged, copy_back)
    assert again.wait(blocking=False) is value
    runtime.enqueue(META, "use")
    assert (runtime.done, runtime.blocked) == ([], 0)
    runtime.release()
    runtime.finish(META)
    assert runtime.done == ["reduce", "copy back", "copy back", "use"]
    assert staged.wait(10) is value
    assert {"engine", "meta low 0"} <= runtime.streams_of(value)


def test_a_callback_chooses_the_priority_of_its_streams(runtime: FakeRuntime) -> None:
    future = _engine_future(runtime, torch.empty(1, device=META), high_priority=True)
    runtime.release()
    name = future.then(lambda _: runtime.current_stream(META).name, priority="low")
    assert name.wait(10) == "meta low 0"
    # What is made of its result has the priority that the engine chose.
    assert name.then(lambda _: runtime.current_stream(META).name).wait(10) == "meta high 1"
    with pytest.raises(UsageError, match='"high", "low" or None'):
        future.then(print, priority=-1)  # type: ignore[arg-type]


def test_a_failed_operation_has_no_events(runtime: FakeRuntime) -> None:
    future: Future[int] = Future(device=DeviceEvents([META]))
    future.set_exception(RuntimeError("lost"))
    with pytest.raises(RuntimeError, match="lost"):
        future.wait()
    assert future.then(lambda f: str(f.exception())).wait(10) == "lost"
    assert runtime.pool == []


def test_an_engine_may_complete_its_future_from_a_source(runtime: FakeRuntime) -> None:
    class Source:
        def wait(self, timeout: float | None) -> bool:
            return True

        def done(self) -> bool:
            return True

        def exception(self) -> BaseException | None:
            return None

        def notify(self, fn: object) -> None:
            raise AssertionError("nobody registers a callback here")

    runtime.release()
    events = DeviceEvents()
    stream = runtime.stream(META, "engine")
    with runtime.use(stream):
        runtime.enqueue(META, "reduce")
    events.record({META: stream})
    value = torch.empty(1, device=META)
    future = Future(Source(), finish=lambda: value, device=events)
    assert future.wait() is value
    assert runtime.done == ["reduce"]


def test_tensors_are_found_in_nested_values(runtime: FakeRuntime) -> None:
    register_runtime("cpu", None)
    first, second = torch.empty(1, device=META), torch.empty(1, device=META)
    value = {"a": [first, torch.empty(1)], "b": (1, "text", {"c": second}), "d": None}
    assert list(device_tensors(value)) == [first, second]


def test_a_device_without_a_runtime_is_refused() -> None:
    with pytest.raises(UnsupportedOperation, match="no stream runtime for device meta"):
        DeviceEvents([META])
    assert isinstance(runtime_of(torch.device("cuda", 0)), CudaRuntime)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_streams_of_a_real_device_keep_the_order() -> None:
    device = torch.device("cuda", 0)
    side = torch.cuda.Stream(device)
    with torch.cuda.stream(side):
        x = torch.zeros(1 << 22, device=device)
        for _ in range(200):
            x += 1
    events = DeviceEvents(high_priority=True)
    events.record({device: side})
    future: Future[torch.Tensor] = Future(device=events)
    future.set_result(x)
    streams: list[int] = []

    def double(f: Future[torch.Tensor]) -> torch.Tensor:
        streams.append(torch.cuda.current_stream(device).cuda_stream)
        return f.value() * 2

    child = future.then(double).then(lambda f: f.value() + 1)
    y = child.wait(60, blocking=False)
    assert bool((y == 401).all())
    assert torch.equal(child.wait(60), y)
    assert streams[0] not in (side.cuda_stream, torch.cuda.current_stream(device).cuda_stream)
    assert pool.shutdown(60)
