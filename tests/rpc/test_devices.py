"""Tensors of devices in calls: played on the pretended device, and on a real one where there is one."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.rpc import Agent
from shoal.testing import Agents
from tests.rpc.device_handlers import double, echo, kinds
from tests.rpc.on_device import SCENES
from tests.support.programs import run_program


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the program says that plays all scenes; the device, once made, stays in its process."""
    (output,) = run_program(
        Path(__file__).with_name("on_device.py"), 1, folder=tmp_path_factory.mktemp("device")
    )
    return output


@pytest.mark.parametrize("scene", [scene.__name__ for scene in SCENES])
def test_on_the_pretended_device(told: str, scene: str) -> None:
    found = re.search(rf"^{scene}: (.*?)(?=^\w+: |\Z)", told, re.MULTILINE | re.DOTALL)
    assert found is not None, told
    assert found[1] == "ok\n", found[1]


# -- a real device -----------------------------------------------------------------------------------

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
CUDA = {"cuda:0": "cuda:0"}


@pytest.fixture(params=["threads", "processes"])
def agent(request: pytest.FixtureRequest) -> Iterator[Agent]:
    with Agents() as stage:
        if request.param == "threads":
            stage.join("b")
        else:
            stage.start("b")
        yield stage.join("a", device_maps={"b": CUDA})


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("count", [1, 5_000, 10_000_000])
def test_tensors_of_cuda_go_there_and_back(agent: Agent, count: int) -> None:
    b = agent.peer("b")
    x = torch.arange(count, dtype=torch.float32, device="cuda:0")
    future = b.call(double, x)
    assert torch.equal(future.wait(), 2 * x)
    y = b.options(high_priority=True).call(double, x).wait(blocking=False)
    assert torch.equal(y, 2 * x)
    assert b.call(kinds, x, x.cpu()).wait() == ["cuda", "cpu"]


@pytest.mark.gpu
@needs_cuda
def test_a_call_waits_for_what_its_caller_has_enqueued(agent: Agent) -> None:
    b = agent.peer("b")
    x = torch.zeros(1_000_000, device="cuda:0")
    for i in range(20):
        torch.cuda._sleep(1_000_000)
        x += 1
        future = b.call(double, x)
        y: Any = future.then(lambda f: f.value().sum())
        assert y.wait().item() == 2 * (i + 1) * x.numel()


@pytest.mark.gpu
@needs_cuda
def test_views_of_cuda_share_memory_there(agent: Agent) -> None:
    x = torch.zeros(6, device="cuda:0")
    first, second = agent.peer("b").call(echo, (x[2:4], x)).wait()
    first += 1
    assert second.tolist() == [0, 0, 1, 1, 0, 0]
