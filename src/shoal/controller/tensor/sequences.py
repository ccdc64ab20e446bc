"""Packing of padded sequences: the master has the lengths, and slices and concatenates on the node."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import torch

from ...errors import DeviceMismatch
from ..protocol.operators import special
from .tensor import RemoteTensor


def _stretches(batch_sizes: torch.Tensor) -> Iterator[tuple[int, int, int]]:
    """Yield (begin, end, size) for runs of steps with equal batch size."""
    begin = 0
    for size, steps in groupby(batch_sizes.tolist()):
        end = begin + len(list(steps))
        yield begin, end, size
        begin = end


@special("aten::_pack_padded_sequence")
def _pack(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    x, lengths, batch_first = args
    if type(x) is not RemoteTensor or type(lengths) is RemoteTensor:
        raise DeviceMismatch(
            "the lengths of sequences must be on the master and the sequences on the node: pack with "
            "lengths.cpu()"
        )
    x = x.transpose(0, 1) if batch_first else x
    # torch validates the lengths.
    _, batch_sizes = func(torch.empty(*x.shape[:2], 1, device="cpu"), lengths, False)
    parts = [x[begin:end, :size].flatten(0, 1) for begin, end, size in _stretches(batch_sizes)]
    return torch.cat(parts), batch_sizes


@special("aten::_pack_padded_sequence_backward")
def _pack_backward(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    gradient, shape, batch_sizes, batch_first = args
    shape = [shape[1], shape[0], *shape[2:]] if batch_first else list(shape)
    made = torch.zeros(shape, dtype=gradient.dtype, device=gradient.device)
    at = 0
    for begin, end, size in _stretches(batch_sizes):
        part = gradient[at : at + (end - begin) * size]
        made[begin:end, :size].copy_(part.unflatten(0, (end - begin, size)))
        at += len(part)
    return made.transpose(0, 1) if batch_first else made
