"""PowerSGD: gradients of matrices as products of two low-rank factors.

From Vogels, Karimireddy and Jaggi, "PowerSGD: practical low-rank gradient compression for distributed
optimization" (arXiv:1905.13727).  A step of power iteration finds the factors:

1. add the error of the previous step to each matrix M (error feedback);
2. P = M Q, with Q of the previous step (warm start) or random numbers; average P over the ranks;
3. make the columns of P orthonormal, on every rank in the same way;
4. Q = M^T P; average Q over the ranks;
5. the gradient is P Q^T; the error is M - P Q^T with this rank's own Q.

Vectors, and matrices too small to gain from it, are sent uncompressed with all P of the bucket, so each
bucket needs two messages.  They are packed in registered memory.

The error is computed with the rank's own Q, as in the paper's second algorithm.  Other implementations (such
as torch's) use the averaged Q and must keep a copy of M until it arrives.  The mean of the errors over the
ranks is the same in both, and only the mean is reduced, so the gradients differ only by rounding.

Infinite or NaN gradients (a loss scale too large) give such results, and update no errors or factors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ...future import Future
from ...group import ProcessGroup
from ...spec import AVG
from .bucket import GradBucket
from .low_rank import left_factor, orthogonalize, product, residual, right_factor
from .plain import allreduce_hook
from .power_sgd_state import PowerSGDState, checked_state


def powerSGD_hook(state: PowerSGDState, bucket: GradBucket) -> Future[torch.Tensor]:
    """Average the gradients with each matrix compressed to two low-rank factors.

    Args:
        state: a state for this rank alone, with the same settings on all ranks.
        bucket: the gradients.

    Returns:
        A future of the bucket's buffer; bitwise equal on all ranks with equal processors and thread counts.

    Raises:
        UsageError: ``state`` has another type.
    """
    state = checked_state(state, "powerSGD_hook")
    step = state.next_step(bucket)
    if step is None:
        return allreduce_hook(state.process_group, bucket)
    plan = _plan_of(state, bucket)
    state.count(plan.before, plan.after, step, bucket)
    if not plan.stacks:
        return allreduce_hook(state.process_group, bucket)
    group = state.process_group or bucket.group
    with torch.no_grad():
        _add_errors(state, plan)
        for stack in plan.stacks:
            stack.collect()
            for q, index in zip(stack.q, stack.indices, strict=True):
                state.start(state.factors.get(index), q, step, index)
            orthogonalize(stack.q)
            left_factor(stack.matrices, stack.q, out=stack.p)
        _copy_all(plan.sent, plan.plain)

    def decompress(future: Future[torch.Tensor]) -> torch.Tensor:
        first = future.value()
        with torch.no_grad():
            if bool(first.isfinite().all()):
                _reduce_right_factors(state, plan, group)
            else:
                for stack in plan.stacks:
                    stack.matrices.fill_(math.nan)
            for stack in plan.stacks:
                stack.distribute()
            _copy_all(plan.plain, plan.sent)
        return bucket.buffer()

    return group.all_reduce(plan.first, AVG).then(decompress)


def _reduce_right_factors(state: PowerSGDState, plan: _Plan, group: ProcessGroup) -> None:
    """Do steps 3 to 5, in the callback of the first message."""
    for stack in plan.stacks:
        orthogonalize(stack.p, state.orthogonalization_epsilon)
        right_factor(stack.matrices, stack.p, out=stack.q)
    own = [stack.q.clone() for stack in plan.stacks] if state.use_error_feedback else []
    future = group.all_reduce(plan.second, AVG)
    for stack, q in zip(plan.stacks, own, strict=bool(own)):
        stack.note_errors(state, q)
    sound = bool(future.wait(blocking=False).isfinite().all())  # 16-bit floats may have overflowed
    for stack in plan.stacks:
        product(stack.p, stack.q, out=stack.matrices)
        if not sound:
            state.forget(stack.indices)
        elif state.warm_start:
            for q, index in zip(stack.q, stack.indices, strict=True):
                state.factors[index] = q.clone()


def _add_errors(state: PowerSGDState, plan: _Plan) -> None:
    if not state.use_error_feedback:
        return
    sources = [source.view(-1) for stack in plan.stacks for source in stack.sources]
    indices = [index for stack in plan.stacks for index in stack.indices]
    errors = [state.error_of(index, source) for index, source in zip(indices, sources, strict=True)]
    torch._foreach_add_(sources, errors)


def _copy_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    if targets:
        torch._foreach_copy_(list(targets), list(sources))


# -- layout of the messages ----------------------------------------------------------------------


class _Stack:
    """A batch of matrices of one shape.

    Attributes:
        indices: the positions of the parameters in the model.
        sources: their gradients as matrices, views of the bucket.
        matrices: [b, n, m]; a view of the only source, or memory into which all sources are copied.
        p, q: [b, r, n] and [b, r, m]: the factors, views of the messages.
    """

    def __init__(
        self, indices: Sequence[int], sources: Sequence[torch.Tensor], p: torch.Tensor, q: torch.Tensor
    ) -> None:
        self.indices = indices
        self.sources = sources
        self.matrices = sources[0].unsqueeze(0) if len(sources) == 1 else torch.stack(list(sources))
        self.p = p
        self.q = q

    def collect(self) -> None:
        if len(self.sources) > 1:
            _copy_all(list(self.matrices), self.sources)

    def distribute(self) -> None:
        if len(self.sources) > 1:
            _copy_all(self.sources, list(self.matrices))

    def note_errors(self, state: PowerSGDState, own: torch.Tensor) -> None:
        """Store the errors of this rank, whose second factor is ``own``."""
        for k, (index, source) in enumerate(zip(self.indices, self.sources, strict=True)):
            error = state.error_of(index, source).view(1, *source.shape)
            one = slice(k, k + 1)
            residual(self.matrices[one], self.p[one], own[one], out=error)


@dataclass(frozen=True, slots=True)
class _Plan:
    """The division of a bucket into compressed and uncompressed gradients, and its two messages.

    Attributes:
        plain: the uncompressed gradients, one-dimensional views of the bucket.
        sent: the views of ``first`` for them.
        stacks: the compressed gradients.
        first: the first message: ``sent``, then the first factors.
        second: the second message: the second factors.
        before, after: number of elements of all gradients, and of both messages.
    """

    plain: list[torch.Tensor]
    sent: list[torch.Tensor]
    stacks: list[_Stack]
    first: torch.Tensor
    second: torch.Tensor
    before: int
    after: int


def _plan_of(state: PowerSGDState, bucket: GradBucket) -> _Plan:
    rank, rate = state.matrix_approximation_rank, state.min_compression_rate
    batched = state.batch_tensors_with_same_shape
    return bucket.kept(("PowerSGD", rank, rate, batched), lambda: _make_plan(bucket, rank, rate, batched))


def _make_plan(bucket: GradBucket, rank: int, rate: float, batched: bool) -> _Plan:
    plain: list[torch.Tensor] = []
    by_shape: dict[tuple[int, ...], list[tuple[int, torch.Tensor]]] = {}
    for index, gradient in zip(bucket.indices(), bucket.gradients(), strict=True):
        matrix = as_matrix(gradient)
        n, m = matrix.shape
        r = min(n, m, rank)
        if (n + m) * r * rate < n * m:
            kind = (n, m) if batched else (n, m, index)
            by_shape.setdefault(kind, []).append((index, matrix))
        else:
            plain.append(matrix.view(-1))
    sizes = [(len(members), min(n, m, rank), n, m) for (n, m, *_), members in by_shape.items()]
    flat = sum(gradient.numel() for gradient in plain)
    dtype = bucket.buffer().dtype
    first = bucket.memory("PowerSGD, first", flat + sum(b * r * n for b, r, n, _ in sizes), dtype)
    second = bucket.memory("PowerSGD, second", sum(b * r * m for b, r, _, m in sizes), dtype)
    sent = list(first[:flat].split_with_sizes([gradient.numel() for gradient in plain]))
    ps = first[flat:].split_with_sizes([b * r * n for b, r, n, _ in sizes])
    qs = second.split_with_sizes([b * r * m for b, r, _, m in sizes])
    stacks = [
        _Stack(
            [index for index, _ in members],
            [matrix for _, matrix in members],
            p.view(b, r, n),
            q.view(b, r, m),
        )
        for (b, r, n, m), members, p, q in zip(sizes, by_shape.values(), ps, qs, strict=True)
    ]
    before = sum(gradient.numel() for gradient in bucket.gradients())
    return _Plan(plain, sent, stacks, first, second, before, len(first) + len(second))


def as_matrix(gradient: torch.Tensor) -> torch.Tensor:
    """Return a two-dimensional contiguous view of ``gradient``, which must be dense in memory.

    The rows are the dimension that is outermost in memory, with default strides the first one.
    """
    strides = gradient.stride()
    outermost = max(range(gradient.dim()), key=strides.__getitem__, default=None)
    rows = 1 if outermost is None else gradient.shape[outermost]
    count = gradient.numel()
    return gradient.as_strided((rows, count // max(rows, 1)), (count // max(rows, 1), 1))
