"""GPUs within nodes: pretended ones, and real ones where there are some."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import shoal
from shoal.controller import Master, RemoteTensor
from tests.controller.nodes import BACKSTOP, SECRET, Program, programs
from tests.controller.on_gpus import SCENES, joins_on
from tests.support.programs import run_program

start = pytest.fixture(programs)


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the program says that plays all scenes."""
    (output,) = run_program(Path(__file__).with_name("on_gpus.py"), 1, folder=tmp_path_factory.mktemp("gpus"))
    return output


@pytest.mark.parametrize("scene", [scene.__name__ for scene in SCENES])
def test_on_nodes_with_pretended_gpus(told: str, scene: str) -> None:
    found = re.search(rf"^{scene}: (.*?)(?=^\w+: |\Z)", told, re.MULTILINE | re.DOTALL)
    assert found is not None, told
    assert found[1] == "ok\n", found[1]


@pytest.mark.usefixtures("no_master")
def test_tensors_are_made_on_the_device_that_a_worker_was_started_with(
    start: Callable[..., Program], tmp_path: Path
) -> None:
    url = f"file://{tmp_path}/store"
    with shoal.init_master_worker(url=url, secret=SECRET) as master:
        for index, device in enumerate(("pretend:1", "pretend:0", "cpu", "pretend")):
            start(joins_on, url, SECRET, device)
            master.wait_for(index + 1, BACKSTOP)

        def device_of(x: torch.Tensor) -> int:
            assert isinstance(x, RemoteTensor)
            return x.get_device()

        here = torch.arange(4.0)
        made = [
            torch.zeros(3, device="node:0"), here.to("node:0"), torch.tensor([1, 2], device="node:0"),
            here.to("node:2").to("node:0"), here.to("node:0") * 2, here.to("node:1").to("node:0"),
            torch.nn.Linear(2, 2, device="node:0").weight,
        ]  # fmt: skip
        assert {device_of(each) for each in made} == {1}
        assert made[1].tolist() == made[3].tolist() == made[5].tolist() == [0, 1, 2, 3]
        assert repr(made[1]).endswith("device='node:0', within=1)")
        assert device_of(here.to("node:2")) == device_of(made[1].to("node:2")) == -1
        chosen = [(None, 1), (-1, -1), (0, 0)]
        for device, found in chosen:
            with shoal.distributed.node(0, device=device):
                assert device_of(torch.zeros(3)) == device_of(shoal.distributed.FloatTensor(3)) == found
                assert device_of(here.dist_send()) == found  # type: ignore[attr-defined]
        (batch,) = master.load("node:0", lambda index, count: [{"x": torch.ones(2)}])
        assert (device_of(batch["x"]), batch["x"].tolist()) == (1, [1, 1])
        alike, mixed = master.place([1, 3]), master.nodes
        assert device_of(torch.ones(2, device=alike.device)) == 0
        assert device_of(torch.ones(2, device=mixed.device)) == -1
        assert [each.tolist() for each in mixed.gather(mixed.all_reduce_(mixed.replicate(here)))] == (
            [(here * 4).tolist()] * 4
        )


needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="the nodes have GPUs")
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")


@needs_no_gpu
def test_a_node_without_gpus_refuses_them_at_once(master: Master) -> None:
    x = torch.ones(3, device="node:0")
    for wanted in (
        x.cuda,
        lambda: x.to("cuda:0"),
        lambda: shoal.distributed.FloatTensor(3, device=0),
        lambda: torch.ones(3).dist_send(device=0),  # type: ignore[attr-defined]
        lambda: shoal.distributed.node(0, device=0),
    ):
        with pytest.raises(shoal.UsageError, match="node:0 has no GPU: its tensors stay on its CPU"):
            wanted()


@pytest.mark.gpu
@needs_cuda
def test_tensors_on_real_gpus_compute_there(master: Master) -> None:
    x = torch.randn(64, 64)
    there = x.to("node:0").cuda()
    assert isinstance(there, RemoteTensor)
    assert there.get_device() == 0
    torch.testing.assert_close((there @ there).relu().sum().cpu(), (x @ x).relu().sum())
    with pytest.raises(shoal.DeviceMismatch):
        there + x.to("node:0")


@pytest.mark.gpu
@needs_cuda
def test_a_model_trains_on_a_real_gpu(master: Master) -> None:
    with shoal.distributed.node(1, device=0):
        net = torch.nn.Sequential(
            torch.nn.Conv2d(1, 4, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(144, 3)
        )
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
        x, y = torch.randn(8, 1, 8, 8), torch.arange(8) % 3
        losses = []
        for _ in range(20):
            loss = torch.nn.functional.cross_entropy(net(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert losses[-1] < losses[0]
