"""Copies of tensors that are sent and received."""

from __future__ import annotations

import torch

from ...rpc import Agent

#: bytes of a tensor above which memory is lent to receivers on the same host
_MIN_LENT_BYTES = 256 << 10


def copy_to_send(x: torch.Tensor, worker: Agent) -> torch.Tensor:
    """Copy a tensor of the CPU, in the layout of ``x.clone()``, to be sent once.

    A large copy is in memory that the worker lends to a receiver on the same host, so sending it takes no
    further copy; afterwards it may change, because it belongs to the receiver.
    """
    if x.nbytes <= _MIN_LENT_BYTES:
        return x.clone()
    memory = torch.frombuffer(worker.endpoint.post.buffer(x.nbytes), dtype=torch.uint8)
    layout = torch.empty_like(x, device="meta")
    return memory.view(x.dtype).as_strided(layout.shape, layout.stride()).copy_(x)


def owned(x: torch.Tensor) -> torch.Tensor:
    """Return a received tensor whose storage contains its elements only.

    A large one stays in the memory in which it arrived, which torch cannot resize; a small one is copied.
    """
    whole = x.storage_offset() == 0 and x.untyped_storage().nbytes() == x.nbytes
    return x if whole and x.nbytes > _MIN_LENT_BYTES else x.clone()
