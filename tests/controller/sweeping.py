"""The ways in which the sweep uses an operator of torch's ``op_db``, here and on a node."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.utils._pytree import tree_leaves, tree_map

import shoal
from shoal.controller import Master, RemoteTensor
from tests.controller.compare import steps
from tests.controller.exceptions import ROUNDED, WITHOUT_ELEMENTS
from tests.support.torch_tables import stand_in

NODE = "node:0"
#: moves a value to a node, or copies it here
_Place = Callable[[Any], Any]


def op_db() -> list[Any]:
    """Torch's table of operators."""
    stand_in()
    from torch.testing._internal.common_methods_invocations import op_db

    return op_db  # type: ignore[no-any-return]


def name_of(op: Any) -> str:
    """The name of an entry."""
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name


def _to_node(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().to(NODE).requires_grad_(value.requires_grad)
    return torch.device(NODE) if isinstance(value, torch.device) or value == "cpu" else value


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone().requires_grad_(value.requires_grad)
    return value


def _tensors(value: Any) -> list[torch.Tensor]:
    return [each for each in tree_leaves(value) if isinstance(each, torch.Tensor)]


def _given(op: Any, sample: Any, place: _Place) -> Any:
    if op.name == "tensor_split":  # torch wants its indices here, whatever the device
        return place(sample.input), sample.args, sample.kwargs
    return tree_map(place, (sample.input, sample.args, sample.kwargs))


def _plainly(op: Any, sample: Any, place: _Place) -> Any:
    """Its result, and the gradients of what it takes."""
    given = _given(op, sample, place)
    result = differentiated = op(given[0], *given[1], **given[2])
    if sample.output_process_fn_grad is not None:
        differentiated = sample.output_process_fn_grad(result)
    outputs = [x for x in _tensors(differentiated) if x.requires_grad]
    inputs = [x for x in _tensors(given) if x.requires_grad]
    if not outputs or not inputs:
        return result
    ones = [torch.ones_like(x) for x in outputs]
    return result, torch.autograd.grad(outputs, inputs, ones, allow_unused=True)


def _noncontiguously(op: Any, sample: Any, place: _Place) -> Any:
    """As plainly, of operands that are not contiguous."""
    return _plainly(op, sample.noncontiguous(), place)


def _out(op: Any, sample: Any, place: _Place) -> Any:
    """Its result in tensors of the program, which fit, or which it makes larger."""
    with torch.no_grad():
        given = _given(op, sample, place)
        result = op(given[0], *given[1], **given[2])
        if isinstance(result, (tuple, list)):
            fit, empty = type(result)(map(torch.zeros_like, result)), [each.new_empty(0) for each in result]
            into: Any = tuple(empty)
        else:
            fit, into = torch.zeros_like(result), result.new_empty(0)
        op(given[0], *given[1], **given[2], out=fit)
        op(given[0], *given[1], **given[2], out=into)
        return fit, into, [each.clone() for each in _tensors(into)]


def _in_place(op: Any, sample: Any, place: _Place) -> Any:
    """What is in its first operand, in a view of that, and the gradients."""
    given = _given(op, sample, place)
    target = given[0].clone()
    view = target.detach()
    result = op.inplace_variant(target, *given[1], **given[2])
    inputs = [x for x in _tensors(given) if x.requires_grad]
    if not inputs or not result.requires_grad:
        return target, view
    return target, view, torch.autograd.grad(result, inputs, torch.ones_like(result), allow_unused=True)


def _forward(op: Any, sample: Any, place: _Place) -> Any:
    """Its tangents in forward mode."""
    given = _given(op, sample, place)
    with forward_ad.dual_level():

        def dual(each: Any) -> Any:
            if isinstance(each, torch.Tensor) and each.requires_grad:
                each = each.detach()
                return forward_ad.make_dual(each, torch.ones_like(each))
            return each

        args = tree_map(dual, given)
        result = op(args[0], *args[1], **args[2])
        return [tuple(forward_ad.unpack_dual(each)) for each in _tensors(result)]


def _mapped(op: Any, sample: Any, place: _Place) -> Any:
    """What ``torch.vmap`` makes of it."""
    given = _given(op, sample, place)

    def one(x: torch.Tensor) -> Any:
        return op(x, *given[1], **given[2])

    x = given[0].detach()
    return torch.vmap(one, randomness="different")(torch.stack([x, x.flip(0) if x.dim() else x]))


WAYS = {
    "plainly": _plainly,
    "noncontiguously": _noncontiguously,
    "out": _out,
    "in place": _in_place,
    "forward": _forward,
    "mapped": _mapped,
}


def has(op: Any, way: str) -> bool:
    """Whether an operator can be used so."""
    if way == "out":
        return bool(op.supports_out)
    if way == "in place":
        return op.inplace_variant is not None
    return bool(op.supports_forward_ad) if way == "forward" else True


def _same(there: Any, here: Any, name: str) -> None:
    if not isinstance(here, torch.Tensor):
        assert there == here or here != here
        return
    assert type(there) is RemoteTensor, "its result is here"
    said, known = [(tuple(each.shape), steps(each), each.dtype) for each in (there, here)]
    assert said == known, f"{said}, not {known}"
    assert there.requires_grad == here.requires_grad
    if name in WITHOUT_ELEMENTS:
        return
    bounds = {} if name in ROUNDED else {"rtol": 0, "atol": 0}
    torch.testing.assert_close(there.detach().cpu(), here.detach(), equal_nan=True, **bounds)


def compare(master: Master, op: Any, dtype: torch.dtype, samples: int, way: str = "plainly") -> str | None:
    """What is wrong with an operator on a node, in words; None: nothing."""
    differentiated = op.supports_autograd and dtype in op.supported_backward_dtypes("cpu")
    try:
        chosen = op.sample_inputs("cpu", dtype, requires_grad=differentiated)
        for _, sample in zip(range(samples), chosen, strict=False):
            torch.manual_seed(0)
            try:
                here = WAYS[way](op, sample, _copied)
            except Exception:  # torch cannot do that here
                if way == "plainly":
                    raise
                continue
            torch.manual_seed(0)
            there = WAYS[way](op, sample, _to_node)
            for one, other in zip(tree_leaves(there), tree_leaves(here), strict=True):
                _same(one, other, name_of(op))
            master.synchronize()
    except Exception as error:
        with contextlib.suppress(shoal.RemoteOpError):  # the same one
            master.synchronize()
        return f"{name_of(op)} {way} in {dtype}: {type(error).__name__}: {error}"
    return None


def sweep(
    master: Master, ops: Iterable[Any], dtype: torch.dtype, samples: int, way: str = "plainly"
) -> list[str]:
    """What is wrong with operators on a node, in words."""
    return [
        text
        for op in ops
        if dtype in op.supported_dtypes("cpu") and has(op, way)
        if (text := compare(master, op, dtype, samples, way)) is not None
    ]
