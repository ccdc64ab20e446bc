"""The state of modules and tensors: how it is loaded, saved and copied where it is on nodes."""

from __future__ import annotations

import copy
import io
import pickle
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.controller import Master, RemoteTensor
from tests.controller.compare import differences

NODE = "node:0"


def _recurrent() -> nn.Module:
    return nn.Sequential(nn.LSTM(3, 4), nn.GRU(3, 4), nn.BatchNorm1d(3))


@pytest.mark.parametrize("device", ["cpu", NODE])
def test_a_module_loads_the_state_of_another_one_and_keeps_its_parameters(
    master: Master, device: str
) -> None:
    state = {name: value.to(NODE) for name, value in _recurrent().state_dict().items()}
    module = _recurrent().to(device)
    parameters, views = list(module.parameters()), [each.detach() for each in module.parameters()]
    held = [weakref.ref(each) for each in parameters]
    module.load_state_dict(state)
    assert all(a is b for a, b in zip(module.parameters(), parameters, strict=True))
    assert all(each() is not None for each in held)
    for name, view in zip(dict(module.named_parameters()), views, strict=True):
        assert torch.equal(view.cpu(), state[name].cpu())  # elements were copied, as torch does


def test_a_module_goes_to_nodes_and_back_as_the_same_parameters(master: Master) -> None:
    module = _recurrent()
    here, parameters = copy.deepcopy(module.state_dict()), list(module.parameters())
    for device in (NODE, "node:1", "cpu", NODE):
        module.to(device)
        assert all(a is b for a, b in zip(module.parameters(), parameters, strict=True))
    module.cpu()
    assert all(torch.equal(here[name], value) for name, value in module.state_dict().items())


def _saved(value: Any) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return file


def test_modules_and_states_on_nodes_are_saved_as_those_of_the_cpu(master: Master) -> None:
    module = _recurrent().to(NODE)
    read = torch.load(_saved(module), weights_only=False)
    assert {type(each) for each in read.parameters()} == {nn.Parameter}
    for state in (read.state_dict(), torch.load(_saved(module.state_dict()))):
        assert {each.device.type for each in state.values()} == {"cpu"}
        assert all(torch.equal(state[name], value.cpu()) for name, value in module.state_dict().items())
    again = pickle.loads(pickle.dumps(module)).to("node:1")
    assert again[0].weight_hh_l0.device == torch.device("node:1")


@pytest.mark.parametrize("location", ["node:1", {"cpu": "node:1"}])
def test_a_file_is_read_to_a_node(master: Master, location: Any) -> None:
    x = torch.arange(6.0)
    saved = {
        "matrix": x.reshape(2, 3).t(),
        "part": x[2:4],
        "parameter": nn.Parameter(torch.ones(2, dtype=torch.float64)),
        "half": torch.ones(3, dtype=torch.bfloat16),
        "none": torch.empty(0, 2),
        "true": torch.tensor(True),
    }
    read = torch.load(_saved(saved), map_location=location)
    assert all(isinstance(each, RemoteTensor) for each in read.values())
    assert all(each.device == torch.device("node:1") for each in read.values())
    assert type(saved["parameter"]) is nn.Parameter
    assert isinstance(read["parameter"], nn.Parameter)
    assert not differences(master, saved, read)
    read["part"].zero_()  # what had memory in common still has
    assert read["matrix"].cpu().t().flatten().tolist() == [0, 1, 0, 0, 4, 5]


def test_a_file_is_not_read_to_a_node_that_is_not_there(master: Master) -> None:
    with pytest.raises(shoal.UsageError, match="node:7"):
        torch.load(_saved(torch.ones(3)), map_location="node:7")


def test_a_tensor_of_a_node_cannot_be_of_another_class(master: Master) -> None:
    class Named(torch.Tensor):
        pass

    here = torch.ones(2).as_subclass(Named)
    with pytest.raises(shoal.UnsupportedOperation, match="cannot be a Named"):
        here.to(NODE)
    there = here.as_subclass(torch.Tensor).to(NODE)
    assert there.as_subclass(torch.Tensor) is there


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    ("make", "way"),
    [
        (lambda: torch.eye(3).to_sparse(), "to_dense"),
        (lambda: torch.eye(3).to_sparse_csr(), "to_dense"),
        (lambda: torch.eye(3).to_sparse_csc(), "to_dense"),
        (lambda: torch.eye(4).to_sparse_bsr((2, 2)), "to_dense"),
        (lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), "dequantize"),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "to_padded_tensor"),
    ],
)
def test_what_is_no_dense_tensor_is_refused_with_what_makes_it_one(
    master: Master, make: Any, way: str
) -> None:
    with pytest.raises(shoal.UnsupportedOperation, match=way):
        make().to(NODE)
