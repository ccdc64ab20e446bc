"""The backend "nccl" over a FakeNccl, which has the rules of NCCL.

The ranks are processes, because a process that has the pretended device has it until it ends.
"""

from __future__ import annotations

import logging
import os
import random
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from shoal import ProcessGroup
from shoal.errors import (
    CollectiveMismatch,
    GroupAborted,
    GroupError,
    OperationTimeout,
    PeerLost,
    RemoteError,
    UsageError,
)
from shoal.testing import RankPool
from tests.support.waiting import until

from . import captured
from .slow_conformance import DeviceConformance


def prepare() -> None:
    from tests.support import pretend_device
    from tests.support.nccl_engine import use_fake_nccl

    use_fake_nccl(pretend_device.make())


#: smaller groups use its first ranks
POOL = RankPool(4, prepare=prepare)


@pytest.fixture(scope="module", autouse=True)
def _pool_ends() -> Iterator[None]:
    yield
    POOL.close()


def run(fn: Callable[..., Any], size: int, *args: Any, **options: Any) -> list[Any]:
    """Run ``fn(group, *args)`` on ranks of the backend; no rank may misuse NCCL."""

    def checked(group: Any, *args: Any) -> Any:
        from tests.support.nccl_engine import FakeNcclEngine

        fake = FakeNcclEngine.fake
        try:
            return fn(group, *args)
        finally:
            violations, fake.violations = fake.violations, []
            assert violations == []

    defaults = {"backend": "fake-nccl", "timeout": 60.0, "op_timeout": 30.0}
    return POOL.run(checked, *args, size=size, **{**defaults, **options})


class TestFakeNccl(DeviceConformance):
    backend = "fake-nccl"
    completes = "early"
    rounding = "per hop"

    def run(self, fn: Callable[..., Any], size: int, *args: Any, **options: Any) -> list[Any]:
        return run(fn, size, *args, **self.with_defaults(options))


# -- in the ranks --------------------------------------------------------------------------------


def full(count: int, value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full((count,), value, dtype=dtype, device="pretend")


def fake() -> Any:
    from tests.support.nccl_engine import FakeNcclEngine

    return FakeNcclEngine.fake


def communicator(group: Any) -> Any:
    """The communicator of a group that has one."""
    return group._channel._channel._communicator


def error_of(start: Callable[[], Any]) -> BaseException:
    """The error of the operation that ``start`` starts; also if the group has failed before."""
    with pytest.raises(GroupError) as caught:
        start().wait()
    return caught.value


@contextmanager
def own_stream_held() -> Iterator[None]:
    """A context in which the current stream of this thread runs nothing."""
    stream = fake()._runtime.current_stream(torch.device("pretend", 0))
    stream.hold()
    try:
        yield
    finally:
        stream.release()


def own_stream_is_free() -> None:
    """Fail if a kernel that never ends is left on a stream."""
    x = full(3, 1.0) * 2
    assert x.tolist() == [2.0] * 3


# -- tests ---------------------------------------------------------------------------------------


def test_work_is_ordered_with_the_streams_of_the_caller() -> None:
    def ordered(group: ProcessGroup) -> None:
        runtime = fake()._runtime
        group.all_reduce(full(4, 1.0)).wait()
        with own_stream_held():
            x = full(1000, 0.0)
            x += group.rank + 1  # not computed yet
            future = group.all_reduce(x)
            until(future.done)  # enqueued
            blocked = runtime.blocked
            total = future.wait(blocking=False) * 10  # not computed yet either
            assert runtime.blocked == blocked
        assert total.tolist() == [30.0] * 1000

    run(ordered, 2)


def test_a_timeout_bounds_the_work_on_the_device_and_frees_the_streams() -> None:
    def absent(group: ProcessGroup) -> None:
        group.all_reduce(full(4, 1.0)).wait()
        group.barrier().wait()
        if group.rank == 0:
            error = error_of(lambda: group.all_reduce(full(4, 1.0), timeout=0.5))
            assert isinstance(error, OperationTimeout)
            assert "ranks that never arrived: 1" in str(error)
            with pytest.raises(OperationTimeout):
                group.all_reduce(full(4, 1.0))
        else:
            until(lambda: group.state != "open")
        own_stream_is_free()

    run(absent, 2)


def test_a_device_that_does_not_finish_is_a_timeout_that_says_so() -> None:
    def held(group: ProcessGroup) -> None:
        group.all_reduce(full(4, 1.0)).wait()
        with own_stream_held():
            error = error_of(lambda: group.all_reduce(full(4, 1.0), timeout=0.5))
        assert "all ranks have arrived, but the data did not come in time" in str(error)
        own_stream_is_free()

    run(held, 2)


def test_a_failure_reaches_those_that_wait_without_blocking_and_frees_what_it_ended() -> None:
    def aborted(group: ProcessGroup) -> None:
        group.all_reduce(full(4, 1.0)).wait()
        group.barrier().wait()
        if group.rank == 0:
            future = group.all_reduce(full(4, 1.0))
            future.wait(blocking=False)  # enqueued, and not known to have failed
            group.store.set("enqueued", b"")
            until(lambda: group.state != "open")
            with pytest.raises(GroupAborted, match="the test says so"):
                future.wait(blocking=False)
            assert isinstance(future.exception(), GroupAborted)
            until(lambda: not group._channel._channel.pending)  # type: ignore[attr-defined]
        else:
            group.store.wait(["enqueued"])
            group.abort("the test says so")
        own_stream_is_free()

    run(aborted, 2)


def test_a_thread_starts_only_what_cannot_be_started_at_once() -> None:
    def counted(group: ProcessGroup) -> None:
        group.all_reduce(full(4, 1.0)).wait()
        until(lambda: not group._channel._channel._queue)  # type: ignore[attr-defined]
        launch_s, fake()._launch_s = fake()._launch_s, 0.0
        try:
            futures = [group.all_reduce(full(4, float(i))) for i in range(30)]
            assert all(future.done() for future in futures)
        finally:
            fake()._launch_s = launch_s
        assert [future.wait().tolist() for future in futures] == [[2.0 * i] * 4 for i in range(30)]

    run(counted, 2)


def test_tensors_of_the_cpu_and_of_a_device_do_not_match() -> None:
    def mismatched(group: ProcessGroup) -> None:
        group.all_reduce(full(4, 1.0)).wait()
        error = error_of(lambda: group.all_reduce(full(4, 1.0) if group.rank else torch.ones(4)))
        assert isinstance(error, CollectiveMismatch)
        assert "all_reduce(float32[4], op=SUM)\n" in str(error) + "\n"
        assert "all_reduce(float32[4], op=SUM) on a device" in str(error)
        own_stream_is_free()

    run(mismatched, 2)


def test_different_calls_are_named_and_free_the_streams() -> None:
    def mismatched(group: ProcessGroup) -> None:
        group.all_reduce(full(4, 1.0)).wait()
        x = full(8, 1.0)
        error = error_of(lambda: group.all_reduce(x) if group.rank else group.broadcast(x, root=0))
        assert isinstance(error, CollectiveMismatch)
        assert "all_reduce(float32[8]" in str(error)
        assert "broadcast(float32[8]" in str(error)
        own_stream_is_free()

    run(mismatched, 2)


def test_an_all_to_all_whose_parts_differ_is_a_mismatch() -> None:
    def mismatched(group: ProcessGroup) -> None:
        group.all_reduce(full(4, 1.0)).wait()
        outputs = [full(2 + group.rank, 0.0), full(2, 0.0)]
        error = error_of(lambda: group.all_to_all(outputs, [full(2, 1.0), full(2, 1.0)]))
        assert "all_to_all: rank 0 sends 2 elements, but the output for its part has 3" in str(error)
        own_stream_is_free()

    run(mismatched, 2)


def test_an_asynchronous_error_of_nccl_aborts_the_group_and_names_the_rank() -> None:
    def failing(group: ProcessGroup) -> None:
        group.all_reduce(full(4, 1.0)).wait()
        group.barrier().wait()
        if group.rank == 1:
            group.store.wait(["submitted"])
            fake().fail(communicator(group)._comm, 6)
            error = error_of(lambda: group.all_reduce(full(4, 1.0)))
        else:
            future = group.all_reduce(full(4, 1.0))
            group.store.set("submitted", b"")
            error = error_of(lambda: future)
        assert "rank 1 aborted the group: NCCL failed there: " in str(error)
        assert "remote process exited or there was a network error" in str(error)
        own_stream_is_free()

    run(failing, 2)


@pytest.mark.parametrize(
    ("failure", "text"),
    [(4, "FakeNcclError: InvalidArgument (4)"), (5, "GroupError: invalid usage")],
    ids=["at once", "later"],
)
def test_a_communicator_that_cannot_be_made_is_named(failure: int, text: str) -> None:
    def failing(group: ProcessGroup) -> None:
        if group.rank == 1:
            fake().init_failure = failure
        try:
            error = error_of(lambda: group.all_reduce(full(4, 1.0)))
        finally:
            fake().init_failure = None
        assert f"rank 1 aborted the group: NCCL failed there: {text}" in str(error)
        own_stream_is_free()

    run(failing, 2)


def test_a_killed_rank_is_named_and_the_survivors_go_on() -> None:
    def killed(group: ProcessGroup, victim: int) -> Any:
        group.all_reduce(full(4, 1.0)).wait()
        if group.rank == victim:
            group.store.wait([f"past it/{rank}" for rank in range(3) if rank != victim])
            os.kill(os.getpid(), signal.SIGKILL)
        group.store.set(f"past it/{group.rank}", b"")
        begun = time.monotonic()
        error = error_of(lambda: group.all_reduce(full(100_000, 1.0)))
        seconds = time.monotonic() - begun
        assert isinstance(error, PeerLost)
        assert list(error.ranks) == [victim]
        own_stream_is_free()
        rebuilt = group.rebuild()
        assert rebuilt.all_reduce(full(5, 1.0)).wait().tolist() == [2.0] * 5
        return seconds

    for victim in (2, 0):
        with pytest.raises(RemoteError) as caught:
            run(killed, 3, victim)
        assert f"rank {victim}" in str(caught.value)
        assert "1 of 3 ranks failed" in str(caught.value)


def test_subgroups_have_communicators_of_their_own() -> None:
    def split(group: ProcessGroup) -> None:
        half = group.split(color=group.rank % 2)
        whole = [group.all_reduce(full(7, float(i))) for i in range(5)]
        part = [half.all_reduce(full(7, float(i))) for i in range(5)]
        for i in range(5):
            assert part[i].wait().tolist() == [2.0 * i] * 7
            assert whole[i].wait().tolist() == [4.0 * i] * 7

    run(split, 4)


def test_messages_go_through_host_memory_in_stream_order() -> None:
    def messages(group: ProcessGroup) -> None:
        peer = 1 - group.rank
        x = full(1000, 1.0 + group.rank) * 2
        y = full(1000, 0.0)
        received = group.recv_message(y, peer, tag=3)
        group.send(x, peer, tag=3).wait()
        message = received.wait()
        assert (message.source, message.tag) == (peer, 3)
        assert message.tensor is y
        assert (y * 1).tolist() == [2.0 * (1 + peer)] * 1000
        group.send(full(2, 5.0), peer).wait()
        found = group.recv(None if group.rank else full(2, 0.0)).wait()
        assert found.tolist() == [5.0, 5.0]
        assert found.device.type == ("cpu" if group.rank else "pretend")

    run(messages, 2)


def test_a_group_has_one_device() -> None:
    def refused(group: ProcessGroup) -> None:
        with pytest.raises(UsageError, match="has tensors on pretend:0 and on cpu"):
            group.all_gather([torch.empty(2), torch.empty(2)], full(2, 1.0))
        with pytest.raises(UsageError, match="meta"):
            group.all_reduce(torch.empty(2, device="meta"))
        assert group.all_reduce(full(2, 1.0)).wait().tolist() == [2.0, 2.0]

    run(refused, 2)


def test_operations_of_callbacks_have_the_order_of_rank_0() -> None:
    def chained(group: ProcessGroup) -> None:
        fake().max_ctas.clear()
        futures = [
            group.all_reduce(full(50, float(i))).then(lambda f: group.all_reduce(f.value() * 2))
            for i in range(8)
        ]
        for i, future in enumerate(futures):
            assert future.wait().wait().tolist() == [8.0 * i] * 50
        assert fake().max_ctas == [None, 8]

    run(chained, 2)


def test_priorities_are_those_of_the_option() -> None:
    def prioritised(group: ProcessGroup, priority: str) -> None:
        group.all_reduce(full(2, 1.0)).wait()
        assert priority in communicator(group)._stream.name

    run(prioritised, 2, "high", high_priority=True)
    run(prioritised, 2, "low")
    with pytest.raises(RemoteError, match="high_priority must be True or False, got 1"):
        run(prioritised, 2, "low", high_priority=1)


def test_random_operations_with_delays_are_right() -> None:
    """Every rank issues the same operations in several groups, with pauses and waits of its own."""

    def storm(group: ProcessGroup, seed: int) -> None:
        plan, own = random.Random(seed), random.Random(f"{seed} {group.rank}")
        groups = [group, group.split(color=0), group.split(color=0, key=-group.rank)]
        pending: deque[tuple[Any, float]] = deque()
        for step in range(60):
            among = plan.choice(groups)
            kind = plan.choice(["sum", "max", "bor", "gather", "cpu"])
            count = plan.choice([1, 17, 3000])
            if kind == "gather":
                future = among.all_gather_single(full(count * among.size, 0.0), full(count, float(step)))
                expected = float(step)
            elif kind == "cpu":
                future, expected = among.all_reduce(torch.full((count,), float(step))), step * 3.0
            elif kind == "bor":
                x = full(count, 1 << group.rank, torch.int16)
                future, expected = among.all_reduce(x, "bor"), 7.0
            else:
                future = among.all_reduce(full(count, float(step)), kind)
                expected = step * (3.0 if kind == "sum" else 1.0)
            pending.append((future, expected))
            if own.random() < 0.2:
                time.sleep(own.random() * 0.01)
            while pending and own.random() < 0.3:
                check(*pending.popleft(), own)
        while pending:
            check(*pending.popleft(), own)

    def check(future: Any, expected: float, own: random.Random) -> None:
        result = future.wait(blocking=own.random() < 0.5)
        assert (result * 1).cpu().eq(expected).all()

    for seed in range(3):
        run(storm, 3, seed)


# -- graphs --------------------------------------------------------------------------------------


@contextmanager
def capture(mode: str = "global") -> Iterator[Callable[[], object]]:
    """A context in which the current stream captures; gives a function that replays the graph."""
    runtime, device = fake()._runtime, torch.device("pretend", 0)
    with runtime.capture(device, mode) as graph:
        yield lambda: graph.replay(runtime.current_stream(device))


@pytest.mark.parametrize("body", captured.BODIES)
@pytest.mark.parametrize("size", [1, 2])
def test_graphs(body: Callable[..., None], size: int) -> None:
    def play(group: ProcessGroup) -> None:
        body(group, torch.device("pretend", 0), capture)

    run(play, size)


def test_captures_take_no_number_and_other_threads_may_call_meanwhile() -> None:
    def in_another_order(group: ProcessGroup) -> None:
        x, y = full(4, 1.0), full(4, 1.0)
        group.all_reduce(full(4, 1.0)).wait()

        def eager() -> list[float]:
            return group.all_reduce(full(4, 2.0)).wait().tolist()

        with capture("thread_local") as replay, ThreadPoolExecutor(1) as thread:
            group.all_reduce(x).wait(blocking=False)
            if group.rank == 1:
                assert thread.submit(eager).result() == [4.0] * 4
            group.all_reduce(y).wait(blocking=False)
        if group.rank == 0:
            assert eager() == [4.0] * 4
        replay()
        assert group.all_reduce(full(4, 3.0)).wait().tolist() == [6.0] * 4
        assert x.tolist() == y.tolist() == [2.0] * 4

    run(in_another_order, 2)


def test_a_lost_rank_ends_the_replays_of_the_others() -> None:
    def killed(group: ProcessGroup) -> None:
        x = full(4, 1.0)
        group.all_reduce(full(4, 1.0)).wait()
        with capture() as replay:
            group.all_reduce(x).wait(blocking=False)
        replay()
        assert x.tolist() == [3.0] * 4
        group.store.set(f"replayed/{group.rank}", b"")
        if group.rank == 2:
            group.store.wait(["replayed/0", "replayed/1"])
            os.kill(os.getpid(), signal.SIGKILL)
        replay()
        own_stream_is_free()  # when the replay has ended
        error = error_of(lambda: group.all_reduce(full(4, 1.0)))
        assert isinstance(error, PeerLost)
        assert list(error.ranks) == [2]
        rebuilt = group.rebuild()
        assert rebuilt.all_reduce(full(5, 1.0)).wait().tolist() == [2.0] * 5

    with pytest.raises(RemoteError, match="1 of 3 ranks failed"):
        run(killed, 3)


def test_a_capture_connects_ranks_if_all_of_them_capture() -> None:
    def first(group: ProcessGroup) -> None:
        group.all_reduce(full(4, 1.0)).wait()
        x = full(4, float(group.rank))
        with capture() as replay:
            group.reduce(x, 0, "max").wait(blocking=False)  # the first one of its kind
        replay()
        assert x.tolist() == [1.0] * 4

    run(first, 2)


def test_a_capture_that_must_wait_for_another_rank_ends_with_its_timeout() -> None:
    def alone(group: ProcessGroup) -> None:
        group.all_reduce(full(4, 1.0)).wait()
        group.barrier().wait()
        if group.rank == 0:
            with capture():
                future = group.broadcast(full(4, 1.0), timeout=0.5)
                with pytest.raises(GroupAborted, match=r"broadcast on rank 0 was not captured within 0\.5 s"):
                    future.wait(blocking=False)
        error = error_of(lambda: group.all_reduce(full(4, 1.0)))
        assert "rank 0 aborted the group: NCCL failed there: OperationTimeout: broadcast" in str(error)
        own_stream_is_free()

    run(alone, 2)


def test_a_group_that_is_closed_before_its_graphs_are_released_warns() -> None:
    def closed(group: ProcessGroup, keeps: bool) -> list[str]:
        from shoal.backend.nccl import communicator as module

        warnings: list[str] = []
        module._logger.addHandler(handler := logging.Handler())
        handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
        module._FINALIZE_TIMEOUT_S = 0.3
        part = group.subgroup([0, 1])
        part.all_reduce(full(4, 1.0)).wait()
        with capture() as replay:
            part.all_reduce(full(4, 1.0)).wait(blocking=False)
        replay()
        own_stream_is_free()
        if not keeps:
            del replay
        part.close()
        module._logger.removeHandler(handler)
        return warnings

    assert run(closed, 2, False) == [[], []]
    for warnings in run(closed, 2, True):
        assert ["graphs that captured its collectives exist" in each for each in warnings] == [True]


def test_an_abort_that_waits_for_the_release_of_graphs_blocks_no_other_call() -> None:
    def aborted(group: ProcessGroup) -> None:
        group.all_reduce(full(4, 1.0)).wait()
        with capture() as replay:
            group.all_reduce(full(4, 1.0)).wait(blocking=False)
        found = communicator(group)
        group.abort("the test says so")
        until(lambda: found._comm not in fake()._comms)  # NCCL has begun to abort it
        with ThreadPoolExecutor(1) as thread:
            call = thread.submit(found.ready)
            try:
                with pytest.raises(GroupError, match="the communicator was aborted"):
                    call.result(10.0)
            finally:
                del replay

    run(aborted, 1)  # of several ranks, one would abort the group while others still capture
