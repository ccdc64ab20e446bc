"""A program: calls with tensors of the pretended device, one function for each thing that they promise.

It writes a line for each function: "name: ok", or what went wrong.
"""

from __future__ import annotations

import logging
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from shoal.errors import (
    CallCancelled,
    CallTimeout,
    RemoteError,
    RpcError,
    UsageError,
    WaitTimeout,
    WorkerLost,
)
from shoal.future import Future
from shoal.rpc import Agent, Peer
from shoal.testing import Agents
from tests.rpc.device_handlers import (
    SlowTable,
    Table,
    current_stream,
    double,
    doubled_soon,
    echo,
    fail_with,
    hold_own_stream,
    kinds,
    make_device,
    make_on_device,
    note,
    note_sum,
    noted,
    on_device,
    slow_table_later,
    slow_table_soon,
    stream_name,
)
from tests.rpc.device_storm import storm
from tests.support import pretend_device
from tests.support.fake_streams import FakeStream
from tests.support.pretend_device import PretendRuntime, is_pretend, memory_of

PATIENCE = 30.0
MIB = 1 << 20

runtime: PretendRuntime
#: weak references to the memory of the host that copies went through
buffers: list[weakref.ref[torch.Tensor]] = []


def expects(error: type[BaseException], *words: str) -> Any:
    """A context that raises this, with these words in its message."""

    @contextmanager
    def context() -> Iterator[None]:
        with pytest.raises(error) as caught:
            yield
        assert all(word in str(caught.value) for word in words), str(caught.value)

    return context()


def eventually(holds: Callable[[], bool]) -> None:
    """Wait until it holds."""
    deadline = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.001)


def held_call(call: Callable[[], Any]) -> tuple[Any, list[FakeStream]]:
    """What ``call`` returns, and the held streams on which it has put its copies."""
    known = len(runtime.pool)
    with runtime.holding():
        result = call()
    return result, runtime.pool[known:]


def release(streams: list[FakeStream]) -> None:
    for stream in streams:
        stream.release()


# -- what is promised -------------------------------------------------------------------------------


def tensors_arrive_on_the_device_that_the_map_says(a: Agent, b: Peer) -> None:
    y = b.call(double, on_device(1, 2, 3)).wait(PATIENCE)
    assert is_pretend(y)
    assert y.tolist() == [2, 4, 6]
    assert b.call(kinds, on_device(1), torch.ones(1)).wait(PATIENCE) == ["pretend", "cpu"]
    assert b.call(make_on_device).wait(PATIENCE).tolist() == [1, 2]


def tensors_are_what_they_were(a: Agent, b: Peer) -> None:
    matrix = torch.arange(12.0).reshape(3, 4).to(pretend_device.DEVICE)
    values = {
        "transposed": matrix.t(),
        "empty": matrix[:0],
        "bytes": torch.arange(5, dtype=torch.uint8).to(pretend_device.DEVICE),
        "double": torch.arange(3, dtype=torch.float64).to(pretend_device.DEVICE),
        "one": on_device(7)[0],
    }
    back = b.call(echo, values).wait(PATIENCE)
    for name, x in values.items():
        y = back[name]
        assert is_pretend(y), name
        assert (y.dtype, y.shape, y.stride()) == (x.dtype, x.shape, x.stride()), name
        assert y.tolist() == x.tolist(), name
    leaf = b.call(echo, on_device(1, 2).requires_grad_()).wait(PATIENCE)
    assert leaf.requires_grad
    assert leaf.is_leaf
    assert isinstance(b.call(echo, torch.nn.Parameter(on_device(1))).wait(PATIENCE), torch.nn.Parameter)


def views_share_memory_there(a: Agent, b: Peer) -> None:
    x = on_device(1, 2, 3, 4)
    first, second = b.call(echo, (x[:2], x)).wait(PATIENCE)
    first += 10
    assert second.tolist() == [11, 12, 3, 4]
    assert x.tolist() == [1, 2, 3, 4]


def the_map_is_inverted_for_results(a: Agent, b: Peer) -> None:
    to_device, to_cpu = a.peer("to device"), a.peer("to CPU")
    assert to_device.call(kinds, torch.ones(1)).wait(PATIENCE) == ["pretend"]
    y = to_device.call(double, torch.ones(2)).wait(PATIENCE)
    assert (y.device.type, y.tolist()) == ("cpu", [2, 2])
    assert to_cpu.call(kinds, on_device(1)).wait(PATIENCE) == ["cpu"]
    y = to_cpu.call(double, on_device(1, 1)).wait(PATIENCE)
    assert (y.device.type, y.tolist()) == ("pretend", [2, 2])


def a_tensor_without_a_map_is_refused_with_the_map_to_add(a: Agent, b: Peer) -> None:
    words = ("is on pretend:0", "device_maps={'unmapped': {'pretend:0': 'pretend:0'}}")
    with expects(UsageError, *words):
        a.peer("unmapped").call(double, on_device(1))
    with expects(UsageError, *words, "to which 'a' maps none of its devices"):
        a.peer("unmapped").call(make_on_device).wait(PATIENCE)
    with expects(UsageError, "only plain, dense"):
        b.call(double, on_device(1).as_subclass(Special))


class Special(torch.Tensor):
    pass


def a_map_to_a_device_that_is_not_there_is_refused_by_the_callee(a: Agent, b: Peer) -> None:
    with expects(UsageError, "refuses a connection", "this worker has no pretend:7"):
        a.peer("too few").call(double, on_device(1))


def a_call_returns_before_its_tensors_are_copied_and_others_pass_it(a: Agent, b: Peer) -> None:
    held, streams = held_call(lambda: b.call(note_sum, on_device(1, 2)))
    assert not held.done()
    assert b.call(note, "passed").wait(PATIENCE) == "passed"
    assert b.call(double, on_device(1)).wait(PATIENCE).tolist() == [2]
    assert noted == ["passed"]
    assert not held.done()
    release(streams)
    held.wait(PATIENCE)
    assert noted == ["passed", 3.0]


def calls_of_an_actor_stay_in_order(a: Agent, b: Peer) -> None:
    table, other = b.actor(Table), b.actor(Table)
    held, streams = held_call(lambda: table.push(on_device(1, 1)))
    later = [table.push(1), table.push(on_device(2, 2)), table.push(2)]
    other.push("passed").wait(PATIENCE)
    assert other.orders().wait(PATIENCE) == ["passed"]
    assert not any(future.done() for future in later)
    release(streams)
    assert table.orders().wait(PATIENCE) == ["tensor", 1, "tensor", 2]
    assert table.pull().wait(PATIENCE).tolist() == [3, 3]
    assert held.done()


def letters_of_two_held_calls_go_in_the_order_of_the_calls(a: Agent, b: Peer) -> None:
    table = b.actor(Table)
    first, first_streams = held_call(lambda: table.push(on_device(1, 1)))
    middle = table.push("middle")
    last, last_streams = held_call(lambda: table.push(on_device(1, 1)))
    release(last_streams)
    b.call(note, "passed").wait(PATIENCE)
    assert not any(future.done() for future in (first, middle, last))
    release(first_streams)
    assert table.orders().wait(PATIENCE) == ["tensor", "middle", "tensor"]


def a_broken_copy_fails_its_call_alone(a: Agent, b: Peer) -> None:
    held, streams = held_call(lambda: b.call(note_sum, on_device(1)))
    for stream in streams:
        stream.fail(RuntimeError("the copy burnt"))
    with expects(RpcError, "was not sent", "its device failed", "the copy burnt"):
        held.wait(PATIENCE)
    assert b.call(double, on_device(1)).wait(PATIENCE).tolist() == [2]
    assert noted == []


def a_broken_handler_fails_its_call(a: Agent, b: Peer) -> None:
    held = b.call(hold_own_stream, on_device(1))
    eventually(lambda: bool(noted))
    noted[0].fail(RuntimeError("the kernel burnt"))
    with expects(RpcError, "the device failed before the result was ready", "the kernel burnt"):
        held.wait(PATIENCE)


def a_cancelled_call_is_not_sent_and_its_memory_returns(a: Agent, b: Peer) -> None:
    held, streams = held_call(lambda: b.call(note_sum, on_device(1)))
    assert held.cancel()
    with expects(CallCancelled):
        held.wait(PATIENCE)
    release(streams)
    eventually(lambda: a.stats()["calls"] == 0)
    assert b.call(note, "later").wait(PATIENCE) == "later"
    assert noted == ["later"]


def what_waits_behind_a_cancelled_call_goes(a: Agent, b: Peer) -> None:
    table = b.actor(Table)
    held, streams = held_call(lambda: table.push(on_device(1, 1)))
    later = table.push("later")
    assert held.cancel()
    later.wait(PATIENCE)
    release(streams)
    assert table.orders().wait(PATIENCE) == ["later"]


def a_timeout_counts_from_the_call(a: Agent, b: Peer) -> None:
    held, streams = held_call(lambda: b.options(timeout=0.05).call(note_sum, on_device(1)))
    with expects(CallTimeout, "its device has not handed its tensors over yet"):
        held.wait(PATIENCE)
    release(streams)
    assert b.call(note, "later").wait(PATIENCE) == "later"
    assert noted == ["later"]


def a_lost_peer_fails_a_held_call_at_once(a: Agent, b: Peer) -> None:
    going = a.peer("going")
    going.call(note, "there").wait(PATIENCE)
    held, streams = held_call(lambda: going.call(note_sum, on_device(1)))
    a.endpoint.post.disconnect(a.connection("going", PATIENCE).number)
    with expects(WorkerLost):
        held.wait(PATIENCE)
    release(streams)
    assert going.call(double, on_device(1)).wait(PATIENCE).tolist() == [2]
    assert noted == ["there"]


def a_fast_producer_waits_until_there_is_room(a: Agent, b: Peer) -> None:
    big = torch.zeros(33 * MIB, dtype=torch.uint8).to(pretend_device.DEVICE)
    known = len(runtime.pool)
    held, streams = held_call(lambda: b.call(kinds, big))
    with expects(CallTimeout, "takes nothing"):
        b.options(timeout=0.05).call(kinds, big).wait(PATIENCE)
    assert len(runtime.pool) == known + len(streams)  # nothing was copied for it
    waiting: list[Future[Any]] = []
    thread = threading.Thread(target=lambda: waiting.append(b.call(kinds, big)))
    thread.start()
    release(streams)
    thread.join(PATIENCE)
    assert not thread.is_alive()
    assert held.wait(PATIENCE) == waiting[0].wait(PATIENCE) == ["pretend"]


def a_handler_runs_on_fresh_streams_that_wait_for_its_arguments(a: Agent, b: Peer) -> None:
    names = {b.call(stream_name, on_device(1)).wait(PATIENCE) for _ in range(3)}
    assert len(names) == 3
    assert all(name.startswith("pretend low") for name in names), names
    high = b.options(high_priority=True)
    known = len(runtime.pool)
    assert high.call(stream_name, on_device(1)).wait(PATIENCE).startswith("pretend high")
    high.call(double, on_device(1)).wait(PATIENCE)
    assert all(stream.name.startswith("pretend high") for stream in runtime.pool[known:])


def a_reply_goes_when_the_handlers_work_is_done(a: Agent, b: Peer) -> None:
    held = b.call(hold_own_stream, on_device(1))
    eventually(lambda: bool(noted))
    b.call(note, "passed").wait(PATIENCE)
    assert not held.done()
    noted[0].release()
    assert held.wait(PATIENCE) is None


def methods_of_an_actor_are_in_order_on_the_device(a: Agent, b: Peer) -> None:
    table = b.actor(Table)
    held = table.push_and_hold(on_device(1, 1))
    eventually(lambda: bool(noted))
    later = table.push(on_device(4, 4))
    assert b.call(double, on_device(1)).wait(PATIENCE).tolist() == [2]
    assert not later.done()
    noted[0].release()
    held.wait(PATIENCE)
    assert table.pull().wait(PATIENCE).tolist() == [6, 6]


def a_coroutine_runs_on_streams_of_its_own(a: Agent, b: Peer) -> None:
    futures = [b.call(doubled_soon, on_device(i)) for i in range(10)]
    for i, future in enumerate(futures):
        y, same = future.wait(PATIENCE)
        assert y.tolist() == [2 * i]
        assert same


def a_result_is_complete_when_its_copy_is_enqueued(a: Agent, b: Peer) -> None:
    future = b.call(double, on_device(1, 2))
    eventually(lambda: a.stats()["calls"] == 0)
    with runtime.holding():
        known = len(runtime.pool)
        assert future.done()
    streams = runtime.pool[known:]
    y = future.wait(blocking=False)
    assert memory_of(y).tolist() == [0, 0]
    with expects(WaitTimeout, "the device is not done"):
        future.wait(0.01)
    sums = future.then(lambda f: f.value().sum())
    assert torch.isnan(memory_of(sums.wait(PATIENCE, blocking=False)))
    blocked = runtime.blocked
    z = y + 1  # on this thread's stream, which waits
    assert runtime.blocked == blocked
    release(streams)
    assert z.tolist() == [3, 5]
    assert sums.wait(PATIENCE).item() == 6


def a_failure_of_a_results_copy_is_told_by_a_blocking_wait(a: Agent, b: Peer) -> None:
    future = b.call(double, on_device(1, 2))
    eventually(lambda: a.stats()["calls"] == 0)
    with runtime.holding():
        known = len(runtime.pool)
        assert future.done()
    for stream in runtime.pool[known:]:
        stream.fail(RuntimeError("the copy burnt"))
    with expects(RuntimeError, "the copy burnt"):
        future.wait(PATIENCE)


def a_post_is_staged_too(a: Agent, b: Peer) -> None:
    _, streams = held_call(lambda: b.post(note_sum, on_device(1, 2)))
    assert b.call(note, "passed").wait(PATIENCE) == "passed"
    release(streams)
    eventually(lambda: noted == ["passed", 3.0])


def objects_on_devices_stay_with_their_owner(a: Agent, b: Peer) -> None:
    table = b.remote(Table)
    table.rpc_sync().push(on_device(1, 2))
    assert table.rpc_sync().pull().tolist() == [1, 2]
    x = b.remote(make_on_device)
    assert is_pretend(x.to_here())
    assert x.to_here().tolist() == [1, 2]


def an_object_is_made_on_the_device_before_it_is_used(a: Agent, b: Peer) -> None:
    for factory in (SlowTable, slow_table_soon, slow_table_later):
        noted.clear()
        table = b.remote(factory)
        used = table.rpc_async().push(on_device(1, 2))
        eventually(lambda: bool(noted))
        for _ in range(10):
            b.call(double, on_device(1)).wait(PATIENCE)
        assert not used.done(), factory
        noted[0].release()
        used.wait(PATIENCE)
        assert table.rpc_sync().pull().tolist() == [1, 2]


def an_exception_with_a_tensor_of_a_device_is_told_in_words(a: Agent, b: Peer) -> None:
    with expects(RemoteError, "ValueError", "with a tensor"):
        b.call(fail_with, on_device(1)).wait(PATIENCE)


def a_worker_that_is_closed_gives_held_calls_up(a: Agent, b: Peer) -> None:
    with Agents() as own:
        own.join("other")
        short = own.join("short", device_maps={"other": {"pretend:0": "pretend:0"}})
        other = short.peer("other")
        other.call(note, "there").wait(PATIENCE)
        held, streams = held_call(lambda: other.call(note_sum, on_device(1)))
        short.close(5.0, graceful=False)
        with expects(RpcError, "closed"):
            held.wait(PATIENCE)
        release(streams)


def a_storm_of_calls_leaves_nothing(a: Agent, b: Peer) -> None:
    storm(a, b, held_call)
    counts = ("calls", "handled", "letters", "queued", "granted", "lent")
    eventually(lambda: not any(a.stats()[each] for each in counts))
    big = torch.zeros(63 * MIB, dtype=torch.uint8).to(pretend_device.DEVICE)
    assert b.call(kinds, big).wait(PATIENCE) == ["pretend"], "there is no room for it"


def copies_do_not_disturb_captures_of_graphs(a: Agent, b: Peer) -> None:
    held, streams = held_call(lambda: b.call(double, on_device(1, 2)))
    with runtime.capture(pretend_device.DEVICE):
        release(streams)
        eventually(held.done)
    assert held.wait(PATIENCE).tolist() == [2, 4]


SCENES: list[Callable[[Agent, Peer], None]] = [
    tensors_arrive_on_the_device_that_the_map_says,
    tensors_are_what_they_were,
    views_share_memory_there,
    the_map_is_inverted_for_results,
    a_tensor_without_a_map_is_refused_with_the_map_to_add,
    a_map_to_a_device_that_is_not_there_is_refused_by_the_callee,
    a_call_returns_before_its_tensors_are_copied_and_others_pass_it,
    copies_do_not_disturb_captures_of_graphs,
    calls_of_an_actor_stay_in_order,
    letters_of_two_held_calls_go_in_the_order_of_the_calls,
    a_broken_copy_fails_its_call_alone,
    a_broken_handler_fails_its_call,
    a_cancelled_call_is_not_sent_and_its_memory_returns,
    what_waits_behind_a_cancelled_call_goes,
    a_timeout_counts_from_the_call,
    a_lost_peer_fails_a_held_call_at_once,
    a_fast_producer_waits_until_there_is_room,
    a_handler_runs_on_fresh_streams_that_wait_for_its_arguments,
    a_reply_goes_when_the_handlers_work_is_done,
    methods_of_an_actor_are_in_order_on_the_device,
    a_coroutine_runs_on_streams_of_its_own,
    a_result_is_complete_when_its_copy_is_enqueued,
    a_failure_of_a_results_copy_is_told_by_a_blocking_wait,
    a_post_is_staged_too,
    objects_on_devices_stay_with_their_owner,
    an_object_is_made_on_the_device_before_it_is_used,
    an_exception_with_a_tensor_of_a_device_is_told_in_words,
    a_worker_that_is_closed_gives_held_calls_up,
    a_storm_of_calls_leaves_nothing,
]


def play(scene: Callable[[Agent, Peer], None], a: Agent) -> None:
    noted.clear()
    buffers.clear()
    name = scene.__name__
    try:
        current_stream()
        scene(a, a.peer("b"))
        noted.clear()
        eventually(lambda: all(buffer() is None for buffer in buffers))
    except BaseException:
        print(f"{name}: {traceback.format_exc()}", flush=True)
    else:
        print(f"{name}: ok", flush=True)
    finally:
        runtime.release()


def main() -> None:
    global runtime
    logging.disable()  # a letter that was not sent is logged between the lines
    runtime = make_device()
    lend = runtime.host_memory

    def host_memory(bytes: int) -> torch.Tensor:
        memory = lend(bytes)
        buffers.append(weakref.ref(memory))
        return memory

    runtime.host_memory = host_memory  # type: ignore[method-assign]
    same, back = {"pretend:0": "pretend:0"}, {"pretend:0": "cpu"}
    maps = {"b": same, "going": same, "to device": {"cpu": "pretend:0"}, "to CPU": back}
    with Agents() as stage:
        a = stage.join("a", device_maps={**maps, "too few": {"pretend:0": "pretend:7"}})
        for name in ("b", "going", "to device", "to CPU", "unmapped", "too few"):
            stage.join(name)
        for scene in SCENES:
            play(scene, a)


if __name__ == "__main__":
    main()
