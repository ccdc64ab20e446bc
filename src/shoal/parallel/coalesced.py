"""Coalesced broadcasts: tensors of any dtype and shape, sent together from one rank in one message.

Not every tensor can be overwritten with bytes (a sparse one cannot, for example).  :func:`obstacle` says why;
callers ask it, and let all ranks agree on the answer, before a rank sends anything.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ..group import ProcessGroup
from .core import ALIGNMENT

#: Tensors are sent together up to this many bytes; a larger one goes by itself.
MESSAGE_BYTES = 25 * 2**20


class CoalescedBroadcast:
    """Registered memory in which tensors lie one after another, as bytes.

    Args:
        like: what will be sent, on one device; only shapes and dtypes matter, and must be equal on all ranks.
            None of them has an :func:`obstacle`.
    """

    def __init__(self, group: ProcessGroup, like: Sequence[torch.Tensor]) -> None:
        self._group = group
        self._all_plain = all(map(_is_plain, like))
        like = self._written(like)
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
        tensors = self._written(tensors)
        with torch.no_grad():
            if self._group.rank == root:
                torch._foreach_copy_(self._views, list(tensors))
            self._group.broadcast(self._memory, root=root).wait(blocking=False)
            if self._group.rank != root:
                torch._foreach_copy_(list(tensors), self._views)

    def _written(self, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        return tensors if self._all_plain else [elements(tensor) for tensor in tensors]


def obstacle(tensor: torch.Tensor) -> str | None:
    """The reason why ``tensor`` cannot be overwritten with the bytes of another rank's; None: it can.

    The words are the same on all ranks that have the same kind of tensor.
    """
    if is_lazy(tensor):
        return "it has no shape yet: run a forward pass through the module before"
    if tensor.is_nested:
        return "it is a nested tensor"
    if tensor.layout is not torch.strided:
        return f"its layout is {tensor.layout}"
    if tensor.is_quantized:
        return "it is quantised"
    if tensor.is_meta:
        return "it is on the meta device, which has no values: call module.to_empty(device=...) before"
    if type(tensor) in _PLAIN_CLASSES:
        return None
    try:
        with torch.no_grad():
            scratch = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
            torch._foreach_copy_([scratch], [elements(tensor)])
            torch._foreach_copy_([elements(tensor)], [scratch])
    except Exception as error:
        return f"it is a {type(tensor).__name__} that cannot be copied to: {str(error).splitlines()[0]}"
    return None


def elements(tensor: torch.Tensor) -> torch.Tensor:
    """A view of ``tensor`` that has each of its elements once, as it is in memory, and can be written to.

    Expanded tensors have elements several times and cannot be written to, nor can inference tensors.
    """
    tensor = tensor.detach()
    for dim, (length, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and length > 1:
            tensor = tensor.narrow(dim, 0, 1)
    if tensor.is_neg():
        tensor = torch._neg_view(tensor)
    return tensor.conj() if tensor.is_conj() else tensor


#: Classes of tensors that can be copied from and to.
_PLAIN_CLASSES = (torch.Tensor, nn.Parameter, nn.Buffer)


def _is_plain(tensor: torch.Tensor) -> bool:
    unusual = tensor.is_conj() or tensor.is_neg() or tensor.is_inference() or 0 in tensor.stride()
    return not unusual


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
