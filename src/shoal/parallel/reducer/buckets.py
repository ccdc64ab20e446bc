"""Buckets, the memory in which gradients are reduced.

A bucket is one flat tensor in the group's registered memory, so its all-reduce needs no staging copy.  The
gradients of its members are views of it.  ``cpp/ddp/assignment.h`` assigns parameters to buckets.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch.utils.dlpack import from_dlpack

from ...errors import OutOfSharedMemory
from ...group import ProcessGroup
from ..coalesced import dense_view, views_in
from ..core import TAIL_ELEMENTS, assign_buckets

#: Maximum size of the first bucket, which is small so that communication starts early.
FIRST_BUCKET_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class Bucket:
    """Gradients that are reduced together."""

    members: tuple[int, ...]  # indices of the parameters, in the order in which their gradients are expected
    flat: torch.Tensor  # the whole memory, one-dimensional; the gaps between gradients are zero
    body: torch.Tensor  # ``flat`` without the tail
    #: for each member the view of ``flat`` for its gradient, with its shape and strides
    views: tuple[torch.Tensor, ...]
    #: the only member has sparse gradients, which are stored elsewhere; all tensors here are empty
    sparse: bool = False


@dataclass(frozen=True, slots=True)
class BucketSet:
    """The buckets of one model, in the order in which they are reduced."""

    buckets: tuple[Bucket, ...]  # the buckets; every parameter is in one
    #: the last elements of the last bucket that is not sparse, for the outcome; empty if all are sparse
    tail: torch.Tensor
    views: tuple[torch.Tensor, ...]  # the memory of each parameter's gradient, by its index

    def members(self) -> list[tuple[int, ...]]:
        """Return the members of each bucket."""
        return [bucket.members for bucket in self.buckets]

    def replaced(self, number: int, bucket: Bucket) -> BucketSet:
        """Return these buckets, with bucket ``number`` replaced by ``bucket``, which has the same members."""
        buckets = (*self.buckets[:number], bucket, *self.buckets[number + 1 :])
        places = dict(zip(bucket.members, bucket.views, strict=True))
        views = tuple(places.get(index, view) for index, view in enumerate(self.views))
        has_tail = len(bucket.flat) > len(bucket.body)
        return BucketSet(buckets, bucket.flat[len(bucket.body) :] if has_tail else self.tail, views)


def build_buckets(
    group: ProcessGroup,
    parameters: Sequence[torch.Tensor],
    order: Sequence[int],
    max_bytes: int,
    *,
    sparse: Collection[int] = (),
    separate: Collection[int] = (),
    reduce_dtype: torch.dtype | None = None,
) -> BucketSet:
    """Assign ``parameters`` to buckets and allocate these, filled with zeros.

    Args:
        order: the indices of ``parameters`` in the order in which their gradients are expected.
        max_bytes: maximum size of a bucket in bytes; a larger parameter has its own bucket.
        sparse: indices of the parameters with sparse gradients.
        separate: indices of parameters that share no bucket with the others.
        reduce_dtype: the dtype of real gradients in their bucket; None: that of their parameters.

    Raises OutOfSharedMemory if the buckets do not fit into shared memory.
    """
    kinds: dict[object, int] = {}
    dtypes = [reduced_dtype(parameter, reduce_dtype) for parameter in parameters]

    def kind(index: int) -> int:
        parameter = parameters[index]
        which = index if index in sparse else (dtypes[index], parameter.device, index in separate)
        return kinds.setdefault(which, len(kinds))

    assigned = assign_buckets(
        [
            0 if index in sparse else parameter.numel() * dtypes[index].itemsize
            for index, parameter in enumerate(parameters)
        ],
        [kind(index) for index in range(len(parameters))],
        list(order),
        min(FIRST_BUCKET_BYTES, max_bytes),
        max_bytes,
    )
    dense = [number for number, (members, _, _) in enumerate(assigned) if members[0] not in sparse]
    buckets: list[Bucket] = []
    views: dict[int, torch.Tensor] = {}
    tail = torch.empty(0, device="cpu")
    for number, (members, offsets, nbytes) in enumerate(assigned):
        dtype = dtypes[members[0]]
        if members[0] in sparse:
            nothing = torch.empty(0, dtype=dtype, device="cpu")
            bucket = Bucket(tuple(members), nothing, nothing, (nothing,), sparse=True)
        else:
            last = number == dense[-1]
            count = nbytes // dtype.itemsize
            device = parameters[members[0]].device
            flat = group.empty(count + (TAIL_ELEMENTS if last else 0), dtype=dtype, device=device)
            flat.zero_()
            # With the parameter's strides autograd accumulates into the view directly.
            places = zip(members, offsets, strict=True)
            own = tuple(dense_view(flat, offset, parameters[index]) for index, offset in places)
            bucket = Bucket(tuple(members), flat, flat[:count], own)
            if last:
                tail = flat[count:]
        buckets.append(bucket)
        views.update(zip(members, bucket.views, strict=True))
    return BucketSet(tuple(buckets), tail, tuple(views[index] for index in range(len(parameters))))


def alias_bucket(bucket: Bucket) -> Bucket:
    """Return ``bucket`` with its memory in another torch storage, for communication hooks.

    References from hooks are then not counted as references to ``bucket``.  On other devices than the CPU,
    where references are not counted, return ``bucket`` itself.
    """
    if bucket.flat.device.type != "cpu":
        return bucket
    flat = from_dlpack(bucket.flat)
    return _bucket_in(flat, bucket)


def renew_bucket(group: ProcessGroup, bucket: Bucket) -> Bucket:
    """Return a bucket like ``bucket`` in new memory, filled with zeros.

    A single rank may need this, and must not fail alone: without enough registered memory it uses ordinary
    memory, from which an all-reduce copies.
    """
    old = bucket.flat
    try:
        flat = group.empty(len(old), dtype=old.dtype, device=old.device)
    except OutOfSharedMemory:
        flat = torch.empty_like(old)
    return _bucket_in(flat.zero_(), bucket)


def _bucket_in(flat: torch.Tensor, bucket: Bucket) -> Bucket:
    """Return a bucket in ``flat`` with the layout of ``bucket``."""
    views = tuple(views_in(flat, bucket.flat, bucket.views))
    return Bucket(bucket.members, flat, flat[: len(bucket.body)], views)


def reduced_dtype(parameter: torch.Tensor, reduce_dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype in which the gradient of ``parameter`` is reduced; complex ones are not cast."""
    return reduce_dtype if reduce_dtype and parameter.is_floating_point() else parameter.dtype
