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

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...common.arguments import accept_both_group_names
from ...errors import UsageError
from ...future import Future, derive_key
from ...group import ProcessGroup
from ...spec import AVG
from .allreduce import allreduce_hook
from .contract import GradBucket, checked_group

_logger = logging.getLogger("shoal")


@accept_both_group_names
@dataclass(eq=False, repr=False)
class PowerSGDState:
    """The settings and state of :func:`powerSGD_hook` and :func:`batched_powerSGD_hook`.

    Every rank needs its own, with equal settings.  The state of a parameter is kept by its position in the
    model, so buckets may be rebuilt.  It can be pickled, without the group (``process_group`` is None after
    loading).  Each rank must save its own, because the errors differ.

    Args:
        process_group: the group to average over; None: that of the model.
        matrix_approximation_rank: the rank of the factors, usually 1 to 4; increase it for accuracy.
        start_powerSGD_iter: number of first backward passes without compression.  Compression in the first
            tenth of training, or during the warm-up of the learning rate, often costs accuracy.
        min_compression_rate: a matrix is compressed only if its factors have this many times fewer elements.
        use_error_feedback: add the error of a step to the gradients of the next.  Needs memory of the size of
            the compressed gradients.  Without it PowerSGD is biased and rarely reaches the same accuracy.
        warm_start: start with the factors of the previous step, which is better if gradients are similar.
        orthogonalization_epsilon: rows of a factor much shorter than this become almost zero (see
            ``orthogonalize``).  0 is safe, also for zero gradients.
        random_seed: the seed of the first factors; equal on all ranks.
        compression_stats_logging_frequency: passes between two logs of the rate by the logger ``shoal``.
        batch_tensors_with_same_shape: batch matrices of equal shape, which copies them.  Better for devices
            that are not busy with many small products.

    Attributes:
        iter: number of backward passes so far.
        errors: the error of each parameter's gradient on this rank, by its position in the model.
        factors: the second factor of each matrix, by its position in the model.
        bucket_factors: the second factors of the batched hook, by the index of the bucket.

    Raises:
        UsageError: an argument is invalid.
    """

    process_group: ProcessGroup | None = None
    matrix_approximation_rank: int = 1
    start_powerSGD_iter: int = 1_000
    min_compression_rate: float = 2
    use_error_feedback: bool = True
    warm_start: bool = True
    orthogonalization_epsilon: float = 0
    random_seed: int = 0
    compression_stats_logging_frequency: int = 10_000
    batch_tensors_with_same_shape: bool = False

    def __post_init__(self) -> None:
        self.process_group = checked_group(self.process_group, "process_group")
        for name, least in (
            ("matrix_approximation_rank", 1),
            ("start_powerSGD_iter", 0),
            ("random_seed", 0),
            ("compression_stats_logging_frequency", 1),
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise UsageError(f"{name} must be an integer of at least {least}, got {value!r}")
        if not self.min_compression_rate > 0:
            raise UsageError(f"min_compression_rate must be positive, got {self.min_compression_rate!r}")
        if not self.orthogonalization_epsilon >= 0:
            raise UsageError(
                f"orthogonalization_epsilon must not be negative, got {self.orthogonalization_epsilon!r}"
            )
        self.iter = 0
        self.errors: dict[int, torch.Tensor] = {}
        self.factors: dict[int, torch.Tensor] = {}
        self.bucket_factors: dict[int, torch.Tensor] = {}
        self._elements_before = 0
        self._elements_after = 0

    def compression_stats(self) -> tuple[float, int, int]:
        """Return the compression rate (0 before the first compressed step), and elements before and after."""
        before, after = self._elements_before, self._elements_after
        return (before / after if after else 0.0), before, after

    # -- for the hooks -------------------------------------------------------------------------

    def next_step(self, bucket: GradBucket) -> int | None:
        """Count the pass at its last bucket; return its number, or None while compression has not started."""
        step = self.iter
        if bucket.is_last():
            self.iter += 1
        return step if step >= self.start_powerSGD_iter else None

    def count(self, before: int, after: int, step: int, bucket: GradBucket) -> None:
        """Note that ``after`` elements were sent instead of ``before``."""
        self._elements_before += before
        self._elements_after += after
        since = step - self.start_powerSGD_iter
        if bucket.is_last() and since % self.compression_stats_logging_frequency == 0:
            _logger.info(
                "PowerSGD, pass %d: %.4g times fewer elements (%d instead of %d)",
                step,
                self.compression_stats()[0],
                self._elements_after,
                self._elements_before,
            )

    def start(self, remembered: torch.Tensor | None, out: torch.Tensor, *identity: int) -> None:
        """Fill ``out`` ([r, m]) with the initial factor: the ``remembered`` one, or random numbers.

        The latter depend only on the seed and ``identity``, numbers that are equal on all ranks and different
        for all factors of all steps, and not on the state of torch's generators.
        """
        if self.warm_start and remembered is not None and remembered.shape == out.shape:
            out.copy_(remembered)
            return
        source = torch.Generator().manual_seed(derive_key(b"PowerSGD", self.random_seed, *identity))
        out.copy_(torch.randn(out.shape, generator=source, dtype=torch.float32, device="cpu"))

    def error_buffer(self, index: int, like: torch.Tensor) -> torch.Tensor:
        """Return the stored error of a parameter: [numel], with the dtype and device of its gradient."""
        error = self.errors.get(index)
        if error is None or error.numel() != like.numel() or error.dtype != like.dtype:
            error = self.errors[index] = torch.zeros(like.numel(), dtype=like.dtype, device=like.device)
        return error

    def reset_errors(self, indices: Iterable[int]) -> None:
        """Delete the errors of these parameters."""
        for index in indices:
            self.errors.pop(index, None)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "process_group": None}


def checked_state(state: object, hook: str) -> PowerSGDState:
    """Return ``state``, the state of ``hook``, or raise UsageError if it is not a PowerSGDState."""
    if isinstance(state, PowerSGDState):
        return state
    raise UsageError(
        f"the state of {hook} is a PowerSGDState, got {type(state).__name__}.  Register it with "
        f"model.register_comm_hook(PowerSGDState(), {hook})"
    )


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
    return _compressed_average(checked_state(state, "powerSGD_hook"), bucket, _plan_of)


def batched_powerSGD_hook(state: PowerSGDState, bucket: GradBucket) -> Future[torch.Tensor]:
    """Average the gradients with the whole bucket compressed to two low-rank factors.

    It computes less than :func:`powerSGD_hook` for many small parameters, and sends two small messages.  But
    a matrix with arbitrary rows and columns does not have a low rank, so much more is lost: try the other
    hook first.  A rank above 1 rarely helps much.

    ``min_compression_rate`` and ``batch_tensors_with_same_shape`` of the state are not used.  Arguments,
    result and errors are the same.
    """
    return _compressed_average(checked_state(state, "batched_powerSGD_hook"), bucket, _square_plan_of)


def _compressed_average(
    state: PowerSGDState, bucket: GradBucket, plan_of: Callable[[PowerSGDState, GradBucket], _Plan]
) -> Future[torch.Tensor]:
    step = state.next_step(bucket)
    if step is None:
        return allreduce_hook(state.process_group, bucket)
    plan = plan_of(state, bucket)
    state.count(plan.before, plan.after, step, bucket)
    if not plan.stacks:
        return allreduce_hook(state.process_group, bucket)
    group = state.process_group or bucket.group
    with torch.no_grad():
        _add_errors(state, plan)
        for stack in plan.stacks:
            stack.collect()
            for q, key in zip(stack.q, stack.keys, strict=True):
                state.start(stack.factors(state).get(key), q, step, stack.seed_offset + key)
            orthogonalize(stack.q)
            torch.bmm(stack.q, stack.matrices.mT, out=stack.p)
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
        torch.bmm(stack.p, stack.matrices, out=stack.q)
    own = [stack.q.clone() for stack in plan.stacks] if state.use_error_feedback else []
    future = group.all_reduce(plan.second, AVG)
    for stack, q in zip(plan.stacks, own, strict=bool(own)):
        stack.note_errors(state, q)
    sound = bool(future.wait(blocking=False).isfinite().all())  # 16-bit floats may have overflowed
    for stack in plan.stacks:
        product(stack.p, stack.q, out=stack.matrices)
        if not sound:
            state.reset_errors(stack.indices)
        elif state.warm_start:
            for q, key in zip(stack.q, stack.keys, strict=True):
                stack.factors(state)[key] = q.clone()


def _add_errors(state: PowerSGDState, plan: _Plan) -> None:
    if not state.use_error_feedback:
        return
    sources = [source.view(-1) for stack in plan.stacks for source in stack.sources]
    indices = [index for stack in plan.stacks for index in stack.indices]
    errors = [state.error_buffer(index, source) for index, source in zip(indices, sources, strict=True)]
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
        keys: the key of each matrix in ``factors(state)``, the second factors of the previous step.
    """

    #: Separates the random seeds of kinds of stacks.
    seed_offset = 0

    def __init__(
        self, indices: Sequence[int], sources: Sequence[torch.Tensor], p: torch.Tensor, q: torch.Tensor
    ) -> None:
        self.indices = self.keys = indices
        self.sources = sources
        self.matrices = sources[0].unsqueeze(0) if len(sources) == 1 else torch.stack(list(sources))
        self.p = p
        self.q = q

    def factors(self, state: PowerSGDState) -> dict[int, torch.Tensor]:
        return state.factors

    def collect(self) -> None:
        if len(self.sources) > 1:
            _copy_all(list(self.matrices), self.sources)

    def distribute(self) -> None:
        if len(self.sources) > 1:
            _copy_all(self.sources, list(self.matrices))

    def note_errors(self, state: PowerSGDState, own: torch.Tensor) -> None:
        """Store the errors of this rank, whose second factor is ``own``."""
        for k, (index, source) in enumerate(zip(self.indices, self.sources, strict=True)):
            error = state.error_buffer(index, source).view(1, *source.shape)
            one = slice(k, k + 1)
            residual(self.matrices[one], self.p[one], own[one], out=error)


class _Square(_Stack):
    """A whole bucket as one square matrix."""

    seed_offset = 2**32

    def __init__(self, bucket: GradBucket, p: torch.Tensor, q: torch.Tensor) -> None:
        self.indices, self.keys = bucket.indices(), [bucket.index()]
        self.sources = [as_matrix(gradient) for gradient in bucket.gradients()]
        self._buffer = bucket.buffer()
        side = p.shape[-1]
        self._flat = torch.zeros(side * side, dtype=p.dtype, device=p.device)
        start = self._buffer.storage_offset()
        #: The part of the square for each gradient.
        self._parts = [self._flat[x.storage_offset() - start :][: x.numel()] for x in self.sources]
        self.matrices = self._flat.view(1, side, side)
        self.p, self.q = p, q

    def factors(self, state: PowerSGDState) -> dict[int, torch.Tensor]:
        return state.bucket_factors

    def collect(self) -> None:
        count = len(self._buffer)
        self._flat[:count].copy_(self._buffer)
        self._flat[count:].zero_()

    def distribute(self) -> None:
        # Not the whole buffer, because the gaps between gradients must stay zero.
        _copy_all([source.view(-1) for source in self.sources], self._parts)

    def note_errors(self, state: PowerSGDState, own: torch.Tensor) -> None:
        residual(self.matrices, self.p, own, out=self.matrices)
        pairs = zip(self.indices, self.sources, strict=True)
        _copy_all([state.error_buffer(index, source) for index, source in pairs], self._parts)


@dataclass(frozen=True, slots=True)
class _Plan:
    """The division of a bucket into compressed and uncompressed gradients, and its two messages."""

    plain: list[torch.Tensor]  # the uncompressed gradients, one-dimensional views of the bucket
    sent: list[torch.Tensor]  # the views of ``first`` for them
    stacks: list[_Stack]  # the compressed gradients
    first: torch.Tensor  # the first message: ``sent``, then the first factors
    second: torch.Tensor  # the second message: the second factors
    #: before, after: number of elements of all gradients, and of both messages
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


def _square_plan_of(state: PowerSGDState, bucket: GradBucket) -> _Plan:
    count = len(bucket.buffer())
    side = math.isqrt(max(0, count - 1)) + 1
    rank = min(side, state.matrix_approximation_rank)

    def make() -> _Plan:
        first, second = (
            bucket.memory(f"PowerSGD, {which}", rank * side, bucket.buffer().dtype)
            for which in ("first", "second")
        )
        square = _Square(bucket, first.view(1, rank, side), second.view(1, rank, side))
        return _Plan([], [], [square], first, second, count, len(first) + len(second))

    return bucket.kept(("PowerSGD, square", rank), make)


def as_matrix(gradient: torch.Tensor) -> torch.Tensor:
    """Return a two-dimensional contiguous view of ``gradient``, which must be dense in memory.

    The rows are the dimension that is outermost in memory, with default strides the first one.
    """
    strides = gradient.stride()
    outermost = max(range(gradient.dim()), key=strides.__getitem__, default=None)
    rows = 1 if outermost is None else gradient.shape[outermost]
    count = gradient.numel()
    return gradient.as_strided((rows, count // max(rows, 1)), (count // max(rows, 1), 1))


# -- products of matrices with few rows ----------------------------------------------------------
#
# A matrix M of shape [n, m] is approximated by P^T Q with P of shape [r, n] and Q of shape [r, m].  The
# factors have few rows instead of few columns, because libraries are optimised for large matrices: with r
# between 2 and 8 and M of 1024 x 1024, M Q^T with factors of r columns takes 5 to 8 times as long, and
# M^T P^T up to 30 times.  For the same reason P^T Q is a sum of r outer products for small r.
#
# All matrices come in batches of equal shape: P is [b, r, n], Q [b, r, m] and M [b, n, m].  So P = Q M^T and
# Q = P M.


#: Up to this rank a sum of outer products is faster than a matrix product.
_MAX_OUTER_PRODUCT_RANK = 8


def orthogonalize(rows: torch.Tensor, epsilon: float = 0) -> None:
    """Make the r rows of each matrix orthonormal, in place, without changing their span.

    Rows that depend linearly on previous ones (zeros, for example) become arbitrary independent directions.

    Args:
        rows: [b, r, n] with r <= n; 16-bit floats are computed in float32.
        epsilon: added to the length of each row's independent part before the row is divided by it, so that
            rows much shorter than ``epsilon`` become almost zero instead of unit length.
    """
    exact = rows if rows.dtype.itemsize > 2 else rows.float()
    q, r = torch.linalg.qr(exact.mT)
    if epsilon:
        lengths = r.diagonal(dim1=-2, dim2=-1).abs()
        q = q * (lengths / (lengths + epsilon)).unsqueeze(-2)
    rows.copy_(q.mT)


def product(p: torch.Tensor, q: torch.Tensor, out: torch.Tensor) -> None:
    """M = P^T Q."""
    if p.shape[1] > _MAX_OUTER_PRODUCT_RANK:
        torch.bmm(p.mT, q, out=out)
        return
    torch.mul(p[:, 0, :, None], q[:, 0, None, :], out=out)
    for row in range(1, p.shape[1]):
        out.addcmul_(p[:, row, :, None], q[:, row, None, :])


def residual(m: torch.Tensor, p: torch.Tensor, q: torch.Tensor, out: torch.Tensor) -> None:
    """M - P^T Q."""
    if p.shape[1] > _MAX_OUTER_PRODUCT_RANK:
        torch.baddbmm(m, p.mT, q, alpha=-1, out=out)
        return
    torch.addcmul(m, p[:, 0, :, None], q[:, 0, None, :], value=-1, out=out)
    for row in range(1, p.shape[1]):
        out.addcmul_(p[:, row, :, None], q[:, row, None, :], value=-1)
