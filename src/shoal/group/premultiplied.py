"""PREMUL_SUM: each rank multiplies what it gives by a factor of its own, and the backend adds the products.

The products are rounded to the dtype of the tensors, as NCCL rounds them (``ncclRedOpCreatePreMulSum``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch

from ..backend.base import DataChannel
from ..errors import OutOfSharedMemory

#: bytes of a product from which on the channel's memory is worth asking for
_LARGE = 2**20


def multiply(x: torch.Tensor, factor: float) -> None:
    """Multiply a plain tensor by ``factor``, in place."""
    # Inference mode allows writing to leaves that require gradients and to inference tensors alike.
    with torch.inference_mode():
        _parts(x).mul_(factor)


def products(xs: Sequence[torch.Tensor], factor: float, channel: DataChannel) -> list[torch.Tensor]:
    """Plain tensors times ``factor``, in memory of their own, which may be that of ``channel``."""
    made = [_like(x, channel) for x in xs]
    with torch.no_grad():
        for x, product in zip(xs, made, strict=True):
            torch.mul(_parts(x), factor, out=_parts(product))
    return made


def _like(x: torch.Tensor, channel: DataChannel) -> torch.Tensor:
    size = x.numel() * x.element_size()
    if size >= _LARGE and x.is_cpu:
        # The channel need not copy from its own memory, nor the system clear it for each call.
        with contextlib.suppress(OutOfSharedMemory):
            return channel.empty(size, x.device).view(x.dtype).view(x.shape)
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _parts(x: torch.Tensor) -> torch.Tensor:
    """The real numbers of ``x``: a factor does not turn an infinite part of a complex number into NaN."""
    return torch.view_as_real(x) if x.is_complex() else x
