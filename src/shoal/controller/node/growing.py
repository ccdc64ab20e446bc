"""Memory of tensors that an operator enlarges."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

#: operators that enlarge tensors, in addition to those with ``out=``
GROWING = frozenset({"aten::resize_", "aten::resize_as_"})


def let_grow(tensor: torch.Tensor, others: Iterable[Any]) -> None:
    """Move a tensor to memory that torch can enlarge; torch cannot enlarge memory of messages or arrays.

    The tensors in `others` that share its memory are moved too and still share it.
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
