"""The backend "nccl" on a real GPU, with one rank, because NCCL before 2.30 refuses two ranks on one GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.errors import OperationTimeout
from shoal.testing.conformance import BackendConformance

from . import captured

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

#: cycles of a kernel that runs for about a tenth of a second, on any card of the last years
CYCLES = 150_000_000


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
        part.all_reduce(x).wait(blocking=False)
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
