"""Buckets: the memory that gradients lie in and are reduced in.

A bucket is one flat tensor in the group's registered memory, so that its all-reduce needs no staging
copy; the gradients of its members are views of it.  Which parameter lies where is decided by the native
core (``cpp/reducer/assignment.h``), which knows sizes and kinds but no tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .. import _core
from ..group import ProcessGroup

#: A gradient's memory starts at a multiple of this many bytes.
ALIGNMENT: int = _core.BUCKET_ALIGNMENT

#: Which gradients of a pass have arrived, and which buckets may be sent (``cpp/reducer/readiness.h``).
Readiness = _core.Readiness

#: The first bucket is small, so that communication starts soon after backward has.
FIRST_BUCKET_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class Bucket:
    """Gradients that are reduced together.

    Attributes:
        members: indices of the parameters, in the order in which their gradients are expected.
        flat: all of the memory, one-dimensional; the gaps between gradients hold zeros.
        views: for each member the part of ``flat`` that is its gradient, shaped and strided like it.
    """

    members: tuple[int, ...]
    flat: torch.Tensor
    views: tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True)
class BucketSet:
    """The buckets of one model, in the order in which they are reduced.

    Attributes:
        buckets: together they hold every parameter once.
        vote: one element at the end of the last bucket that is no gradient.  A rank whose pass is incomplete
            writes 1 there, so that after the last all-reduce every rank knows, without another message.
        views: the gradient's memory of every parameter, by its index.
    """

    buckets: tuple[Bucket, ...]
    vote: torch.Tensor
    views: tuple[torch.Tensor, ...]

    def members(self) -> list[tuple[int, ...]]:
        """The members of each bucket."""
        return [bucket.members for bucket in self.buckets]


def build_buckets(
    group: ProcessGroup, parameters: Sequence[torch.Tensor], order: Sequence[int], cap: int
) -> BucketSet:
    """Distribute ``parameters`` over buckets and allocate them, filled with zeros.

    Args:
        order: the indices of ``parameters`` in the order in which their gradients are expected.
        cap: the largest bucket in bytes; a larger parameter has a bucket of its own.

    Raises:
        OutOfSharedMemory: the buckets do not fit.
    """
    kinds: dict[tuple[torch.dtype, torch.device], int] = {}
    assigned = _core.assign_buckets(
        [parameter.numel() * parameter.element_size() for parameter in parameters],
        [kinds.setdefault((parameter.dtype, parameter.device), len(kinds)) for parameter in parameters],
        list(order),
        min(FIRST_BUCKET_BYTES, cap),
        cap,
    )
    buckets: list[Bucket] = []
    views: dict[int, torch.Tensor] = {}
    for number, (members, offsets, nbytes) in enumerate(assigned):
        like = parameters[members[0]]
        room_for_vote = ALIGNMENT if number == len(assigned) - 1 else 0
        flat = group.empty((nbytes + room_for_vote) // like.element_size(), dtype=like.dtype)
        flat.zero_()
        own = tuple(
            _view(flat, parameters[index], offset) for index, offset in zip(members, offsets, strict=True)
        )
        buckets.append(Bucket(tuple(members), flat, own))
        views.update(zip(members, own, strict=True))
    vote = buckets[-1].flat[-1]
    return BucketSet(tuple(buckets), vote, tuple(views[index] for index in range(len(parameters))))


def _view(flat: torch.Tensor, parameter: torch.Tensor, offset: int) -> torch.Tensor:
    # With the parameter's own strides (channels_last, say) autograd accumulates into the view as it is.
    # A layout with holes has no counterpart in a bucket; the strides of a dense copy then serve.
    strides = torch.empty_like(parameter, device="meta").stride()
    return flat.as_strided(parameter.shape, strides, flat.storage_offset() + offset // flat.element_size())
