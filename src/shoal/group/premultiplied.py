"""PREMUL_SUM: each rank multiplies its input by its own factor, and the backend adds the products.

Products are rounded to the dtype of the tensors, as in NCCL (``ncclRedOpCreatePreMulSum``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch

from ..backend.base import DataChannel
from ..errors import OutOfSharedMemory

#: minimum size in bytes of a product that is allocated by the channel
_LARGE = 2**20


def multiply(x: torch.Tensor, factor: float) -> None:
    """Multiply a plain tensor by ``factor``, in place."""
    # Inference mode allows writing to leaves that require gradients, and to inference tensors.
    with torch.inference_mode():
        _parts(x).mul_(factor)


def products(xs: Sequence[torch.Tensor], factor: float, channel: DataChannel) -> list[torch.Tensor]:
    """Return plain tensors times ``factor``, in new memory, possibly allocated by ``channel``."""
    made = [_like(x, channel) for x in xs]
    with torch.no_grad():
        for x, product in zip(xs, made, strict=True):
            torch.mul(_parts(x), factor, out=_parts(product))
    return made


def _like(x: torch.Tensor, channel: DataChannel) -> torch.Tensor:
    size = x.numel() * x.element_size()
    if size >= _LARGE and x.is_cpu:
        # The channel does not copy from its own memory, and reuses it without clearing.
        with contextlib.suppress(OutOfSharedMemory):
            return channel.empty(size, x.device).view(x.dtype).view(x.shape)
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _parts(x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` as real numbers: a complex product would turn infinite parts into NaN."""
    return torch.view_as_real(x) if x.is_complex() else x
