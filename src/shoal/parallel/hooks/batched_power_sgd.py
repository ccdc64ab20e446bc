"""PowerSGD of a whole bucket as one square matrix.

It computes less than :mod:`.power_sgd` for many small parameters, and sends two small messages.  But a matrix
with arbitrary rows and columns does not have a low rank, so much more is lost.
"""

from __future__ import annotations

import math

import torch

from ...future import Future
from ...spec import AVG
from .bucket import GradBucket
from .low_rank import left_factor, orthogonalize, product, residual, right_factor
from .plain import allreduce_hook
from .power_sgd import as_matrix
from .power_sgd_state import PowerSGDState, checked_state

#: Offset that separates the random seeds of buckets from those of parameters.
_BUCKETS = 2**32


def batched_powerSGD_hook(state: PowerSGDState, bucket: GradBucket) -> Future[torch.Tensor]:
    """Average the gradients with the whole bucket compressed to two low-rank factors.

    ``min_compression_rate`` and ``batch_tensors_with_same_shape`` of the state are not used.  A rank above 1
    rarely helps much; try :func:`powerSGD_hook` first.  Arguments, result and errors are the same.
    """
    state = checked_state(state, "batched_powerSGD_hook")
    step = state.next_step(bucket)
    if step is None:
        return allreduce_hook(state.process_group, bucket)
    group = state.process_group or bucket.group
    buffer = bucket.buffer()
    count, side = len(buffer), math.isqrt(max(0, len(buffer) - 1)) + 1
    rank = min(side, state.matrix_approximation_rank)
    square = bucket.kept(
        ("PowerSGD, square", side), lambda: torch.zeros(side * side, dtype=buffer.dtype, device=buffer.device)
    )
    matrix = square.view(1, side, side)
    p = bucket.memory("PowerSGD, first", rank * side, buffer.dtype).view(1, rank, side)
    q = bucket.memory("PowerSGD, second", rank * side, buffer.dtype).view(1, rank, side)
    state.count(count, len(p.view(-1)) + len(q.view(-1)), step, bucket)
    errors = _errors(state, bucket)
    parts = _parts_of(square, bucket)
    with torch.no_grad():
        square[:count].copy_(buffer)
        square[count:].zero_()
        if errors:
            torch._foreach_add_(parts, errors)
        state.start(state.bucket_factors.get(bucket.index()), q[0], step, _BUCKETS + bucket.index())
        orthogonalize(q)
        left_factor(matrix, q, out=p)

    def reduce_right_factor() -> None:
        orthogonalize(p, state.orthogonalization_epsilon)
        right_factor(matrix, p, out=q)
        own = q.clone()
        future = group.all_reduce(q, AVG)
        if errors:
            residual(matrix, p, own, out=matrix)
            torch._foreach_copy_(errors, parts)
        sound = bool(future.wait(blocking=False).isfinite().all())  # 16-bit floats may have overflowed
        product(p, q, out=matrix)
        if not sound:
            state.forget(bucket.indices())
        elif state.warm_start:
            state.bucket_factors[bucket.index()] = q[0].clone()

    def decompress(future: Future[torch.Tensor]) -> torch.Tensor:
        with torch.no_grad():
            if bool(future.value().isfinite().all()):
                reduce_right_factor()
            else:
                square.fill_(math.nan)
            # Not the whole buffer, because the gaps between gradients must stay zero.
            torch._foreach_copy_([as_matrix(gradient).view(-1) for gradient in bucket.gradients()], parts)
        return buffer

    return group.all_reduce(p, AVG).then(decompress)


def _errors(state: PowerSGDState, bucket: GradBucket) -> list[torch.Tensor]:
    """Return the error-feedback memory of each gradient; empty without error feedback."""
    if not state.use_error_feedback:
        return []
    pairs = zip(bucket.indices(), bucket.gradients(), strict=True)
    return [state.error_of(index, gradient) for index, gradient in pairs]


def _parts_of(square: torch.Tensor, bucket: GradBucket) -> list[torch.Tensor]:
    """Return the part of the square for each gradient, one-dimensional."""
    start = bucket.buffer().storage_offset()
    return [
        square[gradient.storage_offset() - start :][: gradient.numel()] for gradient in bucket.gradients()
    ]
