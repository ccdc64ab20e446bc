"""Torch's own samples of its modules, here and on a node: results, gradients and state."""

from __future__ import annotations

import os
import warnings
from copy import deepcopy
from typing import Any

import pytest
import torch

from shoal import ShoalError
from shoal.controller import Master
from tests.controller.compare import differences, is_remote, moved, tensors
from tests.controller.exceptions import MODULES
from tests.support.torch_tables import stand_in

NODE = "node:0"
#: how many parts the sweep is cut into; `make test` runs one
PARTS = 8
#: `make stress STRESS=short` goes through the first of them
SWEPT = range(1 if os.environ.get("STRESS") == "short" else PARTS)


def _module_db() -> list[Any]:
    stand_in()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of NumPy 2.5, with torch 2.11
        from torch.testing._internal.common_modules import module_db
    return module_db  # type: ignore[no-any-return]


def _make(info: Any, sample: Any, training: bool) -> torch.nn.Module:
    """A module on the CPU, with its parameters and buffers made."""
    torch.manual_seed(1)
    made = info.module_cls(*sample.constructor_input.args, **sample.constructor_input.kwargs)
    made.train(training)
    if info.is_lazy:
        with torch.no_grad():
            made(*moved(sample.forward_input.args, "cpu"), **moved(sample.forward_input.kwargs, "cpu"))
    return made  # type: ignore[no-any-return]


def _run(module: torch.nn.Module, given: Any, device: str, differentiated: bool) -> Any:
    """What a module gives, the gradients of all that it takes, and its state."""
    args, kwargs = given
    torch.manual_seed(3)
    with torch.set_grad_enabled(differentiated):
        result = module(*args, **kwargs)
    torch.manual_seed(4)
    ends = [each for each in tensors(result) if each.requires_grad]
    if ends:
        torch.autograd.backward(ends, [torch.randn(each.shape).to(device, each.dtype) for each in ends])
    leaves = tensors(given) + list(module.parameters())
    return result, [each.grad for each in leaves], dict(module.state_dict())


def _differences(
    master: Master, info: Any, training: bool, samples: int | None, differentiated: bool
) -> list[str]:
    torch.manual_seed(0)
    found = []
    inputs = info.module_inputs_func(info, "cpu", torch.float32, True, training)
    for sample in inputs[:samples]:
        if sample.forward_input is None:
            continue
        given = sample.forward_input.args, sample.forward_input.kwargs
        try:
            module = _make(info, sample, training)
            here = _run(deepcopy(module), moved(given, "cpu"), "cpu", differentiated)
        except RuntimeError:  # a sample that torch has no kernel for here
            continue
        try:
            there = _run(deepcopy(module).to(NODE), moved(given, NODE), NODE, differentiated)
            wrong = differences(master, here, there)
            if not is_remote(there[0]):
                wrong.append("its result is here")
            master.synchronize()
        except (ShoalError, RuntimeError, TypeError, ValueError) as error:
            wrong = [f"{type(error).__name__}: {error}"]
        if wrong:
            mode = "training" if training else "evaluation"
            found.append(f"{info.name}, {mode}, {sample.desc or 'first'}: {'; '.join(wrong[:3])}")
    return found


def _sweep(master: Master, infos: list[Any], samples: int | None) -> None:
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for info in infos:
            if info.name in MODULES:
                continue
            for training in (True, False) if info.train_and_eval_differ else (True,):
                found += _differences(master, info, training, samples, True)
            found += _differences(master, info, False, samples, False)
    assert not found, "\n\n".join(found)


def test_modules_do_on_a_node_what_they_do_here(master: Master) -> None:
    _sweep(master, _module_db()[::PARTS], 2)


@pytest.mark.stress
@pytest.mark.parametrize("part", SWEPT)
def test_all_modules_do_on_a_node_what_they_do_here(master: Master, part: int) -> None:
    _sweep(master, _module_db()[part::PARTS], None)


def test_the_excepted_modules_are_few_and_are_entries(master: Master) -> None:
    names = {info.name for info in _module_db()}
    assert names | {"nn.LinearCrossEntropyLoss"} >= MODULES.keys()  # not in every release of torch
    assert len(MODULES) <= 0.03 * len(names)
