"""Hooks that average gradients in full precision, in half precision or in eight bits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ...errors import UsageError
from ...future import Future
from ...group import ProcessGroup
from ...spec import AVG
from .contract import CommHook, GradBucket, checked_hook, group_of, name_of, then_apply


def allreduce_hook(state: ProcessGroup | None, bucket: GradBucket) -> Future[torch.Tensor]:
    """Average the gradients with one all-reduce, as without a hook.  Used to build other hooks.

    Args:
        state: the group to average over; None: that of the model.
        bucket: the gradients.

    Returns:
        A future of the bucket's buffer.

    Raises:
        UsageError: ``state`` has another type.
    """
    return group_of(state, bucket, "allreduce_hook").all_reduce(bucket.buffer(), AVG)


def noop_hook(state: object, bucket: GradBucket) -> Future[torch.Tensor]:
    """Keep the gradients of each rank, to measure the cost of communication.  The ranks' models diverge.

    Args:
        state: not used.
        bucket: the gradients.
    """
    future: Future[torch.Tensor] = Future()
    future.set_result(bucket.buffer())
    return future


# -- half precision ------------------------------------------------------------------------------
#
# The gradients are cast into registered memory of the bucket, reduced there, and cast back.  Unlike in torch
# they are not divided by the number of ranks first: an all-reduce of 16-bit floats adds in float32, and
# ``avg`` divides before it rounds once.  So sums do not overflow, and small gradients do not lose bits.


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
    small.set_buffer(own)

    def decompress(value: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return own.copy_(value.reshape(own.shape))

    return then_apply(hook, state, small, decompress)


# -- eight bits ----------------------------------------------------------------------------------
#
# Every rank maps the range of its gradients (extended to include zero, which is exact) affinely to 0 .. 255,
# and sends the bytes with scale and zero point to all others in one all-gather; each rank then computes the
# mean of the dequantised values.  The maximum error is half a step, the mean of the ranks' ranges / 510.  The
# mapping is that of torch's min-max observers for ``quint8``.
#
# The gradients are processed in pieces that fit into the processor's cache; temporary tensors of the size of
# the bucket would take several times as long.
#
# The all-gather sends ``size - 1`` bytes per gradient, an all-reduce of float32 8 (size - 1) / size: with up
# to seven ranks the all-gather sends less.


_MAX_LEVEL = 255
#: Number of elements processed at a time.
_PIECE_ELEMENTS = 2**15


def quantization_pertensor_hook(state: ProcessGroup | None, bucket: GradBucket) -> Future[torch.Tensor]:
    """Average the gradients as bytes, with one range for the whole bucket.

    If gradients differ much in magnitude, small ones become zero; :func:`quantization_perchannel_hook` is
    nearly as fast and far more precise.  An infinite or NaN gradient on any rank affects the whole range.
    Arguments, result and errors are those of :func:`quantization_perchannel_hook`.
    """
    group = group_of(state, bucket, "quantization_pertensor_hook")
    return _quantized_average(group, bucket, max(1, len(bucket.buffer())))


def quantization_perchannel_hook(
    state: ProcessGroup | None, bucket: GradBucket, bucket_size: int = 512
) -> Future[torch.Tensor]:
    """Average the gradients as bytes, with a range for every ``bucket_size`` of them.

    Args:
        state: the group to average over; None: that of the model.
        bucket: real gradients of any precision.
        bucket_size: number of neighbouring gradients that share a range, which adds 5 bytes.  Change it with
            ``functools.partial(quantization_perchannel_hook, bucket_size=128)``.

    Returns:
        A future of the bucket's buffer.

    Raises:
        UsageError: ``state`` or ``bucket_size`` is invalid, or the gradients are complex.
    """
    group = group_of(state, bucket, "quantization_perchannel_hook")
    if not isinstance(bucket_size, int) or bucket_size < 1:
        raise UsageError(f"bucket_size must be a positive number of gradients, got {bucket_size!r}")
    return _quantized_average(group, bucket, bucket_size)


def _quantized_average(group: ProcessGroup, bucket: GradBucket, channel: int) -> Future[torch.Tensor]:
    buffer = bucket.buffer()
    if not buffer.dtype.is_floating_point:
        raise UsageError(f"gradients of {buffer.dtype} have no order, so they cannot be quantised")
    size = _message_size(len(buffer), channel)
    name = f"quantised by {channel}"
    mine = bucket.memory(name, size, torch.uint8)
    all_of_them = bucket.memory(f"{name}, of {group.size} ranks", size * group.size, torch.uint8)
    with torch.no_grad():
        for values, scales, zeros, steps in _channels(buffer, mine, channel):
            _choose_steps(values, scales, zeros)
            for x, scale, zero, out in _pieces(values, scales, zeros, steps):
                out.copy_((x.float() / scale).round_().add_(zero).clamp_(0, _MAX_LEVEL))

    def average(future: Future[torch.Tensor]) -> torch.Tensor:
        messages = future.value().view(group.size, size)
        with torch.no_grad():
            for parts in zip(*(_channels(buffer, message, channel) for message in messages), strict=True):
                for pieces in zip(*(_pieces(*part) for part in parts), strict=True):
                    total = torch.zeros(pieces[0][0].shape, dtype=torch.float32, device=pieces[0][0].device)
                    for _, scale, zero, steps in pieces:
                        total.add_(steps.float().sub_(zero).mul_(scale))
                    pieces[0][0].copy_(total.div_(group.size))
        return buffer

    return group.all_gather_single(all_of_them, mine).then(average)


def _choose_steps(values: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor) -> None:
    """Write the scale (distance of two steps) and the zero point of each row of ``values``.

    The shapes are [rows, columns] for ``values``, and [rows, 1] for ``scales`` (float32) and ``zeros``
    (uint8).
    """
    low, high = torch.aminmax(values, dim=1, keepdim=True)
    low, high = low.float().clamp_(max=0), high.float().clamp_(min=0)
    scale = (high - low).div_(_MAX_LEVEL)
    scale.masked_fill_(scale == 0, 1)  # all gradients are zero; NaN must be kept
    scales.copy_(scale)
    zeros.copy_((-low / scale).round_().clamp_(0, _MAX_LEVEL))


def _message_size(count: int, channel: int) -> int:
    """Return the message size in bytes: 1 per gradient, and 4 + 1 per channel for scale and zero point."""
    channels = -(-count // channel)
    return -(-(5 * channels + count) // 4) * 4  # the next rank's scales must be aligned


def _channels(
    buffer: torch.Tensor, message: torch.Tensor, channel: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Yield parts of ``buffer`` and their views of ``message``: values, scales, zeros and steps.

    The first part has all whole channels, one in each row; the second has the shorter last channel, if any.
    """
    count = len(buffer)
    if count == 0:
        return
    channels = -(-count // channel)
    scales = message[: 4 * channels].view(torch.float32).view(-1, 1)
    zeros = message[4 * channels : 5 * channels].view(-1, 1)
    steps = message[5 * channels : 5 * channels + count]
    whole = count // channel
    end = whole * channel
    if whole:
        yield (
            buffer[:end].view(whole, channel),
            scales[:whole],
            zeros[:whole],
            steps[:end].view(whole, channel),
        )
    if end < count:
        yield buffer[end:].view(1, -1), scales[whole:], zeros[whole:], steps[end:].view(1, -1)


def _pieces(
    values: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, steps: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Yield the four tensors in pieces of several rows, or of several columns of one row."""
    rows, columns = values.shape
    together = max(1, _PIECE_ELEMENTS // columns)
    for top in range(0, rows, together):
        some = slice(top, top + together)
        for left in range(0, columns, _PIECE_ELEMENTS):
            part = slice(left, left + _PIECE_ELEMENTS)
            yield values[some, part], scales[some], zeros[some], steps[some, part]
