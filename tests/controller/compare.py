"""What tests use to say that something on a node is what it is here, to the last bit."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from shoal.controller import Master, RemoteTensor


def moved(value: Any, device: str) -> Any:
    """A tree of tensors on a device, each a copy of its own that autograd has not seen."""

    def move(x: Any) -> Any:
        if isinstance(x, PackedSequence):
            return x.to(device)
        if not isinstance(x, torch.Tensor):
            return x
        return x.detach().clone().to(device).requires_grad_(x.requires_grad)

    return tree_map(move, value, is_leaf=lambda x: isinstance(x, PackedSequence))


def tensors(value: Any) -> list[torch.Tensor]:
    """The tensors of a tree."""
    return [each for each in tree_leaves(value) if isinstance(each, torch.Tensor)]


def differences(master: Master, here: Any, there: Any) -> list[str]:
    """Where two trees differ: in their form, in what their tensors say of themselves, in elements."""
    ours, form = tree_flatten(here)
    theirs, other = tree_flatten(there)
    if form != other:
        return [f"form {other}, not {form}"]
    copies = iter(master.fetch([each.detach() for each in theirs if isinstance(each, torch.Tensor)]).wait())
    found = []
    for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)):
            if type(a) is not type(b) or a != b:
                found.append(f"value {i}: {b}, not {a}")
            continue
        for what in ("shape", "dtype", "requires_grad", "is_leaf"):
            if getattr(a, what) != getattr(b, what):
                found.append(f"{what} of tensor {i}: {getattr(b, what)}, not {getattr(a, what)}")
        if steps(a) != steps(b):
            found.append(f"stride of tensor {i}: {b.stride()}, not {a.stride()}")
        if not same(a.detach(), next(copies)):
            found.append(f"elements of tensor {i}")
    return found


def steps(x: torch.Tensor) -> list[int]:
    """The strides of a tensor that are of account: not those along one element, or none."""
    return [step for length, step in zip(x.shape, x.stride(), strict=True) if length > 1] if x.numel() else []


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors of the CPU have the same elements; NaN is NaN."""
    return (a.shape, a.dtype) == (b.shape, b.dtype) and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)


def is_remote(value: Any) -> bool:
    """Whether all tensors of a tree are on nodes, and there are some."""
    found = tensors(value)
    return bool(found) and all(type(each) is RemoteTensor for each in found)
