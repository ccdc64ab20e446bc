"""Torch's own settings of its optimizers: parameters and state after some steps, here and on a node."""

from __future__ import annotations

import io
import sys
import warnings
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import pytest
import torch

from shoal.controller import Master
from tests.controller.compare import differences, moved
from tests.support.torch_tables import stand_in

NODE = "node:0"
STEPS = 3


def _optim_db() -> list[Any]:
    stand_in()
    from torch.testing._internal.common_optimizers import optim_db

    return optim_db


@pytest.fixture
def capturable_here() -> Iterator[None]:
    """Torch refuses ``capturable=True`` on the CPU for want of graphs, not of kernels."""

    def supported(supports_xla: bool = True) -> list[str]:
        return ["cpu", "node"]

    name = "_get_capturable_supported_devices"
    with pytest.MonkeyPatch.context() as patch:
        for module in [each for key, each in sys.modules.items() if key.startswith("torch.optim.")]:
            if hasattr(module, name):
                patch.setattr(module, name, supported)
        yield


class _Problem:
    """Two layers, whose weights are matrices only where an optimizer takes no others."""

    def __init__(self, info: Any, settings: dict[str, Any], device: str) -> None:
        torch.manual_seed(0)
        shapes = [(4, 3), (2, 4)] if info.name == "Muon" else [(4, 3), (2, 4), (4,)]
        self.parameters = [torch.nn.Parameter(moved(torch.randn(shape), device)) for shape in shapes]
        self.x = moved(torch.randn(5, 3), device)
        self.optimizer = info.optim_cls(self.parameters, **deepcopy(settings))
        self.needs_closure = info.step_requires_closure

    def loss(self) -> torch.Tensor:
        self.optimizer.zero_grad()
        first, second, *bias = self.parameters
        hidden = self.x @ first.t() + (bias[0] if bias else 0)
        loss = (hidden.tanh() @ second.t()).pow(2).sum()
        loss.backward()
        return loss

    def steps(self, count: int) -> list[torch.Tensor]:
        losses = []
        for _ in range(count):
            if self.needs_closure:
                loss = self.optimizer.step(self.loss)
            else:
                loss = self.loss()
                self.optimizer.step()
            losses.append(loss.detach())
        return losses

    def state(self) -> Any:
        return [each.detach() for each in self.parameters], self.optimizer.state_dict()


def _settings(info: Any, samples: int | None) -> Iterator[tuple[str, dict[str, Any]]]:
    ways: list[dict[str, bool]] = [{}]
    if "foreach" in info.supported_impls:
        ways = [{"foreach": False}, {"foreach": True}]
    if "fused" in info.supported_impls and "cpu" in info.supports_fused_on:
        ways.append({"fused": True})
    inputs = info.optim_inputs_func("cuda")  # with those for graphs
    for sample in inputs[:samples]:
        for way in ways:
            yield f"{info.name}, {sample.desc}, {way}", {**sample.kwargs, **way}


def _sweep(master: Master, samples: int | None) -> None:
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for info in _optim_db():
            if info.only_supports_sparse_grads:
                continue
            for text, settings in _settings(info, samples):
                here, there = _Problem(info, settings, "cpu"), _Problem(info, settings, NODE)
                losses = here.steps(STEPS), there.steps(STEPS)
                wrong = differences(master, (losses[0], here.state()), (losses[1], there.state()))
                if wrong:
                    found.append(f"{text}: {'; '.join(wrong[:3])}")
    assert not found, "\n".join(found)


def test_optimizers_do_on_a_node_what_they_do_here(master: Master, capturable_here: None) -> None:
    _sweep(master, 1)


@pytest.mark.stress
def test_optimizers_of_all_settings_do_so_too(master: Master, capturable_here: None) -> None:
    _sweep(master, None)


def test_an_optimizer_goes_on_from_its_state_on_another_device(master: Master) -> None:
    info = next(each for each in _optim_db() if each.name == "AdamW")
    settings = {"lr": 0.01}
    here, there = _Problem(info, settings, "cpu"), _Problem(info, settings, NODE)
    here.steps(3)
    there.steps(2)
    buffer = io.BytesIO()
    torch.save((there.state()[0], there.optimizer.state_dict()), buffer)
    buffer.seek(0)
    parameters, state = torch.load(buffer, weights_only=False)
    other = _Problem(info, settings, "node:1")
    for parameter, value in zip(other.parameters, parameters, strict=True):
        parameter.data.copy_(value)
    other.optimizer.load_state_dict(state)
    assert other.optimizer.state[other.parameters[0]]["exp_avg"].device == torch.device("node:1")
    other.steps(1)
    assert not differences(master, here.state(), other.state())
