"""A program: a master whose nodes have two pretended GPUs each; one function for each thing they promise.

It prints a line for each function: ``name: ok``, or a traceback.
"""

from __future__ import annotations

import copy
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from torch import nn

import shoal
from shoal.controller import RemoteTensor
from shoal.controller.node import accelerators
from shoal.controller.node.serving import serve_masters
from tests.support import pretend_gpus
from tests.support.pretend_gpus import installed_in

dist = shoal.distributed


def joins_on(tell: Connection, url: str, secret: str, device: str) -> None:
    """``shoal worker URL --device DEVICE``, where there are two pretended GPUs."""
    os.environ["SHOAL_SECRET"] = secret
    pretend_gpus.begin()
    accelerators.choose(device)
    serve_masters(url, "worker", tell.send)


def where(tensor: torch.Tensor) -> tuple[int, int]:
    assert isinstance(tensor, RemoteTensor)
    return tensor.get_node(), tensor.get_device()


def raised(kind: type[Exception], what: Callable[[], object]) -> str:
    try:
        what()
    except kind as error:
        return str(error)
    raise AssertionError(f"no {kind.__name__}")


def the_example_of_the_proposal() -> None:
    x = dist.FloatTensor(20, 20).fill_(4)
    here = torch.randn(20, 20)
    y = here.dist_send()  # type: ignore[attr-defined]
    z = x + y
    assert where(x) == where(y) == where(z) == (0, -1)
    cuda_x = x.cuda()
    assert where(cuda_x) == (0, 0)
    with dist.node(1):
        a = dist.FloatTensor(10, device=1)
        assert where(a) == (1, 1)
        cuda_y = y.cuda()
        assert where(cuda_y) == (0, 0)
        q = cuda_x + cuda_y
        assert where(q) == (0, 0)
    assert torch.equal(q.dist_receive(), here + 4)
    assert torch.equal(z.cpu(), here + 4)


def results_live_where_their_operands_do() -> None:
    x = torch.arange(6.0, device="node:0").cuda(1)
    made = [x * 2 + 1, x.view(2, 3)[1], x.sum(), torch.zeros_like(x, device=x.device), x.new_zeros(2)]
    made += [x.double(), x[torch.tensor([0, 2])], x.clone().add_(1), x.split(2)[1], x[x > 2]]
    assert {where(each) for each in made} == {(0, 1)}
    assert (x * torch.tensor(2.0)).tolist() == [0, 2, 4, 6, 8, 10]
    assert where(torch.zeros(2, device=x.device)) == (0, -1)


def tensors_move_within_their_node_and_beyond() -> None:
    x = torch.arange(4.0, device="node:1")
    assert where(x.cuda()) == where(x.to("cuda")) == where(x.cuda("cuda:0")) == (1, 0)
    gpu = x.to("cuda:1", torch.float64, copy=True)
    assert (where(gpu), gpu.dtype) == ((1, 1), torch.float64)
    assert gpu.cuda(1) is gpu
    assert where(x.to(gpu)) == (1, 1)
    assert where(gpu.within(-1)) == (1, -1)
    assert where(gpu.to("node:0")) == (0, -1)
    assert gpu.cpu().tolist() == gpu.to("node:0").tolist() == [0, 1, 2, 3]
    x.copy_(gpu.cuda(0) * 2)  # one command copies between devices
    assert x.tolist() == [0, 2, 4, 6]
    gpu.copy_(torch.ones(4))
    assert gpu.tolist() == [1, 1, 1, 1]


def devices_of_a_node_do_not_mix() -> None:
    x = torch.ones(3, device="node:0")
    for other in (x.cuda(0), x.cuda(1)):
        text = raised(shoal.DeviceMismatch, lambda other=other: other + x)  # type: ignore[misc]
        assert ".within(-1)" in text
        raised(shoal.DeviceMismatch, lambda other=other: torch.cat([other, x]))  # type: ignore[misc]
    raised(shoal.DeviceMismatch, lambda: x.cuda(0) + x.cuda(1))
    raised(RuntimeError, lambda: torch.ones(2, 3, device="node:0").cuda() @ x.cuda()[:2])
    assert "are GPUs 0 to 1" in raised(shoal.UsageError, lambda: x.cuda(2))
    assert "GPUs count from 0" in raised(shoal.UsageError, lambda: x.within(-2))
    raised(shoal.UsageError, lambda: dist.node(0, device=7))


def factories_follow_the_chosen_device() -> None:
    with dist.node(1, device=0):
        assert where(torch.zeros(3)) == where(torch.tensor([1, 2])) == where(dist.LongTensor([1])) == (1, 0)
        assert where(torch.zeros(3, device="node:0")) == (0, -1)
        assert where(torch.ones(2, device="cpu").dist_send()) == (1, 0)  # type: ignore[attr-defined]
        with dist.node(0, device=1):
            assert where(torch.zeros(3)) == (0, 1)
        assert where(torch.zeros(3)) == (1, 0)
    assert torch.zeros(1).device.type == "cpu"


def gradients_come_back_to_where_tensors_were() -> None:
    w = torch.ones(3, device="node:0", requires_grad=True)
    (w.cuda(1) * 2).within(-1).sum().backward()
    assert w.grad is not None
    assert where(w.grad) == (0, -1)
    assert w.grad.tolist() == [2, 2, 2]


def a_model_trains_on_a_gpu_as_it_does_here() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm, self.last = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 1)
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
            self.recurrent = nn.LSTM(8, 8, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.norm(self.first(x)).relu()
            x, _ = self.attention(x, x, x, need_weights=False)
            x, _ = self.recurrent(x)
            return self.last(x).square().mean()  # type: ignore[no-any-return]

    def losses(net: nn.Module, x: torch.Tensor) -> list[float]:
        optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
        found = []
        for _ in range(4):
            loss = net(x)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return found

    torch.manual_seed(3)
    net, x = Net().double(), torch.randn(2, 5, 6, dtype=torch.float64)
    there = copy.deepcopy(net).to("node:0").to("cuda:1")
    assert {where(p) for p in there.parameters()} == {(0, 1)}
    with dist.node(0, device=1):  # the LSTM makes its state on x.device
        found = losses(there, x.to("node:0"))
    torch.testing.assert_close(found, losses(net, x))


def random_states_have_those_of_gpus() -> None:
    torch.manual_seed(5)
    states = torch.node.get_rng_state(0)  # type: ignore[attr-defined]
    assert len(states) == 3 * len(torch.default_generator.get_state())
    torch.node.set_rng_state(states, 0)  # type: ignore[attr-defined]
    assert torch.equal(torch.node.get_rng_state(0), states)  # type: ignore[attr-defined]


SCENES: list[Callable[[], None]] = [
    the_example_of_the_proposal,
    results_live_where_their_operands_do,
    tensors_move_within_their_node_and_beyond,
    devices_of_a_node_do_not_mix,
    factories_follow_the_chosen_device,
    gradients_come_back_to_where_tensors_were,
    a_model_trains_on_a_gpu_as_it_does_here,
    random_states_have_those_of_gpus,
]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        sys.path.append(str(installed_in(Path(folder))))  # which nodes have too
        with shoal.init_master_worker(workers=2) as master:
            for scene in SCENES:
                try:
                    scene()
                    master.synchronize()
                except Exception:
                    print(f"{scene.__name__}: {traceback.format_exc()}", flush=True)
                else:
                    print(f"{scene.__name__}: ok", flush=True)


if __name__ == "__main__":
    sys.exit(main())
