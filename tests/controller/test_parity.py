"""Torch's own samples of its operators, here and on a node: values, shapes, strides, dtypes and gradients."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map

import shoal
from shoal.controller import Master, RemoteTensor
from tests.controller.exceptions import EXCEPTIONS
from tests.support.torch_tables import stand_in

NODE = "node:0"
#: how many parts the sweep is cut into; `make test` runs one
PARTS = 6
#: `make stress STRESS=short` goes through the first of them
SWEPT = range(1 if os.environ.get("STRESS") == "short" else PARTS)


def _op_db() -> list[Any]:
    stand_in()
    from torch.testing._internal.common_methods_invocations import op_db

    return op_db  # type: ignore[no-any-return]


def _name(op: Any) -> str:
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name


def _to_node(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().to(NODE).requires_grad_(value.requires_grad)
    return torch.device(NODE) if isinstance(value, torch.device) or value == "cpu" else value


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone().requires_grad_(value.requires_grad)
    return value


def _run(op: Any, sample: Any, place: Callable[[Any], Any]) -> tuple[Any, list[torch.Tensor | None]]:
    """What the operator gives of the sample at a place, and the gradients of the sample."""
    given = tree_map(place, (sample.input, sample.args, sample.kwargs))
    torch.manual_seed(0)
    result = op(given[0], *given[1], **given[2])
    differentiated = result
    if sample.output_process_fn_grad is not None:
        differentiated = sample.output_process_fn_grad(result)
    outputs = [x for x in tree_leaves(differentiated) if isinstance(x, torch.Tensor) and x.requires_grad]
    inputs = [x for x in tree_leaves(given) if isinstance(x, torch.Tensor) and x.requires_grad]
    if not outputs or not inputs:
        return result, []
    ones = [torch.ones_like(x) for x in outputs]
    return result, list(torch.autograd.grad(outputs, inputs, ones, allow_unused=True))


def _same(there: Any, here: Any) -> None:
    if not isinstance(here, torch.Tensor):
        assert there == here or here != here
        return
    assert type(there) is RemoteTensor
    assert (there.shape, there.stride(), there.dtype) == (here.shape, here.stride(), here.dtype)
    assert there.requires_grad == here.requires_grad
    torch.testing.assert_close(there.detach().cpu(), here.detach(), rtol=0, atol=0, equal_nan=True)


def _differences(master: Master, op: Any, dtype: torch.dtype, samples: int) -> str | None:
    """What is wrong with an operator on a node, in words; None: nothing."""
    try:
        chosen = op.sample_inputs(
            "cpu", dtype, requires_grad=op.supports_autograd and dtype.is_floating_point
        )
        for _, sample in zip(range(samples), chosen, strict=False):
            here = _run(op, sample, _copied)
            there = _run(op, sample, _to_node)
            for one, other in zip(tree_leaves(there), tree_leaves(here), strict=True):
                _same(one, other)
            master.synchronize()
    except Exception as error:
        with contextlib.suppress(shoal.RemoteOpError):  # the same one
            master.synchronize()
        return f"{_name(op)}: {type(error).__name__}: {error}"
    return None


def _sweep(master: Master, ops: list[Any], dtype: torch.dtype, samples: int) -> None:
    ops = [op for op in ops if dtype in op.supported_dtypes("cpu") and _name(op) not in EXCEPTIONS]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrong = [text for op in ops if (text := _differences(master, op, dtype, samples)) is not None]
    assert not wrong, "\n\n".join(wrong)


def test_operators_do_on_a_node_what_they_do_here(master: Master) -> None:
    _sweep(master, _op_db()[::PARTS], torch.float32, 1)


@pytest.mark.stress
@pytest.mark.parametrize("part", SWEPT)
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_all_operators_do_on_a_node_what_they_do_here(master: Master, dtype: torch.dtype, part: int) -> None:
    _sweep(master, _op_db()[part::PARTS], dtype, 3)


def test_the_exceptions_are_few_and_are_entries(master: Master) -> None:
    ops = {_name(op) for op in _op_db()}
    assert ops >= EXCEPTIONS.keys()
    assert len(EXCEPTIONS) <= 0.05 * len(ops)
