"""Futures of work on devices: played on a fake device, and a little on a real one."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
import torch

from shoal.errors import UnsupportedOperation
from shoal.future import Future, collect_all, pool, wait_all
from shoal.streams import CudaRuntime, DeviceEvents, device_tensors, register_runtime, runtime_of
from tests.support.fake_streams import FakeRuntime, FakeStream

#: Two types of device that need no hardware.  The CPU is one of them: its tensors then count as a device's.
META = torch.device("meta")
CPU = torch.device("cpu")


@pytest.fixture
def runtime() -> Iterator[FakeRuntime]:
    fake = FakeRuntime()
    register_runtime("meta", fake)
    register_runtime("cpu", fake)
    yield fake
    register_runtime("meta", None)
    register_runtime("cpu", None)
    assert pool.shutdown(10)


def _engine_future(
    runtime: FakeRuntime, value: torch.Tensor, *, high_priority: bool = False
) -> Future[torch.Tensor]:
    """What an engine returns that has enqueued "reduce" on a stream of its own."""
    stream = FakeStream(value.device, "engine")
    with runtime.use(stream):
        runtime.enqueue(value.device, "reduce")
    events = DeviceEvents(high_priority=high_priority)
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
    assert _engine_future(runtime, value).wait() is value
    assert runtime.done == ["reduce"]


def test_a_wait_that_does_not_block_orders_the_callers_stream_behind_the_work(runtime: FakeRuntime) -> None:
    value = torch.empty(1, device=META)
    future = _engine_future(runtime, value)
    assert future.wait(blocking=False) is value
    runtime.enqueue(META, "use")
    assert runtime.done == []
    runtime.finish(META)
    assert runtime.done == ["reduce", "use"]


def test_awaiting_does_not_block_the_loop_on_the_device(runtime: FakeRuntime) -> None:
    async def main() -> None:
        await _engine_future(runtime, torch.empty(1, device=META))

    asyncio.run(main())
    assert runtime.done == []
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
    grandchild.wait(10)
    assert runtime.done == ["reduce", "double", "sum"]
    assert runtime.current_stream(META) is before


@pytest.mark.parametrize(("high_priority", "name"), [(False, "meta low 0"), (True, "meta high 0")])
def test_the_priority_of_callbacks_is_chosen_where_the_future_is_made(
    runtime: FakeRuntime, high_priority: bool, name: str
) -> None:
    future = _engine_future(runtime, torch.empty(1, device=META), high_priority=high_priority)
    child = future.then(lambda _: runtime.current_stream(META).name)
    assert child.wait(10) == name
    second = child.then(lambda _: runtime.current_stream(META).name)
    assert second.wait(10) == name.replace("0", "1")


def test_callbacks_of_several_devices_have_a_stream_on_each(runtime: FakeRuntime) -> None:
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
    stream = FakeStream(META, "engine")
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
    register_runtime("cpu", None)
    future: Future[int] = Future()
    child = future.then(lambda _: (runtime.enqueue(META, "make"), torch.empty(1, device=META))[1])
    future.set_result(1)
    child.wait(10)
    assert runtime.done == ["make"]


def test_a_collection_waits_for_the_work_of_all_its_futures(runtime: FakeRuntime) -> None:
    values = [torch.empty(1, device=META), torch.empty(2, device=META)]
    futures = [_engine_future(runtime, value) for value in values]
    runtime.recorded.clear()
    collection = collect_all(futures).then(lambda f: [future.value() for future in f.value()])
    collection.wait(10)
    assert runtime.done == ["reduce", "reduce"]
    assert all("meta low 0" in runtime.streams_of(value) for value in values)
    assert wait_all(futures) == values


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

    events = DeviceEvents()
    stream = FakeStream(META, "engine")
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
