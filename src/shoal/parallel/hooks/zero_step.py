"""ZeroRedundancyOptimizer in backward: each bucket's parameters are updated and sent when it is reduced.

A bucket's average is on all ranks at about the same time.  Each updates the parameters of the bucket that it
owns and broadcasts them, while later buckets are still computed or reduced.  Which rank owns what does not
depend on buckets, so steps count from the first one on, and may mix with those after backward.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import torch

from ...errors import UsageError
from ...future import Future
from ..zero import ZeroRedundancyOptimizer
from ..zero.exchange import Exchange
from .bucket import CommHook, GradBucket
from .contract import after, averaged, checked_hook, name_of, waited
from .optimizer_overlap import averages_as_gradients, step_some

if TYPE_CHECKING:
    from ..ddp import DistributedDataParallel


def hook_with_zero_step(
    hook: CommHook, ddp: DistributedDataParallel, zero: ZeroRedundancyOptimizer
) -> CommHook:
    """A hook that averages gradients with ``hook``, and lets ``zero`` update parameters when backward ends.

    The updates begin when the last gradient is computed, bucket by bucket, while later buckets are still
    reduced.  It is the better one of the two where reducing takes longer than updating.

        hook = hook_with_zero_step(allreduce_hook, model, optimizer)
        model.register_comm_hook(None, hook)

    After ``backward()`` all parameters are up to date on all ranks; ``zero.step()`` may be called, for
    schedulers and hooks, and does nothing more.  Each reduced backward pass is a step: accumulate gradients
    with ``no_sync``.  What needs all gradients first (clipping by their norm, gradient scaling) does not go
    with this, nor do sparse gradients, a Join that divides by the number of active ranks, and a pass that
    misses parameters.

    Args:
        hook: averages the gradients, ``allreduce_hook`` for instance.
        ddp: the model.
        zero: its optimiser, made with ``overlap_with_ddp=True``.

    Raises:
        UsageError: an argument is something else, or the two have different groups.
    """
    inner = checked_hook(hook, "hook_with_zero_step")
    steps = _BucketSteps(ddp, zero, "hook_with_zero_step")
    waiting: list[tuple[GradBucket, Any]] = []

    def reduced_then_updated(state: Any, bucket: GradBucket) -> Future[torch.Tensor]:
        if bucket.index() == 0:
            waiting.clear()  # an interrupted pass has left them
        future = inner(state, bucket)
        waiting.append((bucket, future))
        if bucket.is_last():
            exchanges = []
            for one, reduced in waiting:
                value = averaged(waited(reduced), inner)
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
    """The same as :func:`hook_with_zero_step`, but each bucket is updated as soon as it is reduced.

    Updates overlap with backward.  It is the better one of the two where cores are free while backward runs.
    """
    inner = checked_hook(hook, "hook_with_zero_step_interleaved")
    steps = _BucketSteps(ddp, zero, "hook_with_zero_step_interleaved")

    def reduced_and_updated(state: Any, bucket: GradBucket) -> Future[torch.Tensor]:
        def finish(value: torch.Tensor) -> torch.Tensor:
            exchange = steps.update(bucket, value)
            exchange.start()
            exchange.finish()
            return bucket.buffer()

        return after(inner, state, bucket, finish)

    reduced_and_updated.__qualname__ = f"hook_with_zero_step_interleaved({name_of(hook)})"
    return reduced_and_updated


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
        # Callbacks of several buckets run at once; optimisers are made for one thread.
        self._stepping = threading.Lock()
        self._exchanges: dict[int, tuple[list[torch.Tensor], Exchange]] = {}

    def update(self, bucket: GradBucket, value: torch.Tensor) -> Exchange:
        """Update what this rank owns of ``bucket``, whose average is ``value``.

        Returns:
            What brings the bucket's parameters to all ranks.
        """
        zero = self._zero
        parameters = bucket.parameters()
        own = [parameter for parameter in parameters if zero.owner(parameter) == zero.group.rank]
        with averages_as_gradients(bucket, value), self._stepping:
            zero.prepare_step()
            step_some(zero.optim, own)
            zero._opt_called = True  # type: ignore[attr-defined]  # schedulers ask for it
            return self._exchange(bucket.index(), parameters)

    def _exchange(self, index: int, parameters: list[torch.Tensor]) -> Exchange:
        """The exchange of a bucket's parameters; buckets are made anew once, after the first pass."""
        known = self._exchanges.get(index)
        if known is not None and list(map(id, known[0])) == list(map(id, parameters)):
            return known[1]
        owned = [(owner, p) for p in parameters if (owner := self._zero.owner(p)) is not None]
        exchange = Exchange(
            self._zero.group, [p for _, p in owned], [owner for owner, _ in owned], as_views=False
        )
        self._exchanges[index] = (list(parameters), exchange)
        return exchange
