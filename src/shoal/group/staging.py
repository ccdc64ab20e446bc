"""Contiguous copies of tensors whose memory a backend cannot use directly.

A backend reads and writes plain memory.  Transposed views, columns of matrices, and lazily conjugated or
negated tensors are replaced by contiguous copies.  Results are copied back before the future completes.

For PREMUL_SUM each rank multiplies its input by its own factor, and the backend adds the products.  They are
rounded to the dtype of the tensors, as in NCCL (``ncclRedOpCreatePreMulSum``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch

from ..backend.base import DataChannel
from ..errors import OutOfSharedMemory
from .validation.overlap import share_memory

#: minimum size in bytes of a product that is allocated by the channel
_MIN_CHANNEL_BYTES = 2**20


def is_plain(x: torch.Tensor) -> bool:
    """Whether the memory of ``x`` holds the values of its elements in order."""
    return x.is_contiguous() and not x.is_neg() and not (x.is_complex() and x.is_conj())


def readable(x: torch.Tensor) -> torch.Tensor:
    """Return ``x``, or a plain copy of it."""
    if is_plain(x):
        return x
    with torch.no_grad():
        return x.resolve_conj().resolve_neg().contiguous()


def readable_beside(xs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return plain versions of ``xs`` that share no memory with ``outputs``.

    Inputs that overlap an output are copied, as the output is written while other ranks still read the input.
    """
    plain = [readable(x) for x in xs]
    if not share_memory(plain, outputs):
        return plain
    with torch.no_grad():
        return [x.clone() if share_memory([x], outputs) else x for x in plain]


class Staging:
    """The contiguous copies of the outputs of one operation."""

    __slots__ = ("_copies",)

    def __init__(self) -> None:
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []

    def writable(self, x: torch.Tensor, *, keep: bool = False) -> torch.Tensor:
        """Return ``x``, or a contiguous copy that :meth:`copy_back` writes to ``x``.

        With ``keep`` the copy has the values of ``x``, for an operation in place; else it is uninitialised.
        """
        if is_plain(x):
            return x
        stand_in = readable(x) if keep else torch.empty(x.shape, dtype=x.dtype, device=x.device)
        self._copies.append((x, stand_in))
        return stand_in

    @property
    def needed(self) -> bool:
        """Whether there is anything to copy back."""
        return bool(self._copies)

    def copy_back(self) -> None:
        # This thread may not have the caller's modes.  Inference mode allows writing to leaves that require
        # gradients, and to inference tensors.
        with torch.inference_mode():
            for x, stand_in in self._copies:
                x.copy_(stand_in)
        self._copies.clear()


def multiply(x: torch.Tensor, factor: float) -> None:
    """Multiply a plain tensor by ``factor``, in place."""
    # Inference mode allows writing to leaves that require gradients, and to inference tensors.
    with torch.inference_mode():
        _as_real(x).mul_(factor)


def products(xs: Sequence[torch.Tensor], factor: float, channel: DataChannel) -> list[torch.Tensor]:
    """Return plain tensors times ``factor``, in new memory, possibly allocated by ``channel``."""
    made = [_like(x, channel) for x in xs]
    with torch.no_grad():
        for x, product in zip(xs, made, strict=True):
            torch.mul(_as_real(x), factor, out=_as_real(product))
    return made


def _like(x: torch.Tensor, channel: DataChannel) -> torch.Tensor:
    size = x.numel() * x.element_size()
    if size >= _MIN_CHANNEL_BYTES and x.is_cpu:
        # The channel does not copy from its own memory, and reuses it without clearing.
        with contextlib.suppress(OutOfSharedMemory):
            return channel.empty(size, x.device).view(x.dtype).view(x.shape)
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _as_real(x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` as real numbers: a complex product would turn infinite parts into NaN."""
    return torch.view_as_real(x) if x.is_complex() else x
