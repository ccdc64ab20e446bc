"""Copies of tensors in memory that a worker uses again."""

from __future__ import annotations

import torch

from ...rpc.peer import LocalWorker

#: bytes of a tensor above which memory is lent to receivers on the same host, and used again for copies
MIN_LENT_BYTES = 256 << 10


def copied(x: torch.Tensor, worker: LocalWorker) -> torch.Tensor:
    """Copy a tensor of the CPU, in the layout of ``x.clone()``.

    A large copy is in memory that the worker uses again, because the system clears fresh pages, which takes
    longer than copying. torch cannot resize such a tensor.
    """
    if x.nbytes <= MIN_LENT_BYTES:
        return x.clone()
    memory = torch.frombuffer(worker.endpoint.post.buffer(x.nbytes), dtype=torch.uint8)
    layout = torch.empty_like(x, device="meta")
    return memory.view(x.dtype).as_strided(layout.shape, layout.stride()).copy_(x)
