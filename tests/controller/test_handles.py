"""Tensors of the master that come to stand for another tensor, or whose own metadata changes."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

import shoal
from shoal.controller import Master

NODE = "node:0"


def test_the_data_of_a_tensor_can_be_replaced(master: Master) -> None:
    p = nn.Parameter(torch.zeros(2, device=NODE))
    p.data = torch.ones(2, device=NODE) * 3
    assert p.tolist() == [3, 3]
    p.data.add_(1)
    assert p.tolist() == [4, 4]
    assert not p.data.requires_grad
    p.data = torch.ones(3, 4, device=NODE)
    assert p.shape == (3, 4)
    assert (p * 1).sum().item() == 12
    with pytest.raises(shoal.UsageError, match="cannot be a tensor on cpu"):
        p.data = torch.ones(2)


def test_operations_that_change_metadata_in_place_change_it_here_too(master: Master) -> None:
    def run(device: str) -> list[torch.Tensor]:
        x = torch.arange(6.0, device=device).view(2, 3)
        detached = x.detach()
        x.t_()
        assert x.shape == (3, 2)
        assert detached.shape == (2, 3)
        detached[0, 1] = 9  # they share their memory
        y = torch.zeros(2, device=device)
        y.resize_(4).fill_(2)
        z = torch.zeros(2, 2, device=device)
        z.unsqueeze_(0).squeeze_(0).transpose_(0, 1)
        out = torch.empty(0, device=device)
        torch.add(y, 1, out=out)
        other = torch.empty(0, device=device)
        other.set_(x)
        other[0, 0] = 5
        return [x.cpu(), detached.cpu(), y.cpu(), z.cpu(), out.cpu(), other.cpu()]

    for there, here in zip(run(NODE), run("cpu"), strict=True):
        assert there.shape == here.shape
        assert torch.equal(there, here)


def test_a_module_that_moves_keeps_ties_and_its_optimiser(master: Master) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(3, 3)
            self.second = nn.Linear(3, 3)
            self.second.weight = self.first.weight
            self.norm = nn.BatchNorm1d(3)

    net = Tied()
    optimiser = torch.optim.SGD(net.parameters(), lr=1.0)
    for device in ("node:0", "node:1"):
        net.to(device)
        assert net.first.weight is net.second.weight
        assert net.first.weight.device == torch.device(device)
        assert net.norm.running_mean is not None
        assert net.norm.running_mean.device == torch.device(device)
        before = net.first.weight.detach().cpu()
        net.first.weight.grad = torch.ones_like(net.first.weight)
        optimiser.step()
        assert torch.equal(net.first.weight.detach().cpu(), before - 1)
        optimiser.zero_grad()
    net.cpu()
    assert type(net.first.weight) is nn.Parameter
    assert net.first.weight is net.second.weight


def test_state_dicts_go_both_ways(master: Master) -> None:
    here, there = nn.Linear(3, 2), nn.Linear(3, 2, device=NODE)
    there.load_state_dict(here.state_dict())
    assert torch.equal(there.weight.detach().cpu(), here.weight)
    again = nn.Linear(3, 2)
    again.load_state_dict({name: value.cpu() for name, value in there.state_dict().items()})
    assert torch.equal(again.weight, here.weight)
    again.load_state_dict(there.state_dict())


def test_factories_like_another_tensor_choose_their_device(master: Master) -> None:
    x = torch.ones(2, 3, device=NODE)
    assert torch.zeros_like(x).device == torch.device(NODE)
    assert torch.zeros_like(x, device="cpu").device.type == "cpu"
    assert x.new_zeros(4, device="node:1").device == torch.device("node:1")
    assert torch.zeros_like(torch.ones(2), device="node:1").tolist() == [0, 0]
    assert x.to("meta").device.type == "meta"


def test_tensors_that_nothing_holds_are_freed_and_their_ids_used_again(master: Master) -> None:
    gc.collect()
    x = torch.ones(10, device=NODE)
    master.synchronize()
    before = master.stats()[0]["tensors"]
    for _ in range(5000):
        x = x + 1
    assert x[0].item() == 5001
    del x
    gc.collect()
    assert master.stats()[0]["tensors"] < before
