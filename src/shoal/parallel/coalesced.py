"""Coalesced broadcasts: tensors of any dtype and shape, sent together from one rank in one message."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from ..group import ProcessGroup
from .core import ALIGNMENT

#: Tensors are sent together up to this many bytes; a larger one goes by itself.
MESSAGE_BYTES = 25 * 2**20


class CoalescedBroadcast:
    """Registered memory in which tensors lie one after another, as bytes.

    Args:
        like: what will be sent, on one device; only shapes and dtypes matter, and must be equal on all ranks.
    """

    def __init__(self, group: ProcessGroup, like: Sequence[torch.Tensor]) -> None:
        self._group = group
        offsets = []
        end = 0
        for tensor in like:
            offsets.append(end)
            end += packed_size(tensor)
        self._memory = group.empty(end, dtype=torch.uint8, device=like[0].device if like else None)
        self._memory.zero_()  # the gaps are sent too
        self._views = [
            self._memory[offset : offset + tensor.numel() * tensor.element_size()]
            .view(tensor.dtype)
            .view(tensor.shape)
            for tensor, offset in zip(like, offsets, strict=True)
        ]

    def run(self, tensors: Sequence[torch.Tensor], root: int = 0) -> None:
        """Overwrite ``tensors`` with those of rank ``root``.  Collective; returns when it is done, or on a
        device when the current streams wait for it."""
        with torch.no_grad():
            if self._group.rank == root:
                torch._foreach_copy_(self._views, list(tensors))
            self._group.broadcast(self._memory, root=root).wait(blocking=False)
            if self._group.rank != root:
                torch._foreach_copy_(list(tensors), self._views)


def packed_size(tensor: torch.Tensor) -> int:
    """Bytes that ``tensor`` takes in a coalesced message."""
    return -(-tensor.numel() * tensor.element_size() // ALIGNMENT) * ALIGNMENT


def by_device(tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """The tensors of each device, in their order: what may lie in one message."""
    devices: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in tensors:
        devices.setdefault(tensor.device, []).append(tensor)
    return list(devices.values())


def broadcast_coalesced(group: ProcessGroup, tensors: Sequence[torch.Tensor], root: int = 0) -> None:
    """Overwrite ``tensors`` with those of rank ``root``, in few messages.  Collective."""
    for some in _portions(tensors):
        CoalescedBroadcast(group, some).run(some, root)


def _portions(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    for together in by_device(tensors):
        portion: list[torch.Tensor] = []
        size = 0
        for tensor in together:
            if portion and size + packed_size(tensor) > MESSAGE_BYTES:
                yield portion
                portion, size = [], 0
            portion.append(tensor)
            size += packed_size(tensor)
        if portion:
            yield portion
