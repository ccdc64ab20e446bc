"""Functions of the program on nodes: ``Master.call``."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import shoal
from shoal.controller import Master, RemoteTensor

NODE = "node:1"


@dataclass
class Found:
    tensor: torch.Tensor
    count: int


def doubled(x: torch.Tensor, *, times: int = 2) -> Found:
    assert type(x) is torch.Tensor
    return Found(x * times, x.numel())


def test_a_function_gets_the_real_tensors_and_its_tensors_stay(master: Master) -> None:
    x = torch.arange(3.0, device=NODE) + 1
    found = master.call(NODE, doubled, x, times=3)
    assert isinstance(found, Found)
    assert type(found.tensor) is RemoteTensor
    assert found.tensor.device == torch.device(NODE)
    assert found.count == 3
    assert (found.tensor + x).tolist() == [4, 8, 12]


def test_arguments_of_all_kinds_go_there(master: Master) -> None:
    x = torch.ones(2, device=NODE)
    here = torch.full((2,), 5.0)
    got = master.call(1, lambda tree, t: {"sum": tree["a"][0] + t, "same": tree["a"]}, {"a": [x]}, here)
    assert got["sum"].tolist() == [6, 6]
    assert type(got["same"][0]) is RemoteTensor
    captured = master.call(1, lambda: x + 1)  # a closure's tensor is the node's too
    assert captured.tolist() == [2, 2]
    assert master.call(1, lambda: None) is None
    with pytest.raises(shoal.UsageError, match="call on node:0: an argument is a tensor on node:1"):
        master.call(0, doubled, x)
    with pytest.raises(shoal.UsageError, match="cannot be pickled"):
        master.call(1, doubled, (i for i in range(3)))


def test_calls_are_in_the_order_of_the_log(master: Master) -> None:
    x = torch.zeros(2, device=NODE)
    for i in range(50):
        x += 1
        if i % 10 == 0:
            master.call(NODE, torch.Tensor.mul_, x, 2)
    expected = 0
    for i in range(50):
        expected = (expected + 1) * (2 if i % 10 == 0 else 1)
    assert x.tolist() == [expected] * 2


def test_a_function_may_differentiate(master: Master) -> None:
    def slope(x: torch.Tensor) -> torch.Tensor:
        y = x.clone().requires_grad_()
        (y**2).sum().backward()
        assert y.grad is not None
        return y.grad

    def with_graph(x: torch.Tensor) -> torch.Tensor:
        return x.clone().requires_grad_() * 2

    x = torch.arange(3.0, device=NODE)
    assert master.call(NODE, slope, x).tolist() == [0, 2, 4]
    made = master.call(NODE, with_graph, x)
    assert not made.requires_grad
    assert (made + 1).tolist() == [1, 3, 5]  # what comes after is below autograd again


def fails(x: Any = None) -> None:
    raise KeyError("nothing here")


def test_what_a_function_raises_comes_with_both_places(master: Master) -> None:
    with pytest.raises(shoal.RemoteOpError, match="KeyError: 'nothing here'") as caught:
        master.call(NODE, fails)
    assert "in fails" in caught.value.traceback
    assert "test_calling.py" in str(caught.value.line)
    assert "master.call(NODE, fails)" in str(caught.value.line)
    lost = torch.ones(2, device=NODE)[torch.tensor([7], device=NODE)]
    with pytest.raises(shoal.RemoteOpError, match="index 7 is out of bounds"):
        master.call(NODE, doubled, lost)
    with pytest.raises(shoal.RemoteOpError, match="SystemExit"):
        master.call(NODE, exit, 3)
    assert master.call(NODE, doubled, torch.ones(1)).count == 1


class Own(BaseException):
    pass


class Mute(Exception):
    def __str__(self) -> str:
        raise asyncio.CancelledError("no words")

    __repr__ = __str__


class Unpicklable:
    """Raises when it is unpickled or, made with True, when it is pickled."""

    def __init__(self, at_once: bool) -> None:
        self.at_once = at_once

    def __reduce__(self) -> Any:
        if self.at_once:
            raise Own("not to be pickled")
        return raises, (KeyboardInterrupt("not to be unpickled"),)


def raises(error: BaseException) -> None:
    raise error


@pytest.mark.parametrize(
    ("fn", "args", "words"),
    [
        (raises, (asyncio.CancelledError("stop"),), "CancelledError: stop"),
        (raises, (KeyboardInterrupt(),), "KeyboardInterrupt"),
        (raises, (GeneratorExit(),), "GeneratorExit"),
        (raises, (Own("mine"),), "Own: mine"),
        (raises, (Mute(),), "Mute"),
        (doubled, (Unpicklable(False),), "KeyboardInterrupt: not to be unpickled"),
        (Unpicklable, (True,), "Own: not to be pickled"),
    ],
)
def test_a_node_survives_whatever_a_function_raises(
    master: Master, fn: Any, args: tuple[Any, ...], words: str
) -> None:
    x = torch.ones(2, device=NODE) * 3
    with pytest.raises(shoal.RemoteOpError, match=rf"call.*{words}"):
        master.call(NODE, fn, *args)
    assert x.tolist() == [3, 3]


def test_on_a_place_each_node_runs_it_with_its_own(master: Master) -> None:
    place = master.nodes[:2]
    x = place.scatter(torch.arange(4.0))
    found = master.call(place, doubled, x)
    assert [each.tensor.get_node() for each in found] == [0, 1]
    assert [each.tensor.tolist() for each in found] == [[0, 2], [4, 6]]
    one = master.call(NODE, torch.sum, x)  # a node's own part of a tensor on a place
    assert one.item() == 5


def test_calls_leave_nothing_on_the_node(master: Master) -> None:
    def held() -> int:
        import gc

        return sum(type(each) is torch.Tensor for each in gc.get_objects())

    x = torch.ones(2, device=NODE)
    master.call(NODE, doubled, x)
    before = master.call(NODE, held)
    for _ in range(30):
        master.call(NODE, doubled, x)
    assert master.call(NODE, held) <= before + 2
