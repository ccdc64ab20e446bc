"""The backend "nccl" on a real GPU, with one rank, because NCCL before 2.30 refuses two ranks on one GPU."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.errors import GroupError, OperationTimeout
from shoal.streams import runtime_of
from shoal.testing import RankPool, run_threads
from shoal.testing.conformance import BackendConformance

from . import captured

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

#: cycles of a kernel that runs for about a tenth of a second, on any card of the last years
CYCLES = 150_000_000

#: whether two ranks may share a GPU
MAY_SHARE = os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"


class TestNcclOnOneRank(BackendConformance):
    backend = "nccl"
    devices = ("cuda", "cpu")
    completes = "early"
    rounding = "per hop"

    def run(self, fn: Callable[..., Any], size: int, *args: Any, **options: Any) -> list[Any]:
        if size > 1:
            pytest.skip("NCCL before 2.30 refuses two ranks on one GPU")
        return super().run(fn, size, *args, **options)


@pytest.fixture
def group() -> Iterator[shoal.ProcessGroup]:
    with shoal.init(backend="nccl") as group:
        group.all_reduce(torch.ones(4, device="cuda")).wait()
        yield group


def test_work_is_ordered_with_the_stream_of_the_caller(group: shoal.ProcessGroup) -> None:
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        # The first launch of a kernel loads it, which may wait for all work of the device.
        y = torch.zeros(1 << 20, device="cuda")
        y += 3
        y = y * 2
        torch.cuda._sleep(1)
        torch.cuda.synchronize()
        x = torch.zeros(1 << 20, device="cuda")
        torch.cuda._sleep(CYCLES)
        x += 3
        future = group.all_reduce(x)
        assert future.done()
        y = future.wait(blocking=False) * 2
        assert not side.query()  # the host has waited for nothing
    assert y.sum().item() == 6 * (1 << 20)


def test_callbacks_run_on_streams_of_their_own_behind_the_result(group: shoal.ProcessGroup) -> None:
    x = torch.zeros(1 << 20, device="cuda")
    torch.cuda._sleep(CYCLES)
    x += 1
    streams: list[int] = []

    def double(future: shoal.Future[torch.Tensor]) -> torch.Tensor:
        streams.append(torch.cuda.current_stream().cuda_stream)
        return future.value() * 2

    assert group.all_reduce(x).then(double).wait().eq(2).all().item()
    assert torch.cuda.current_stream().cuda_stream not in streams


def test_a_device_that_does_not_finish_is_a_timeout(group: shoal.ProcessGroup) -> None:
    torch.cuda._sleep(20 * CYCLES)
    with pytest.raises(OperationTimeout, match="the data did not come in time"):
        group.all_reduce(torch.ones(4, device="cuda"), timeout=0.3).wait()
    assert torch.ones(2, device="cuda").sum().item() == 2


@contextmanager
def capture() -> Iterator[Callable[[], object]]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        yield graph.replay


@pytest.mark.parametrize("body", captured.BODIES)
def test_graphs(group: shoal.ProcessGroup, body: Callable[..., None]) -> None:
    pending = group.all_reduce(torch.ones(1 << 24, device="cuda"))  # polled by a thread during the capture
    with group.subgroup([0]) as part:
        body(part, torch.device("cuda", torch.cuda.current_device()), capture)
    assert pending.wait()[0].item() == 1


def test_a_group_closes_before_its_graphs_are_released(group: shoal.ProcessGroup) -> None:
    x = torch.ones(4, device="cuda")
    part = group.subgroup([0])
    part.all_reduce(x).wait()
    with capture() as replay:
        # With one rank a sum in place has no kernel, and torch warns of empty graphs.
        part.all_reduce(x * 1).wait(blocking=False)
    replay()
    torch.cuda.synchronize()
    part.close()
    del replay
    assert group.all_reduce(x).wait().sum().item() == 4


def test_training_equals_training_without_a_group(group: shoal.ProcessGroup) -> None:
    def trained(wrap: Callable[[nn.Module], nn.Module]) -> torch.Tensor:
        torch.manual_seed(1)
        net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8)).cuda()
        model, optimizer = wrap(net), torch.optim.SGD(net.parameters(), lr=0.1)
        for step in range(5):
            x = torch.full((32, 64), 0.1 * step, device="cuda")
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()
        return torch.cat([p.detach().flatten() for p in net.parameters()])

    expected = trained(lambda net: net)
    found = trained(lambda net: shoal.DistributedDataParallel(net, group=group))
    assert torch.allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_closing_frees_the_memory_of_the_device(group: shoal.ProcessGroup) -> None:
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        half = group.subgroup([0])
        half.all_reduce(torch.ones(1 << 20, device="cuda")).wait()
        half.close()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= before


def test_a_prepared_thread_may_ask_for_events_while_another_one_captures() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    runtime = runtime_of(device)
    x = torch.ones(4, device=device)
    event = runtime.record(runtime.current_stream(device))
    captures, asked = threading.Event(), threading.Event()
    found: list[object] = []

    def ask() -> None:
        try:
            runtime.prepare_thread(device)
            assert captures.wait(30)
            found.append(runtime.query(event))
        except BaseException as error:
            found.append(error)
        asked.set()

    thread = threading.Thread(target=ask)
    thread.start()
    with capture() as replay:
        y = x * 2
        captures.set()
        assert asked.wait(30)
    thread.join()
    assert found == [True]
    replay()
    assert y.tolist() == [2.0] * 4


# -- two ranks on one GPU ------------------------------------------------------------------------


def test_messages_go_through_host_memory() -> None:
    def exchange(group: shoal.ProcessGroup) -> None:
        peer = 1 - group.rank
        cases: list[tuple[torch.dtype, tuple[int, ...]]] = [
            (torch.float32, (1000, 1000)), (torch.bool, (3,)), (torch.float64, ()), (torch.half, (0,)),
        ]  # fmt: skip
        for dtype, shape in cases:
            x = torch.ones(shape, device="cuda")
            torch.cuda._sleep(CYCLES // 10)
            x = (x * (group.rank + 1)).to(dtype)
            y = torch.zeros(shape, dtype=dtype, device="cuda")
            received = group.recv_message(y, peer, tag=3)
            group.send(x, peer, tag=3).wait()
            received.wait(blocking=False)
            expected = torch.full(shape, peer + 1.0, device="cuda").to(dtype)
            assert torch.equal(y, expected)
        assert group.all_gather_object(group.rank).wait() == [0, 1]

    run_threads(exchange, 2, backend="nccl")


@pytest.mark.skipif(MAY_SHARE, reason="NCCL lets ranks share the GPU")
def test_two_ranks_that_share_a_gpu_get_the_error_of_nccl() -> None:
    def refused(group: shoal.ProcessGroup) -> None:
        with pytest.raises(GroupError, match=r"NCCL failed there: .*invalid usage"):
            group.all_reduce(torch.ones(4, device="cuda"), timeout=20).wait()
        assert torch.ones(2, device="cuda").sum().item() == 2

    run_threads(refused, 2, backend="nccl")


needs_shared = pytest.mark.skipif(not MAY_SHARE, reason="needs NCCL 2.30 with NCCL_MULTI_RANK_GPU_ENABLE=1")
#: Processes, because a rank that frees memory waits for all kernels of its process, and a kernel of another
#: rank there may wait for it.
POOL = RankPool(3)


@pytest.fixture(scope="module", autouse=True)
def _pool_ends() -> Iterator[None]:
    yield
    POOL.close()


@needs_shared
class TestNcclOnSeveralRanks(TestNcclOnOneRank):
    def run(self, fn: Callable[..., Any], size: int, *args: Any, **options: Any) -> list[Any]:
        if size > POOL.size:
            pytest.skip("more ranks may exhaust the GPU")
        return POOL.run(fn, *args, size=size, **self.with_defaults(options))


@needs_shared
@pytest.mark.parametrize("body", captured.BODIES)
def test_graphs_of_two_ranks(body: Callable[..., None]) -> None:
    def play(group: shoal.ProcessGroup) -> None:
        body(group, torch.device("cuda", 0), capture)

    POOL.run(play, size=2, backend="nccl")


@needs_shared
def test_a_late_rank_is_a_timeout_and_its_kernel_ends() -> None:
    def absent(group: shoal.ProcessGroup) -> None:
        group.all_reduce(torch.ones(4, device="cuda")).wait()
        group.barrier().wait()
        if group.rank == 0:
            with pytest.raises(OperationTimeout):
                group.all_reduce(torch.ones(1 << 20, device="cuda"), timeout=1.0).wait()
            torch.cuda.synchronize()  # no kernel is left
        else:
            time.sleep(3)

    POOL.run(absent, size=2, backend="nccl")
