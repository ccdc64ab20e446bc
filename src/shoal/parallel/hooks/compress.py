"""Gradients in half precision on the wire.

The gradients are cast into registered memory that stays with the bucket, reduced there, and cast back.
They are not divided before: an all-reduce of halves adds in float32 and rounds once, and ``avg`` divides
before that rounding.  So no sum overflows, which the usual division by the number of ranks beforehand is
to prevent, and small gradients do not lose the bits that it would cost them.
"""

from __future__ import annotations

from typing import Any

import torch

from ...future import Future
from ...group import ProcessGroup
from .bucket import CommHook, GradBucket
from .contract import after, checked_hook, group_of, name_of
from .plain import allreduce_hook


def fp16_compress_hook(state: ProcessGroup | None, bucket: GradBucket) -> Future[torch.Tensor]:
    """Average the gradients as float16: half the bytes of float32, 11 bits of precision.

    Gradients above 65504 become infinite and those below 6e-8 zero: use it with a loss scale, or
    :func:`bf16_compress_hook`.  Buckets of two-byte and of complex gradients are reduced as they are.

    Args:
        state: the ranks to average over; None means those of the model.
        bucket: the gradients.

    Returns:
        A future of the bucket's buffer.

    Raises:
        UsageError: ``state`` is something else.
    """
    return _reduced_as(torch.float16, allreduce_hook, group_of(state, bucket, "fp16_compress_hook"), bucket)


def bf16_compress_hook(state: ProcessGroup | None, bucket: GradBucket) -> Future[torch.Tensor]:
    """Average the gradients as bfloat16: half the bytes of float32, its range, 8 bits of precision.

    Arguments and results are those of :func:`fp16_compress_hook`.
    """
    return _reduced_as(torch.bfloat16, allreduce_hook, group_of(state, bucket, "bf16_compress_hook"), bucket)


def fp16_compress_wrapper(hook: CommHook) -> CommHook:
    """A hook that gives ``hook`` the gradients as float16, and casts back what comes of it.

    What ``hook`` sends is then half as large: ``fp16_compress_wrapper(powerSGD_hook)`` sends its factors as
    float16.

    Args:
        hook: takes the state that is registered, and a bucket with float16 gradients.

    Raises:
        UsageError: ``hook`` is no function.
    """
    return _wrapper(torch.float16, hook, "fp16_compress_wrapper")


def bf16_compress_wrapper(hook: CommHook) -> CommHook:
    """A hook that gives ``hook`` the gradients as bfloat16; see :func:`fp16_compress_wrapper`."""
    return _wrapper(torch.bfloat16, hook, "bf16_compress_wrapper")


def _wrapper(dtype: torch.dtype, hook: CommHook, name: str) -> CommHook:
    inner = checked_hook(hook, name)

    def compressed(state: Any, bucket: GradBucket) -> Future[torch.Tensor]:
        return _reduced_as(dtype, inner, state, bucket)

    compressed.__qualname__ = f"{name}({name_of(inner)})"
    return compressed


def _reduced_as(dtype: torch.dtype, hook: CommHook, state: Any, bucket: GradBucket) -> Future[torch.Tensor]:
    own = bucket.buffer()
    if not own.dtype.is_floating_point or own.dtype.itemsize <= dtype.itemsize:
        return hook(state, bucket)
    small = bucket.as_dtype(dtype)
    with torch.no_grad():
        small.set_buffer(own)

    def decompress(value: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return own.copy_(value.reshape(own.shape))

    return after(hook, state, small, decompress)
