"""Detection of errors in arguments: torch's own kernel is run with small tensors of the same dtypes.

Fake tensors accept some arguments that kernels refuse, such as the difference of two bools, or an ``out``
that cannot hold the result. Without this check the error would come from the node, at a later line.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..protocol.commands import Template, filled
from ..protocol.metadata import Metadata

#: pointwise operators that refuse some values
_CHOOSY = frozenset(["mvlgamma"])
#: other operators whose success does not depend on values
_OTHERS = frozenset([
    "mm", "mv", "bmm", "dot", "vdot", "addmm", "addmv", "addr", "baddbmm", "copy", "fill", "masked_fill",
    "_softmax", "_log_softmax",
])  # fmt: skip
#: such operators that take lengths
_SIZED = frozenset(["view"])
#: maximum number of elements of all operands' memory for a run with the original shapes and strides
_FEW = 4096


def rehearse(
    operator: Any,
    args: Sequence[Template],
    kwargs: dict[str, Template],
    operands: Sequence[Metadata],
    scalars: Sequence[float],
    exactly: bool = False,
) -> None:
    """Run a call on the master, if its success depends neither on values nor on random numbers.

    Large shapes are reduced so that equal lengths stay equal.

    Args:
        exactly: do not run if shapes had to be reduced, which would show in the error text.

    Raises:
        Exception: any error that torch raises for these arguments.
    """
    tags, name = operator.tags, operator.overloadpacket.__name__.rstrip("_")
    if operator.namespace != "aten":
        return  # custom operators run on the node only
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
    """Number of elements that the memory of this tensor spans."""
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
