"""Refusals of operators: torch's own kernel is asked, with small tensors of the same dtypes.

Torch's fake tensors let pass some of what its kernels refuse, like the difference of two bools or a product
that is to be written to a tensor that cannot hold it: the program would hear of it from the node, and at a
later line.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..protocol.commands import Template, filled
from ..protocol.metadata import Metadata

#: pointwise operators that refuse some elements
_CHOOSY = frozenset(["mvlgamma"])
#: others whose success depends on no elements
_OTHERS = frozenset([
    "mm", "mv", "bmm", "dot", "vdot", "addmm", "addmv", "addr", "baddbmm", "copy", "fill", "masked_fill",
    "_softmax", "_log_softmax",
])  # fmt: skip
#: likewise, and they name lengths
_SIZED = frozenset(["view"])
#: elements that the memory of all operands may have for a rehearsal in their own shapes and strides
_FEW = 4096


def rehearse(
    operator: Any,
    args: Sequence[Template],
    kwargs: dict[str, Template],
    operands: Sequence[Metadata],
    scalars: Sequence[float],
    exactly: bool = False,
) -> None:
    """Run a call here whose success depends on no elements, and on no chance.

    Large shapes are made small, so that equal lengths stay equal.

    Args:
        exactly: not if shapes had to be made small, of which an error could tell.

    Raises:
        Exception: what torch raises for such arguments.
    """
    tags, name = operator.tags, operator.overloadpacket.__name__.rstrip("_")
    if operator.namespace != "aten":
        return  # whatever a program's own operator does, it does on the node
    if torch.Tag.pointwise not in tags and name not in _OTHERS | _SIZED:
        return
    if torch.Tag.nondeterministic_seeded in tags or name in _CHOOSY:
        return
    shapes = [each.shape for each in operands]
    strides: list[Sequence[int] | None] = [each.stride for each in operands]
    if sum(_reach(each) for each in operands) > _FEW:
        if exactly or name in _SIZED:
            return
        strides = [None] * len(operands)
        lengths = {length for shape in shapes for length in shape if length > 1}
        short = {length: i for i, length in enumerate(sorted(lengths), 2)} | {0: 0, 1: 1}
        shapes = [tuple(short[length] for length in shape) for shape in shapes]
    tensors = map(_stand_in, operands, shapes, strides)
    given, named = filled(args, kwargs, tensors, scalars, lambda template: torch.device("cpu"))
    operator(*given, **named)


def _reach(known: Metadata) -> int:
    """How many elements the memory has that a tensor shows."""
    return 1 + sum((n - 1) * stride for n, stride in zip(known.shape, known.stride, strict=True) if n)


def _stand_in(known: Metadata, shape: Sequence[int], stride: Sequence[int] | None) -> torch.Tensor:
    if stride is None:
        made = torch.ones(shape, dtype=known.dtype, device="cpu")
    else:
        made = torch.ones(_reach(known), dtype=known.dtype, device="cpu").as_strided(shape, stride)
    if known.lazy:
        torch._C._set_conj(made, known.conj)
        torch._C._set_neg(made, known.neg)
    return made
