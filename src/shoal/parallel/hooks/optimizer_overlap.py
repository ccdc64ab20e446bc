"""Optimiser steps during backward: a bucket's parameters are updated when its gradients are averaged.

When a gradient is ready, autograd no longer needs its parameter, so the parameter may change before backward
ends.  Autograd raises if the old value is needed (by a model that uses ``weight.detach()``, for example).
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ...errors import UsageError
from ...future import Future
from .contract import CommHook, GradBucket, checked_hook, name_of, store_average, then_apply


def hook_then_optimizer(hook: CommHook, optimizer: torch.optim.Optimizer) -> CommHook:
    """Return a hook that averages a bucket's gradients with ``hook``, then updates its parameters.

    All parameters are updated when ``backward()`` returns; do not call ``optimizer.step()``.  Schedulers,
    ``state_dict`` and parameter groups work as usual.  Each backward pass is a step, so accumulate gradients
    with ``no_sync``.  Not supported: methods that need all gradients first (clipping by their norm, gradient
    scaling); passes without gradients for some parameters (others are updated before the error is known).

    Args:
        hook: averages the gradients.
        optimizer: an optimiser that updates each parameter independently, like all of ``torch.optim`` except
            LBFGS.  Hooks on its ``step`` run for each bucket.  It may have a subset of the model's
            parameters.

    Raises:
        UsageError: ``hook`` is not callable, or ``optimizer`` cannot update a subset of its parameters.
    """
    inner = checked_hook(hook, "hook_then_optimizer")
    if not isinstance(optimizer, torch.optim.Optimizer) or isinstance(optimizer, torch.optim.LBFGS):
        raise UsageError(
            "hook_then_optimizer takes an optimiser from torch.optim, other than LBFGS, which treats all "
            f"parameters together; got {type(optimizer).__name__}"
        )
    # Callbacks of several buckets run concurrently; optimisers are not thread-safe.
    stepping = threading.Lock()

    def update(bucket: GradBucket, value: torch.Tensor) -> None:
        with averages_as_gradients(bucket, value), stepping:
            step_subset(optimizer, bucket.parameters())

    return then_update(inner, update, "hook_then_optimizer")


def hook_then_optimizers_in_backward(hook: CommHook) -> CommHook:
    """Return a hook that runs the parameters' own optimisers once ``hook`` has averaged the gradients.

    ``torch.distributed.optim._apply_optimizer_in_backward`` stores them in ``_in_backward_optimizers``.

    Raises:
        UsageError: ``hook`` is not callable.
    """
    inner = checked_hook(hook, "hook_then_optimizers_in_backward")

    def update(bucket: GradBucket, value: torch.Tensor) -> None:
        with averages_as_gradients(bucket, value):
            for parameter in bucket.parameters():
                for optimizer in getattr(parameter, "_in_backward_optimizers", ()):
                    optimizer.step()

    return then_update(inner, update, "hook_then_optimizers_in_backward")


def take_over_optimizers_in_backward(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Remove torch's hooks that run the parameters' own optimisers before gradients are averaged.

    Returns the parameters with such optimisers, for :func:`hook_then_optimizers_in_backward`.
    """
    carrying = [parameter for parameter in parameters if hasattr(parameter, "_in_backward_optimizers")]
    # If there are such optimisers, torch has imported this module.
    module: Any = sys.modules.get("torch.distributed.optim.apply_optimizer_in_backward")
    if module is not None:
        for parameter in carrying:
            for handle in module.param_to_optim_hook_handle_map.pop(parameter, []):
                handle.remove()
    return carrying


def then_update(hook: CommHook, update: Callable[[GradBucket, torch.Tensor], None], name: str) -> CommHook:
    """Return the hook ``name``, which calls ``hook`` and then ``update`` with the averaged gradients."""

    def reduced_and_updated(state: Any, bucket: GradBucket) -> Future[torch.Tensor]:
        def finish(value: torch.Tensor) -> torch.Tensor:
            update(bucket, value)
            return bucket.buffer()

        return then_apply(hook, state, bucket, finish)

    reduced_and_updated.__qualname__ = f"{name}({name_of(hook)})"
    return reduced_and_updated


@contextmanager
def averages_as_gradients(bucket: GradBucket, value: torch.Tensor) -> Iterator[None]:
    """A context in which the averages in ``value`` are the gradients of the parameters of ``bucket``."""
    store_average(bucket, value)
    parameters = bucket.parameters()
    before = [parameter.grad for parameter in parameters]
    # With mixed precision these are not the bucket's tensors.  They must outlive the assignments below: on
    # `grad = None`, torch frees the gradient before it clears the pointer, and other threads can run in
    # between; backward may be reading the gradient.
    averages = [
        gradient.to(parameter.dtype)
        for parameter, gradient in zip(parameters, bucket.gradients(), strict=True)
    ]
    for parameter, average in zip(parameters, averages, strict=True):
        parameter.grad = average
    try:
        yield
    finally:
        for parameter, old in zip(parameters, before, strict=True):
            parameter.grad = old


def step_subset(optimizer: torch.optim.Optimizer, parameters: Iterable[torch.Tensor]) -> None:
    """Run a step of ``optimizer`` for ``parameters`` only.

    Steps a copy of the optimiser with the same state and settings but only these parameters.  It is made for
    each step, because schedulers and ``load_state_dict`` replace attributes of the optimiser.
    """
    wanted = {id(parameter) for parameter in parameters}
    groups = []
    for group in optimizer.param_groups:
        some = [parameter for parameter in group["params"] if id(parameter) in wanted]
        if some:
            groups.append({**group, "params": some})
    if not groups:
        return
    subset_optimizer = object.__new__(type(optimizer))
    subset_optimizer.__dict__.update(optimizer.__dict__, param_groups=groups)
    subset_optimizer.__dict__.pop("step", None)  # set by schedulers; it steps the whole optimiser
    subset_optimizer.step()
    optimizer._opt_called = True  # type: ignore[attr-defined]  # schedulers check this
