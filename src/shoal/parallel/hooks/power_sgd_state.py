"""The state that PowerSGD keeps from step to step."""

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
    """Settings and memory of :func:`powerSGD_hook` and :func:`batched_powerSGD_hook`.

    Give every rank one of its own, with equal settings.

    Args:
        process_group: the ranks to average over; None means those of the model.
        matrix_approximation_rank: of the factors.  1 to 4 is usual; double it until the accuracy is there.
        start_powerSGD_iter: how many backward passes reduce gradients as they are.  Compressed gradients in
            the first tenth of training, or while the learning rate warms up, often cost accuracy.
        min_compression_rate: a matrix is compressed only if its factors have this many times fewer elements.
        use_error_feedback: add what a step lost to the gradients of the next.  Takes memory of the size of
            the compressed gradients.  Without it PowerSGD is biased, and rarely converges to as good a model.
        warm_start: begin with the factors of the step before: the approximation gets better from step to
            step where gradients resemble each other.
        orthogonalization_epsilon: rows of a factor that are shorter than about this fade away (see
            ``low_rank.orthogonalize``).  0 is safe: gradients of zeros are no trouble.
        random_seed: of the first factors; the same on all ranks.
        compression_stats_logging_frequency: after how many passes the logger ``shoal`` is told the rate.
        batch_tensors_with_same_shape: compute with matrices of equal shape together, which copies them.
            It helps devices that many small products leave idle.

    Attributes:
        iter: backward passes until now.
        errors: what was lost of each parameter's gradient on this rank, by its place in the model.
        factors: the second factor of each matrix, by its place in the model.
        bucket_factors: those of the batched hook, by the index of the bucket.

    What is remembered goes by the parameter's place in the model, so buckets may be made anew at any time.
    The state can be pickled, with all that it remembers and without the group; each rank saves its own, as
    the errors differ.  After loading, ``process_group`` is None.

    Raises:
        UsageError: an argument makes no sense.
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
        """How much was saved since compression began.

        Returns:
            The ratio of the two following (0 before the first compressed step); how many elements the
            gradients had; and how many were sent in their place.
        """
        before, after = self._elements_before, self._elements_after
        return (before / after if after else 0.0), before, after

    # -- for the hooks -------------------------------------------------------------------------

    def next_step(self, bucket: GradBucket) -> int | None:
        """Count the pass of which ``bucket`` is a part; None while gradients are reduced as they are."""
        step = self.iter
        if bucket.is_last():
            self.iter += 1
        return step if step >= self.start_powerSGD_iter else None

    def count(self, before: int, after: int, step: int, bucket: GradBucket) -> None:
        """Note that ``after`` elements were sent in the place of ``before``."""
        self._elements_before += before
        self._elements_after += after
        since = step - self.start_powerSGD_iter
        if bucket.is_last() and since % self.compression_stats_logging_frequency == 0:
            _logger.info(
                "PowerSGD, pass %d: %.4g times fewer elements (%d in the place of %d)",
                step,
                self.compression_stats()[0],
                self._elements_after,
                self._elements_before,
            )

    def start(self, remembered: torch.Tensor | None, out: torch.Tensor, *identity: int) -> None:
        """Fill ``out`` with the factor to begin with: the ``remembered`` one, or random numbers.

        They depend on the seed and ``identity`` alone, not on what this process drew before.

        Args:
            out: [r, m].
            identity: numbers that are equal on all ranks, and differ for all factors of all steps.
        """
        if self.warm_start and remembered is not None and remembered.shape == out.shape:
            out.copy_(remembered)
            return
        source = torch.Generator().manual_seed(derive_key(b"PowerSGD", self.random_seed, *identity))
        out.copy_(torch.randn(out.shape, generator=source, dtype=torch.float32, device="cpu"))

    def error_of(self, index: int, like: torch.Tensor) -> torch.Tensor:
        """Where the loss of a parameter is noted: [numel], like its gradient."""
        error = self.errors.get(index)
        if error is None or error.numel() != like.numel() or error.dtype != like.dtype:
            error = self.errors[index] = torch.zeros(like.numel(), dtype=like.dtype, device=like.device)
        return error

    def forget(self, indices: Iterable[int]) -> None:
        """Drop what was noted as lost of these parameters."""
        for index in indices:
            self.errors.pop(index, None)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "process_group": None}


def checked_state(state: object, hook: str) -> PowerSGDState:
    """``state``, which ``hook`` was given.

    Raises:
        UsageError: it is no PowerSGDState.
    """
    if isinstance(state, PowerSGDState):
        return state
    raise UsageError(
        f"the state of {hook} is a PowerSGDState, got {type(state).__name__}.  Register it with "
        f"model.register_comm_hook(PowerSGDState(), {hook})"
    )
