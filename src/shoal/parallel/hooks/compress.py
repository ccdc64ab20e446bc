"""Hooks that send gradients in half precision.

The gradients are cast into registered memory of the bucket, reduced there, and cast back.  Unlike in torch
they are not divided by the number of ranks first: an all-reduce of 16-bit floats adds in float32, and ``avg``
divides before it rounds once.  So sums do not overflow, and small gradients do not lose bits.
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

    Gradients above 65504 become infinite and those below 6e-8 zero: use a loss scale, or
    :func:`bf16_compress_hook`.  Buckets of 16-bit and of complex gradients are reduced without a cast.
    Arguments, result and errors are those of :func:`allreduce_hook`.
    """
    return _reduced_as(torch.float16, allreduce_hook, group_of(state, bucket, "fp16_compress_hook"), bucket)


def bf16_compress_hook(state: ProcessGroup | None, bucket: GradBucket) -> Future[torch.Tensor]:
    """Average the gradients as bfloat16: half the bytes of float32, the same range, 8 bits of precision.

    Arguments, result and errors are those of :func:`allreduce_hook`.
    """
    return _reduced_as(torch.bfloat16, allreduce_hook, group_of(state, bucket, "bf16_compress_hook"), bucket)


def fp16_compress_wrapper(hook: CommHook) -> CommHook:
    """Return a hook that calls ``hook`` with the gradients as float16, and casts the result back.

    For example, ``fp16_compress_wrapper(powerSGD_hook)`` sends the factors as float16.

    Args:
        hook: called with the registered state and a bucket of float16 gradients.

    Raises:
        UsageError: ``hook`` is not callable.
    """
    return _wrapper(torch.float16, hook, "fp16_compress_wrapper")


def bf16_compress_wrapper(hook: CommHook) -> CommHook:
    """Return a hook that calls ``hook`` with the gradients as bfloat16; see :func:`fp16_compress_wrapper`."""
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
