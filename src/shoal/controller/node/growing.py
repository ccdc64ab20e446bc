"""The memory of a node's tensors where an operator makes one of them larger."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

#: operators that do so, beside those with ``out=``
GROWING = frozenset({"aten::resize_", "aten::resize_as_"})


def let_grow(tensor: torch.Tensor, others: Iterable[Any]) -> None:
    """Move a tensor to memory that torch can make larger, if it is not there.

    Torch cannot make memory larger that came from elsewhere: that of a message, or of an array.

    Args:
        others: among which are all tensors that share the memory; they still share it afterwards.
    """
    storage = tensor.untyped_storage()
    if storage.resizable():
        return
    moved = storage.clone()  # type: ignore[no-untyped-call]
    sharing = [
        each
        for each in others
        if isinstance(each, torch.Tensor)
        and each is not tensor
        and each.untyped_storage()._cdata == storage._cdata
    ]
    for each in {id(each): each for each in (tensor, *sharing)}.values():
        each.set_(moved, each.storage_offset(), each.shape, each.stride())
