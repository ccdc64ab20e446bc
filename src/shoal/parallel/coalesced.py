"""Coalesced broadcasts: tensors of any dtype and shape sent from one rank in one message.

Not every tensor can be overwritten with bytes (a sparse one cannot, for example).  Callers check this with
:func:`broadcast_obstacle`, and compare the result on all ranks, before a rank sends anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from operator import attrgetter

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ..group import ProcessGroup
from .core import ALIGNMENT

#: Maximum size of a message with several tensors; a larger tensor is sent in a message of its own.
MESSAGE_BYTES = 25 * 2**20


class CoalescedBroadcast:
    """A broadcast of several tensors through one buffer in registered memory.

    Args:
        like: tensors on one device, without a :func:`broadcast_obstacle`, with equal shapes and dtypes on
            all ranks.
    """

    def __init__(self, group: ProcessGroup, like: Sequence[torch.Tensor]) -> None:
        self._group = group
        self._all_plain = all(map(_is_plain, like))
        like = self._written(like)
        *offsets, end = accumulate(map(packed_size, like), initial=0)
        self._memory = group.empty(end, dtype=torch.uint8, device=like[0].device if like else None)
        self._memory.zero_()  # the gaps are sent too
        self._views = [
            self._memory[offset : offset + tensor.numel() * tensor.element_size()]
            .view(tensor.dtype)
            .view(tensor.shape)
            for tensor, offset in zip(like, offsets, strict=True)
        ]

    def run(self, tensors: Sequence[torch.Tensor], root: int = 0) -> None:
        """Overwrite ``tensors`` with those of rank ``root``; on a device, in stream order.  Collective."""
        tensors = self._written(tensors)
        with torch.no_grad():
            if self._group.rank == root:
                torch._foreach_copy_(self._views, list(tensors))
            self._group.broadcast(self._memory, root=root).wait(blocking=False)
            if self._group.rank != root:
                torch._foreach_copy_(list(tensors), self._views)

    def _written(self, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        return tensors if self._all_plain else [writable_elements(tensor) for tensor in tensors]


def broadcast_obstacle(tensor: torch.Tensor) -> str | None:
    """Return why ``tensor`` cannot be overwritten with bytes of another rank; None: it can.

    The text is the same on all ranks that have the same kind of tensor.
    """
    if is_lazy(tensor):
        return "it has no shape yet: run a forward pass through the module first"
    if tensor.is_nested:
        return "it is a nested tensor"
    if tensor.layout is not torch.strided:
        return f"its layout is {tensor.layout}"
    if tensor.is_quantized:
        return "it is quantised"
    if tensor.is_meta:
        return "it is on the meta device, which has no values: call module.to_empty(device=...) first"
    if type(tensor) in _PLAIN_CLASSES:
        return None
    try:
        with torch.no_grad():
            scratch = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
            torch._foreach_copy_([scratch], [writable_elements(tensor)])
            torch._foreach_copy_([writable_elements(tensor)], [scratch])
    except Exception as error:
        return f"it is a {type(tensor).__name__} that cannot be copied to: {str(error).splitlines()[0]}"
    return None


def writable_elements(tensor: torch.Tensor) -> torch.Tensor:
    """Return a writable view of ``tensor`` that has each element in memory once, without lazy conjugation.

    Expanded tensors have elements several times and are not writable; neither are inference tensors.
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
    return not (tensor.is_conj() or tensor.is_neg() or tensor.is_inference() or 0 in tensor.stride())


def packed_size(tensor: torch.Tensor) -> int:
    """The size of ``tensor`` in a coalesced message, in bytes."""
    return -(-tensor.numel() * tensor.element_size() // ALIGNMENT) * ALIGNMENT


def dense_view(memory: torch.Tensor, offset: int, like: torch.Tensor) -> torch.Tensor:
    """Return a view of ``memory`` at ``offset`` bytes with the shape of ``like``.

    Its strides are those of ``like`` (channels_last, for example), or those of a dense copy if it has holes.
    """
    strides = torch.empty_like(like, device="meta").stride()
    return memory.as_strided(like.shape, strides, memory.storage_offset() + offset // memory.element_size())


def views_in(memory: torch.Tensor, old: torch.Tensor, views: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return views of ``memory`` at the positions, and with the strides, that ``views`` have in ``old``."""
    shift = memory.storage_offset() - old.storage_offset()
    return [memory.as_strided(x.shape, x.stride(), x.storage_offset() + shift) for x in views]


def broadcast_coalesced(group: ProcessGroup, tensors: Sequence[torch.Tensor], root: int = 0) -> None:
    """Overwrite ``tensors`` with those of rank ``root``, in few messages.  Collective."""
    for some in split_messages(tensors, attrgetter("device")):
        CoalescedBroadcast(group, some).run(some, root)


def split_messages(
    tensors: Iterable[torch.Tensor], kind: Callable[[torch.Tensor], object]
) -> Iterator[list[torch.Tensor]]:
    """Yield the tensors of each message, which have one ``kind``; in the same order on all ranks."""
    messages: dict[object, list[torch.Tensor]] = {}
    sizes: dict[object, int] = {}
    for tensor in tensors:
        key, size = kind(tensor), packed_size(tensor)
        if key in messages and sizes[key] + size > MESSAGE_BYTES:
            yield messages.pop(key)
            sizes[key] = 0
        messages.setdefault(key, []).append(tensor)
        sizes[key] = sizes.get(key, 0) + size
    yield from messages.values()
