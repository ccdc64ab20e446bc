"""Steps of ZeroRedundancyOptimizer in backward, for each bucket when it is reduced.

Each rank updates the parameters of a bucket that it owns and broadcasts them, while later buckets are still
computed or reduced.  Owners do not depend on buckets, so the first pass is already a step, and steps may also
run after backward.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import torch

from ...errors import UsageError
from ...future import Future
from ..zero import ZeroRedundancyOptimizer
from ..zero.exchange import Exchange
from .contract import CommHook, GradBucket, averaged_tensor, checked_hook, name_of, wait_for
from .optimizer_overlap import averages_as_gradients, step_subset, then_update

if TYPE_CHECKING:
    from ..ddp import DistributedDataParallel


def hook_with_zero_step(
    hook: CommHook, ddp: DistributedDataParallel, zero: ZeroRedundancyOptimizer
) -> CommHook:
    """Return a hook that averages gradients with ``hook`` and updates parameters at the end of backward.

    The updates start when the last gradient is computed, bucket by bucket, while later buckets are still
    reduced.  Better than the all_gather_flat hook if reductions take longer than updates.

        hook = hook_with_zero_step(allreduce_hook, model, optimizer)
        model.register_comm_hook(None, hook)

    After ``backward()`` all parameters are updated on all ranks; ``zero.step()`` may be called for schedulers
    and step hooks, and updates nothing.  Each reduced backward pass is a step: accumulate gradients with
    ``no_sync``.  Not supported are methods that need all gradients first (clipping by their norm, gradient
    scaling), sparse gradients, a Join that divides by the number of active ranks, and passes without
    gradients for some parameters.

    Args:
        hook: averages the gradients, for example ``allreduce_hook``.
        ddp: the model.
        zero: its optimiser, made with ``overlap_with_ddp=True``.

    Raises:
        UsageError: an argument is invalid, or model and optimiser have different groups.
    """
    inner = checked_hook(hook, "hook_with_zero_step")
    steps = _BucketSteps(ddp, zero, "hook_with_zero_step")
    waiting: list[tuple[GradBucket, Any]] = []

    def reduced_then_updated(state: Any, bucket: GradBucket) -> Future[torch.Tensor]:
        if bucket.index() == 0:
            waiting.clear()  # remaining from an interrupted pass
        future = inner(state, bucket)
        waiting.append((bucket, future))
        if bucket.is_last():
            exchanges = []
            for one, reduced in waiting:
                value = averaged_tensor(wait_for(reduced), inner)
                exchange = steps.update(one, value)
                exchange.start()
                exchanges.append(exchange)
            for exchange in exchanges:
                exchange.finish()
            waiting.clear()
        return future

    reduced_then_updated.__qualname__ = f"hook_with_zero_step({name_of(hook)})"
    return reduced_then_updated


def hook_with_zero_step_interleaved(
    hook: CommHook, ddp: DistributedDataParallel, zero: ZeroRedundancyOptimizer
) -> CommHook:
    """Return a hook like :func:`hook_with_zero_step` that updates each bucket as soon as it is reduced.

    Updates overlap with backward.  Better than the other hook if cores are free during backward.
    """
    inner = checked_hook(hook, "hook_with_zero_step_interleaved")
    steps = _BucketSteps(ddp, zero, "hook_with_zero_step_interleaved")

    def update(bucket: GradBucket, value: torch.Tensor) -> None:
        exchange = steps.update(bucket, value)
        exchange.start()
        exchange.finish()

    return then_update(inner, update, "hook_with_zero_step_interleaved")


class _BucketSteps:
    """Updates the parameters of one bucket at a time."""

    def __init__(self, ddp: DistributedDataParallel, zero: ZeroRedundancyOptimizer, name: str) -> None:
        if not isinstance(zero, ZeroRedundancyOptimizer) or not zero.overlap_with_ddp:
            raise UsageError(
                f"{name} takes a ZeroRedundancyOptimizer that was made with overlap_with_ddp=True, got "
                f"{type(zero).__name__}"
            )
        group = getattr(ddp, "group", None)
        if group is not zero.group:
            raise UsageError(
                f"{name} takes a model and an optimiser of one group: {type(ddp).__name__} has {group!r}, "
                f"the optimiser {zero.group!r}"
            )
        zero.hooked = True
        self._zero = zero
        # Callbacks of several buckets run concurrently; optimisers are not thread-safe.
        self._stepping = threading.Lock()
        self._exchanges: dict[int, tuple[list[torch.Tensor], Exchange]] = {}

    def update(self, bucket: GradBucket, value: torch.Tensor) -> Exchange:
        """Update this rank's parameters in ``bucket`` with the averages ``value``; return their exchange."""
        zero = self._zero
        parameters = bucket.parameters()
        own = [parameter for parameter in parameters if zero.owner(parameter) == zero.group.rank]
        with averages_as_gradients(bucket, value), self._stepping:
            zero.prepare_step()
            step_subset(zero.optim, own)
            zero._opt_called = True  # type: ignore[attr-defined]  # schedulers check this
            return self._exchange(bucket.index(), parameters)

    def _exchange(self, index: int, parameters: list[torch.Tensor]) -> Exchange:
        """Return the cached exchange of a bucket's parameters; buckets are rebuilt after the first pass."""
        known = self._exchanges.get(index)
        if known is not None and list(map(id, known[0])) == list(map(id, parameters)):
            return known[1]
        owned = [(owner, p) for p in parameters if (owner := self._zero.owner(p)) is not None]
        exchange = Exchange(
            self._zero.group, [p for _, p in owned], [owner for owner, _ in owned], as_views=False
        )
        self._exchanges[index] = (list(parameters), exchange)
        return exchange
