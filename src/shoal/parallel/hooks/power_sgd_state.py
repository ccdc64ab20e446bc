"""The state of PowerSGD between steps."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import torch

from ...errors import UsageError
from ...future import derive_key
from ...group import ProcessGroup
from .bucket import GradBucket
from .contract import checked_group

_logger = logging.getLogger("shoal")


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
            ``low_rank.orthogonalize``).  0 is safe, also for zero gradients.
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

    def __init__(
        self,
        process_group: ProcessGroup | None = None,
        matrix_approximation_rank: int = 1,
        start_powerSGD_iter: int = 1_000,
        min_compression_rate: float = 2,
        use_error_feedback: bool = True,
        warm_start: bool = True,
        orthogonalization_epsilon: float = 0,
        random_seed: int = 0,
        compression_stats_logging_frequency: int = 10_000,
        batch_tensors_with_same_shape: bool = False,
    ) -> None:
        self.process_group = checked_group(process_group, "process_group")
        for name, value, least in (
            ("matrix_approximation_rank", matrix_approximation_rank, 1),
            ("start_powerSGD_iter", start_powerSGD_iter, 0),
            ("random_seed", random_seed, 0),
            ("compression_stats_logging_frequency", compression_stats_logging_frequency, 1),
        ):
            if not isinstance(value, int) or value < least:
                raise UsageError(f"{name} must be an integer of at least {least}, got {value!r}")
        if not min_compression_rate > 0:
            raise UsageError(f"min_compression_rate must be positive, got {min_compression_rate!r}")
        if not orthogonalization_epsilon >= 0:
            raise UsageError(
                f"orthogonalization_epsilon must not be negative, got {orthogonalization_epsilon!r}"
            )
        self.matrix_approximation_rank = matrix_approximation_rank
        self.start_powerSGD_iter = start_powerSGD_iter
        self.min_compression_rate = min_compression_rate
        self.use_error_feedback = use_error_feedback
        self.warm_start = warm_start
        self.orthogonalization_epsilon = orthogonalization_epsilon
        self.random_seed = random_seed
        self.compression_stats_logging_frequency = compression_stats_logging_frequency
        self.batch_tensors_with_same_shape = batch_tensors_with_same_shape
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

    def error_of(self, index: int, like: torch.Tensor) -> torch.Tensor:
        """Return the stored error of a parameter: [numel], with the dtype and device of its gradient."""
        error = self.errors.get(index)
        if error is None or error.numel() != like.numel() or error.dtype != like.dtype:
            error = self.errors[index] = torch.zeros(like.numel(), dtype=like.dtype, device=like.device)
        return error

    def forget(self, indices: Iterable[int]) -> None:
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
