"""Futures of work on devices, on a simulated device and on a real GPU.

The rules of "CUDA-aware future for distributed" (pytorch issue 48305), and the tests of each; ``G`` marks
tests that also run on a GPU, and ``S`` those that only the simulated device can play.

| rule | tests |
| --- | --- |
| complete as soon as users can enqueue ordered work | ``test_a_future_is_done_as_soon_as_...`` G |
| an engine may complete it later | ``test_an_engine_may_complete_its_future_after_the_device`` G |
| RPC: complete when the metadata is there | ``tests/rpc/on_device.py`` S, ``tests/rpc/test_devices.py`` G |
| an event for each device, recorded at completion | ``..._several_devices_...`` G, ``..._announced`` G |
| ``wait()`` blocks until the events have occurred | ``test_a_blocking_wait_...`` G |
| a timeout covers the work on the device | ``test_a_wait_gives_up_on_work_...`` G |
| ``wait(blocking=False)`` only orders the current streams | ``test_a_wait_that_does_not_block_...`` G |
| one interface, also for the CPU | ``tests/future/test_future.py`` |
| callbacks have new streams that wait for the work | ``test_a_callback_has_a_fresh_stream_...`` G |
| ... one on each device | ``test_callbacks_of_several_devices_...`` G |
| their priority is that of the creator, or the user's | ``test_the_priority_...``, ``..._chooses_...`` G |
| callbacks on the streams that were current at ``then`` | ``..._current_...`` G |
| a blocking ``then`` | ``test_a_callback_that_waits_...`` G |
| tensors in nested values | ``test_tensors_are_found_in_nested_values`` G |
| memory is not reused too early | ``test_memory_...`` G |
| work in a graph | ``test_captured_work_...`` S, ``tests/backend/test_nccl_gpu.py`` G |
| failures after completion | ``test_a_failure_of_the_device_...`` S, ``test_a_failure_found_...`` G |
"""

from __future__ import annotations

import asyncio
import gc
import signal
import threading
import time
import weakref
from collections import OrderedDict, UserList, deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch

from shoal.errors import PeerLost, UnsupportedOperation, UsageError, WaitTimeout
from shoal.future import Future, collect_all, pool, wait_all
from shoal.group.submission import map_future
from shoal.streams import CudaRuntime, DeviceEvents, device_tensors, register_runtime, runtime_of
from tests.support.fake_streams import FakeRuntime
from tests.support.recording_cuda import RecordingCuda

#: Two types of device that need no hardware.  The CPU is one of them: its tensors then count as a device's.
META = torch.device("meta")
CPU = torch.device("cpu")

Runtime = FakeRuntime | RecordingCuda

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture
def simulated() -> Iterator[FakeRuntime]:
    """The simulated device, whose streams run nothing until they are released."""
    fake = FakeRuntime(held=True)
    register_runtime("meta", fake)
    register_runtime("cpu", fake)
    yield fake
    register_runtime("meta", None)
    register_runtime("cpu", None)
    assert pool.shutdown(10)
    fake.close()


@pytest.fixture
def recording_cuda() -> Iterator[RecordingCuda]:
    """The real device."""
    real = RecordingCuda()
    register_runtime("cuda", real)
    yield real
    register_runtime("cuda", CudaRuntime())
    assert pool.shutdown(10)
    real.close()


@pytest.fixture(
    params=["simulated", pytest.param("recording_cuda", marks=[pytest.mark.gpu, needs_cuda], id="cuda")]
)
def runtime(request: pytest.FixtureRequest) -> Runtime:
    chosen: Runtime = request.getfixturevalue(request.param)
    return chosen


@pytest.fixture
def devices(runtime: Runtime) -> list[torch.device]:
    """Two devices."""
    if isinstance(runtime, FakeRuntime):
        return [META, CPU]
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    return [torch.device("cuda", index) for index in range(2)]


@pytest.fixture
def device(runtime: Runtime) -> torch.device:
    return META if isinstance(runtime, FakeRuntime) else torch.device("cuda", 0)


def _engine_future(
    runtime: Runtime,
    device: torch.device,
    *,
    high_priority: bool = False,
    check: Callable[[float], bool] | None = None,
) -> Future[torch.Tensor]:
    """The future of an engine that has enqueued "reduce" on its own stream."""
    value = torch.empty(1, device=device)
    stream = runtime.stream(device, "engine")
    with runtime.use(stream):
        runtime.enqueue(device, "reduce")
    events = DeviceEvents(high_priority=high_priority, check=check)
    events.record({device: stream})
    future: Future[torch.Tensor] = Future(device=events)
    future.set_result(value)
    return future


# -- completion and waiting --------------------------------------------------------------------------


def test_a_future_is_done_as_soon_as_its_work_is_enqueued(runtime: Runtime, device: torch.device) -> None:
    future = _engine_future(runtime, device)
    assert future.done()
    assert future.value().device == device
    assert runtime.done == []


def test_an_engine_may_complete_its_future_after_the_device(runtime: Runtime, device: torch.device) -> None:
    stream = runtime.stream(device, "engine")
    with runtime.use(stream):
        runtime.enqueue(device, "reduce")
        runtime.release()
        runtime.finish(device)
    events = DeviceEvents()
    events.record({device: stream})
    future: Future[torch.Tensor] = Future(device=events)
    future.set_result(torch.empty(1, device=device))
    assert future.wait(blocking=False) is future.value()
    assert runtime.done == ["reduce"]
    assert future.wait(10) is future.value()


def test_a_blocking_wait_returns_when_the_work_has_run(runtime: Runtime, device: torch.device) -> None:
    future = _engine_future(runtime, device)
    runtime.release()
    assert future.wait() is future.value()
    assert runtime.done == ["reduce"]
    assert runtime.blocked


def test_a_wait_that_does_not_block_orders_the_callers_stream_behind_the_work(
    runtime: Runtime, device: torch.device
) -> None:
    future = _engine_future(runtime, device)
    assert future.wait(blocking=False) is future.value()
    runtime.enqueue(device, "use")
    assert runtime.done == []
    assert runtime.blocked == 0
    runtime.release()
    runtime.finish(device)
    assert runtime.done == ["reduce", "use"]


def test_awaiting_does_not_block_the_loop_on_the_device(runtime: Runtime, device: torch.device) -> None:
    async def main() -> None:
        await _engine_future(runtime, device)

    asyncio.run(main())
    assert runtime.done == []
    assert runtime.blocked == 0
    runtime.release()
    runtime.finish(device)
    assert runtime.done == ["reduce"]


def test_waits_for_results_on_several_devices_wait_for_all_of_them(
    runtime: Runtime, devices: list[torch.device]
) -> None:
    streams = {device: runtime.stream(device, "engine") for device in devices}
    for device, stream in streams.items():
        with runtime.use(stream):
            runtime.enqueue(device, f"reduce {device}")
    events = DeviceEvents()
    events.record(streams)
    future: Future[list[torch.Tensor]] = Future(device=events)
    future.set_result([torch.empty(1, device=device) for device in devices])
    future.wait(blocking=False)
    for device in devices:
        runtime.enqueue(device, f"use {device}")
    if isinstance(runtime, FakeRuntime):
        streams[devices[0]].release()
    with pytest.raises(WaitTimeout):
        future.wait(0.05)
    runtime.release()
    future.wait(10)
    for device in devices:
        runtime.finish(device)
        assert runtime.done.index(f"reduce {device}") < runtime.done.index(f"use {device}")


def test_a_wait_gives_up_on_work_that_the_device_does_not_do_in_time(
    runtime: Runtime, device: torch.device
) -> None:
    future = _engine_future(runtime, device)
    with pytest.raises(WaitTimeout, match="work on the device is not done"):
        future.wait(0.01)
    with pytest.raises(WaitTimeout, match="work on the device is not done"):
        wait_all([future, future], 0.01)
    assert runtime.done == []
    runtime.release()
    assert wait_all([future, future], 10) == [future.value()] * 2


def test_a_collection_waits_for_the_work_of_all_its_futures(runtime: Runtime, device: torch.device) -> None:
    runtime.release()
    futures = [_engine_future(runtime, device) for _ in range(2)]
    values = [future.value() for future in futures]
    collection = collect_all(futures).then(lambda f: [future.value() for future in f.value()])
    assert collection.wait(10) == values
    assert runtime.done == ["reduce", "reduce"]
    assert all(runtime.pool[0] in runtime.streams_of(value) for value in values)
    assert wait_all(futures) == values


def test_waiting_for_all_need_not_block_the_host(runtime: Runtime, device: torch.device) -> None:
    futures = [_engine_future(runtime, device) for _ in range(2)]
    assert wait_all(futures, blocking=False) == [future.value() for future in futures]
    runtime.enqueue(device, "use")
    assert (runtime.done, runtime.blocked) == ([], 0)
    runtime.release()
    runtime.finish(device)
    assert runtime.done == ["reduce", "reduce", "use"]


def test_captured_work_is_ordered_by_the_streams_of_its_capture(simulated: FakeRuntime) -> None:
    simulated.release()
    earlier: Future[torch.Tensor] = Future()
    earlier.set_result(torch.empty(1, device=META))
    with simulated.capture(META) as graph:
        future: Future[torch.Tensor] = Future()
        simulated.enqueue(META, "make")
        future.set_result(torch.empty(1, device=META))
        derived = map_future(future, lambda _: simulated.enqueue(META, "map"))
        both = collect_all([future, derived.then(lambda _: simulated.enqueue(META, "then"))])
        for blocking in (True, False):
            with pytest.raises(UsageError, match="wait before the capture begins"):
                earlier.wait(blocking=blocking)
        for captured in (future, derived, both):
            with pytest.raises(UsageError, match=r"call wait\(blocking=False\) during the capture"):
                captured.wait()
        both.wait(blocking=False)
        simulated.enqueue(META, "use")
    assert simulated.done == []
    for _ in range(2):
        graph.replay(simulated.current_stream(META))
    simulated.finish(META)
    assert simulated.done == ["make", "map", "then", "use"] * 2
    with pytest.raises(UsageError, match=r"call wait\(blocking=False\) during the capture"):
        future.wait()
    assert earlier.wait() is earlier.value()


def test_captured_work_that_no_stream_waits_for_is_an_error_of_the_simulated_device(
    simulated: FakeRuntime,
) -> None:
    simulated.release()
    side = simulated.stream(META, "side")

    def capture() -> None:
        with simulated.capture(META):
            simulated.wait_event(side, simulated.record(simulated.current_stream(META)))
            with simulated.use(side):
                simulated.enqueue(META, "lost")

    with pytest.raises(RuntimeError, match="unjoined work"):
        capture()
    with pytest.raises(RuntimeError, match="uncaptured work"), simulated.capture(META):
        simulated.wait_event(simulated.current_stream(META), simulated.record(side))


@pytest.mark.parametrize("mode", ["global", "thread_local"])
def test_only_a_prepared_thread_may_ask_for_events_during_a_capture_of_another_one(
    simulated: FakeRuntime, mode: str
) -> None:
    simulated.release()
    event = simulated.record(simulated.current_stream(META))

    def ask(*, prepared: bool) -> bool:
        if prepared:
            simulated.prepare_thread(META)
        return simulated.query(event)

    with simulated.capture(META, mode), ThreadPoolExecutor(1) as thread:
        thread.submit(ask, prepared=True).result(30)

    def unprepared() -> None:
        with simulated.capture(META, mode), ThreadPoolExecutor(1) as thread:
            assert (thread.submit(ask, prepared=False).exception(30) is not None) == (mode == "global")

    if mode == "global":
        with pytest.raises(RuntimeError, match="the capture was ended by a question of ThreadPool"):
            unprepared()
    else:
        unprepared()


# -- callbacks ---------------------------------------------------------------------------------------


def test_a_callback_has_a_fresh_stream_that_waits_for_the_work(
    runtime: Runtime, device: torch.device
) -> None:
    before = runtime.current_stream(device)

    def double(f: Future[torch.Tensor]) -> torch.Tensor:
        assert runtime.current_stream(device) == runtime.pool[-1]
        runtime.enqueue(device, "double")
        return f.value()

    child = _engine_future(runtime, device).then(double)
    grandchild = child.then(lambda f: runtime.enqueue(device, "sum"))
    grandchild.wait(10, blocking=False)
    assert runtime.done == []
    assert runtime.blocked == 0
    assert len({before, *runtime.pool}) == 3
    assert not any(runtime.is_high(stream) for stream in runtime.pool)
    runtime.release()
    grandchild.wait(10)
    assert runtime.done == ["reduce", "double", "sum"]
    assert runtime.current_stream(device) == before


def test_callbacks_of_several_devices_have_a_stream_on_each(
    runtime: Runtime, devices: list[torch.device]
) -> None:
    runtime.release()
    events = DeviceEvents(devices)
    future: Future[list[torch.Tensor]] = Future(device=events)
    for device in devices:
        runtime.enqueue(device, "make")
    future.set_result([torch.empty(1, device=device) for device in devices])
    streams = future.then(lambda _: [runtime.current_stream(device) for device in devices])
    assert streams.wait(10) == runtime.pool
    assert [stream.device for stream in runtime.pool] == devices
    assert runtime.done == ["make", "make"]


@pytest.mark.parametrize("high_priority", [False, True])
def test_the_priority_of_callbacks_is_chosen_where_the_future_is_made(
    runtime: Runtime, device: torch.device, high_priority: bool
) -> None:
    future = _engine_future(runtime, device, high_priority=high_priority)
    runtime.release()
    child = future.then(lambda _: runtime.is_high(runtime.current_stream(device)))
    assert child.wait(10) == high_priority
    second = child.then(lambda _: runtime.is_high(runtime.current_stream(device)))
    assert second.wait(10) == high_priority


def test_a_callback_chooses_the_priority_of_its_streams(runtime: Runtime, device: torch.device) -> None:
    future = _engine_future(runtime, device, high_priority=True)
    runtime.release()
    low = future.then(lambda _: runtime.is_high(runtime.current_stream(device)), priority="low")
    assert low.wait(10) is False
    # Callbacks of its result have the priority that the engine chose.
    assert low.then(lambda _: runtime.is_high(runtime.current_stream(device))).wait(10) is True
    future.add_done_callback(print, priority="low")
    assert pool.shutdown(10)
    assert [runtime.is_high(stream) for stream in runtime.pool] == [False, True, False]
    for register in (future.then, future.add_done_callback):
        with pytest.raises(UsageError, match=f'{register.__name__}: .*"high", "low" or None'):
            register(print, priority=-1)  # type: ignore[call-arg]


def test_a_callback_can_run_on_the_streams_that_were_current_at_then(
    runtime: Runtime, device: torch.device
) -> None:
    own = runtime.stream(device, "own")
    future = _engine_future(runtime, device)
    found: list[Any] = []

    def double(f: Future[torch.Tensor]) -> torch.Tensor:
        found.append(runtime.current_stream(device))
        runtime.enqueue(device, "double")
        return f.value()

    with runtime.use(own):
        runtime.enqueue(device, "before")
        child = future.then(double, streams="current")
        future.add_done_callback(lambda _: found.append(runtime.current_stream(device)), streams="current")
        child.wait(10, blocking=False)
        runtime.enqueue(device, "after")
        assert pool.shutdown(10)
        assert found == [own, own]
        assert (runtime.pool, runtime.done, runtime.blocked) == ([], [], 0)
        runtime.release()
        runtime.finish(device)
    done = runtime.done
    assert sorted(done[:2]) == ["before", "reduce"]
    assert done[2:] == ["double", "after"]
    assert own in runtime.streams_of(future.value())
    # Callbacks of its result have new streams again.
    assert child.then(lambda _: runtime.current_stream(device)).wait(10) == runtime.pool[0]


def test_the_current_streams_are_those_of_the_thread_that_calls_then_and_not_that_completes(
    runtime: Runtime, device: torch.device
) -> None:
    mine, engine = runtime.stream(device, "mine"), runtime.stream(device, "engine")
    future: Future[torch.Tensor] = Future(device=DeviceEvents([device]))
    with runtime.use(mine):
        child = future.then(lambda _: runtime.current_stream(device), streams="current")
    with runtime.use(engine):
        future.set_result(torch.empty(1, device=device))
    assert child.wait(10, blocking=False) == mine
    runtime.release()
    child.wait(10)


def test_a_device_that_was_not_used_before_then_keeps_the_current_stream(simulated: FakeRuntime) -> None:
    simulated.release()
    future: Future[torch.Tensor] = Future()
    child = future.then(lambda _: simulated.current_stream(META), streams="current")
    future.set_result(torch.empty(1, device=META))
    assert child.wait(10) not in simulated.pool
    assert simulated.pool == []


def test_the_choice_of_streams_has_no_effect_on_results_on_the_host(runtime: Runtime) -> None:
    register_runtime("cpu", None)
    future: Future[int] = Future()
    child = future.then(lambda f: f.value() + 1, streams="current")
    future.set_result(1)
    assert child.wait(10) == 2
    assert (runtime.pool, runtime.blocked) == ([], 0)


def test_a_wrong_choice_of_streams_is_refused() -> None:
    future: Future[int] = Future()
    for register in (future.then, future.add_done_callback):
        with pytest.raises(UsageError, match=f'{register.__name__}: .*"new" or "current", got \'old\''):
            register(print, streams="old")  # type: ignore[call-arg]
        with pytest.raises(UsageError, match=r"priority='low' is for new streams.* leave one of the two out"):
            register(print, streams="current", priority="low")  # type: ignore[call-arg]


def test_a_callback_that_waits_runs_after_the_work_and_blocks_nobody_else(
    runtime: Runtime, device: torch.device
) -> None:
    future = _engine_future(runtime, device)

    def read(f: Future[torch.Tensor]) -> list[str]:
        f.wait()
        return list(runtime.done)

    child = future.then(read)
    other = future.then(lambda _: list(runtime.done))
    assert other.wait(10, blocking=False) == []
    assert not child.done()
    runtime.release()
    assert child.wait(10) == ["reduce"]


def test_work_that_computes_a_result_runs_on_streams_that_wait_for_it(
    runtime: Runtime, device: torch.device
) -> None:
    def copy_back(given: torch.Tensor) -> torch.Tensor:
        assert runtime.current_stream(device) == runtime.pool[-1]
        runtime.enqueue(device, "copy back")
        return given

    future = _engine_future(runtime, device)
    staged = map_future(future, copy_back)
    again = map_future(staged, copy_back)
    assert again.wait(blocking=False) is future.value()
    runtime.enqueue(device, "use")
    assert (runtime.done, runtime.blocked) == ([], 0)
    runtime.release()
    runtime.finish(device)
    assert runtime.done == ["reduce", "copy back", "copy back", "use"]
    assert staged.wait(10) is future.value()
    assert runtime.pool[0] in runtime.streams_of(future.value())


# -- values and memory -------------------------------------------------------------------------------


def test_memory_is_tied_to_every_stream_that_works_on_it(runtime: Runtime, device: torch.device) -> None:
    value, source = torch.empty(1, device=device), torch.empty(1, device=device)
    runtime.release()
    stream = runtime.stream(device, "engine")
    events = DeviceEvents()
    events.record({device: stream})
    future: Future[dict[str, torch.Tensor]] = Future(device=events, keep=[source])
    future.set_result({"out": value})
    assert runtime.streams_of(value) == runtime.streams_of(source) == {stream}
    future.then(lambda _: None).wait(10)
    assert runtime.streams_of(value) == {stream, runtime.pool[0]}
    for blocking in (True, False):
        runtime.recorded.clear()
        future.wait(blocking=blocking)
        assert runtime.streams_of(value) == {runtime.current_stream(device)}
    assert runtime.streams_of(source) == set()


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("use", ["wait", "then"])
def test_memory_of_a_released_result_is_not_reused_while_a_stream_reads_it(use: str) -> None:
    device = torch.device("cuda", 0)
    engine, own = torch.cuda.Stream(device), torch.cuda.Stream(device)
    found = torch.zeros(1 << 20, device=device)
    torch.cuda.synchronize()

    def read(f: Future[torch.Tensor]) -> None:
        torch.cuda._sleep(2**28)
        found.copy_(f.value())

    with torch.cuda.stream(engine):
        future: Future[torch.Tensor] = Future()
        future.set_result(torch.full((1 << 20,), 7.0, device=device))
    address = future.value().data_ptr()
    if use == "wait":
        with torch.cuda.stream(own):
            future.wait(blocking=False)
            read(future)
    else:
        future.then(read).wait(60, blocking=False)
        assert pool.shutdown(60)
    del future
    with torch.cuda.stream(engine):
        other = torch.full((1 << 20,), -1.0, device=device)
    torch.cuda.synchronize()
    assert other.data_ptr() != address
    assert bool((found == 7).all())


def test_a_result_on_a_device_is_recognised_without_being_announced(
    runtime: Runtime, device: torch.device
) -> None:
    runtime.release()
    register_runtime("cpu", None)
    future: Future[int] = Future()
    child = future.then(lambda _: (runtime.enqueue(device, "make"), torch.empty(1, device=device))[1])
    future.set_result(1)
    child.wait(10)
    assert runtime.done == ["make"]


@dataclass(frozen=True)
class _Batch:
    x: Any


@dataclass
class _Slotted:
    __slots__ = ("x",)
    x: Any


class _Pair(NamedTuple):
    x: Any
    text: str


NESTED: dict[str, Callable[[torch.Tensor], Any]] = {
    "list": lambda x: [1, [x]],
    "tuple": lambda x: ("text", (x,)),
    "dict": lambda x: {"a": {"b": x}, "c": None},
    "ordered dict": lambda x: OrderedDict(a=x),
    "set": lambda x: {x, 1},
    "frozenset": lambda x: [frozenset({x})],
    "deque": lambda x: deque([x]),
    "user list": lambda x: UserList([x]),
    "named tuple": lambda x: [_Pair(x, "text")],
    "dataclass": lambda x: {"batch": _Batch([x])},
    "dataclass with slots": lambda x: _Slotted((x,)),
    "all": lambda x: {"a": (_Batch(_Pair([frozenset({x})], "text")),)},
}


@pytest.mark.parametrize("name", NESTED)
def test_tensors_are_found_in_nested_values(runtime: Runtime, device: torch.device, name: str) -> None:
    """The value's device gets an event and streams, and its memory is tied to them."""
    register_runtime("cpu", None)
    x = torch.empty(1, device=device)
    value = NESTED[name](x)
    assert list(device_tensors([value, torch.empty(1)])) == [x]
    engine = runtime.stream(device, "engine")
    future: Future[Any] = Future()
    with runtime.use(engine):
        runtime.enqueue(device, "make")
        future.set_result(value)
    child = future.then(lambda _: runtime.enqueue(device, "use"))
    child.wait(10, blocking=False)
    assert runtime.streams_of(x) == {engine, runtime.pool[0]}
    runtime.release()
    child.wait(10)
    assert runtime.done == ["make", "use"]


# -- failures ----------------------------------------------------------------------------------------


def test_a_failure_found_after_the_events_fails_all_futures_made_of_the_result(
    runtime: Runtime, device: torch.device
) -> None:
    runtime.release()
    found: list[Exception] = []

    def check(timeout: float) -> bool:
        if found:
            raise found[0]
        return True

    def made() -> list[Future[Any]]:
        future = _engine_future(runtime, device, check=check)
        return [
            future,
            future.then(lambda f: f.value()),
            future.then(lambda f: f.value(), streams="current"),
            map_future(future, lambda value: value),
            collect_all([future]),
        ]

    wait_all(made(), 10)
    futures = made()
    wait_all(futures, 10, blocking=False)
    found.append(PeerLost("rank 1 is gone", [1]))
    for future in futures:
        assert future.exception() is None
        with pytest.raises(PeerLost):
            future.wait(10)
        assert future.exception() is found[0]


def test_a_failed_operation_has_no_events(runtime: Runtime, device: torch.device) -> None:
    future: Future[int] = Future(device=DeviceEvents([device]))
    future.set_exception(RuntimeError("lost"))
    with pytest.raises(RuntimeError, match="lost"):
        future.wait()
    assert future.then(lambda f: str(f.exception())).wait(10) == "lost"
    assert future.then(lambda f: str(f.exception()), streams="current").wait(10) == "lost"
    assert runtime.pool == []


def test_a_failure_of_the_device_is_that_of_the_future(simulated: FakeRuntime) -> None:
    future = _engine_future(simulated, META)
    derived = map_future(future, lambda value: value)
    broken = RuntimeError("the device fell off the bus")
    simulated.stream_named("engine").fail(broken)
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


def test_a_callback_that_waits_raises_a_failure_of_the_device(simulated: FakeRuntime) -> None:
    future = _engine_future(simulated, META)
    child = future.then(lambda f: f.wait())
    broken = RuntimeError("the device fell off the bus")
    simulated.stream_named("engine").fail(broken)
    with pytest.raises(RuntimeError, match="fell off") as caught:
        child.wait(10)
    assert caught.value is broken
    assert future.exception() is broken


def test_a_failure_of_the_device_leads_to_no_cycle(simulated: FakeRuntime) -> None:
    references = []

    def broken() -> Future[torch.Tensor]:
        future = _engine_future(simulated, META)
        simulated.stream_named("engine").fail(RuntimeError("the device fell off the bus"))
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


def test_a_collection_that_failed_waits_for_no_device(simulated: FakeRuntime) -> None:
    first: Future[torch.Tensor] = Future()
    second: Future[torch.Tensor] = Future()
    collection = collect_all([first, second])
    first.set_exception(PeerLost("rank 1 died", [1]))
    second.set_result(torch.empty(1, device=META))  # on a stream that is held
    with pytest.raises(PeerLost):
        collection.wait(10)
    assert collection.then(lambda f: f.exception()).wait(10) is first.exception()
    assert simulated.pool == []


def test_ctrl_c_ends_a_wait_for_a_device(simulated: FakeRuntime) -> None:
    future = _engine_future(simulated, META)

    def interrupt() -> None:
        while not simulated.blocked:
            time.sleep(1e-3)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        future.wait()
    thread.join()
    simulated.release()
    future.wait(10)


def test_an_engine_may_complete_its_future_from_a_source(simulated: FakeRuntime) -> None:
    class Source:
        def wait(self, timeout: float | None) -> bool:
            return True

        def done(self) -> bool:
            return True

        def exception(self) -> BaseException | None:
            return None

        def notify(self, fn: object) -> None:
            raise AssertionError("nobody registers a callback here")

    simulated.release()
    events = DeviceEvents()
    stream = simulated.stream(META, "engine")
    with simulated.use(stream):
        simulated.enqueue(META, "reduce")
    events.record({META: stream})
    value = torch.empty(1, device=META)
    future = Future(Source(), finish=lambda: value, device=events)
    assert future.wait() is value
    assert simulated.done == ["reduce"]


def test_a_device_without_a_runtime_is_refused() -> None:
    with pytest.raises(UnsupportedOperation, match="no stream runtime for device meta"):
        DeviceEvents([META])
    assert isinstance(runtime_of(torch.device("cuda", 0)), CudaRuntime)


@pytest.mark.gpu
@needs_cuda
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
