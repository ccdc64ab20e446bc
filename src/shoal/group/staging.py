"""Contiguous stand-ins for tensors whose memory a backend cannot use as it is.

A backend reads and writes plain memory.  A transposed view, a column of a matrix, a lazily
conjugated or negated tensor: each is replaced by a contiguous copy before the operation, and what was
written is copied back before anybody sees the future complete.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .validation.overlap import share_memory


def is_plain(x: torch.Tensor) -> bool:
    """Whether the memory of ``x`` holds its elements in order, as they are."""
    return x.is_contiguous() and not x.is_neg() and not (x.is_complex() and x.is_conj())


def readable(x: torch.Tensor) -> torch.Tensor:
    """``x``, or a plain copy of it."""
    if is_plain(x):
        return x
    with torch.no_grad():
        return x.resolve_conj().resolve_neg().contiguous()


def readable_beside(xs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Plain versions of ``xs`` that share no memory with ``outputs``.

    Gathering into a buffer that already holds one's own part, or exchanging a tensor with itself, is
    written by ranks at different speeds while others still read: the inputs that overlap are copied.
    """
    plain = [readable(x) for x in xs]
    if not share_memory(plain, outputs):
        return plain
    with torch.no_grad():
        return [x.clone() if share_memory([x], outputs) else x for x in plain]


class Staging:
    """The stand-ins for the outputs of one operation."""

    __slots__ = ("_copies",)

    def __init__(self) -> None:
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []

    def writable(self, x: torch.Tensor, *, keep: bool = False) -> torch.Tensor:
        """``x``, or a contiguous stand-in that :meth:`copy_back` writes to ``x``.

        With ``keep`` the stand-in starts with the values of ``x``, for an operation in place.
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
        # Some thread runs this that knows nothing of the caller's modes: inference mode is what allows
        # writing to leaves that require gradients and to inference tensors alike.
        with torch.inference_mode():
            for x, stand_in in self._copies:
                x.copy_(stand_in)
        self._copies.clear()
