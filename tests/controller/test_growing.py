"""Tensors whose memory an operator makes larger, and results of which only the node knows the shape."""

from __future__ import annotations

import pytest
import torch

import shoal
from shoal.controller import Master

NODE = "node:0"


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_a_view_of_memory_that_came_from_the_master_grows_where_out_needs_it(master: Master) -> None:
    for device in ("cpu", NODE):
        x = torch.tensor([1, 2, 3]).to(device)
        view, same = x[2:], x.detach()
        torch.add(x.clone(), 1, out=view)
        assert (view.shape, view.storage_offset()) == ((3,), 2)
        assert view.unsqueeze(0).tolist() == [[2, 3, 4]]
        assert x.tolist() == same.tolist() == [1, 2, 2]  # of the same memory
        x.add_(10)
        assert view.tolist() == [12, 3, 4]


@pytest.mark.parametrize("make", [lambda: torch.ones(3), lambda: torch.ones(300_000)])
def test_memory_that_came_from_the_master_is_resized(master: Master, make: object) -> None:
    x = make().to(NODE)  # type: ignore[operator]
    view = x[1:]
    count = len(x)
    x.resize_(2 * count)
    x[1] = 7.0
    assert x.shape == (2 * count,)
    assert view[0].item() == 7.0
    assert x[:count].sum().item() == count + 6


def test_another_tensor_with_the_same_memory_keeps_its_shape_when_out_grows(master: Master) -> None:
    for device in ("cpu", NODE):
        x = torch.empty(0, device=device)
        other = x.detach()
        torch.add(torch.ones(3, device=device), 1, out=x)
        assert x.tolist() == [2, 2, 2]
        assert other.shape == (0,)
        assert (other + 1).tolist() == []


def test_each_of_several_results_grows(master: Master) -> None:
    for device in ("cpu", NODE):
        x = torch.tensor([[1.0, 5.0], [4.0, 2.0]], device=device)
        values, indices = torch.empty(0, device=device), torch.empty(0, dtype=torch.int64, device=device)
        given = torch.max(x, 1, out=(values, indices))
        assert given[0] is values
        assert given[1] is indices
        assert (values + 1).tolist() == [6, 5]
        assert (indices + 1).tolist() == [2, 1]


def test_a_result_that_is_not_dense_fails_alone(master: Master) -> None:
    x = torch.arange(6.0).reshape(2, 3).to(NODE)
    for give in (lambda: x.to_mkldnn(), lambda: torch.nested.nested_tensor([x[0], x[1]])):
        with pytest.raises((shoal.ShoalError, RuntimeError), match="nodes hold dense tensors"):
            give()

    def quantize() -> None:
        torch.quantize_per_tensor(x, 0.1, 0, torch.qint8)  # raises if this release has no metadata for it
        master.synchronize()

    with pytest.raises(shoal.RemoteOpError):
        quantize()
    assert x.sum().item() == 15.0
