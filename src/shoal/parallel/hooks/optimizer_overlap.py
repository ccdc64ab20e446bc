"""Optimiser steps while backward still runs: a bucket's parameters are updated when its gradients are there.

A gradient is ready when autograd is done with its parameter, so the parameter may change before backward
ends; where something still needs the old value (a model that uses ``weight.detach()``, say), autograd notices
and raises.
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
from .bucket import CommHook, GradBucket
from .contract import after, checked_hook, name_of


def hook_then_optimizer(hook: CommHook, optimizer: torch.optim.Optimizer) -> CommHook:
    """A hook that lets ``optimizer`` update a bucket's parameters once ``hook`` has averaged gradients.

    The parameters are then up to date when ``backward()`` returns; do not call ``optimizer.step()``.
    Schedulers, ``state_dict`` and parameter groups work as usual.  Each backward pass is a step, so
    accumulate gradients with ``no_sync``.  Clipping by the norm of all gradients and gradient scaling need
    all gradients before the first step, so they do not go with this; nor does a backward pass that misses
    parameters: some are updated before the error is known.

    Args:
        hook: averages the gradients.
        optimizer: treats each parameter by itself, as all of ``torch.optim`` do but LBFGS.  Hooks on its
            ``step`` run once for each bucket.  Parameters that it does not hold are only reduced.

    Raises:
        UsageError: ``hook`` is no function, or ``optimizer`` cannot step some parameters alone.
    """
    inner = checked_hook(hook, "hook_then_optimizer")
    if not isinstance(optimizer, torch.optim.Optimizer) or isinstance(optimizer, torch.optim.LBFGS):
        raise UsageError(
            "hook_then_optimizer takes an optimiser from torch.optim, other than LBFGS, which treats all "
            f"parameters together; got {type(optimizer).__name__}"
        )
    # Callbacks of several buckets run at once; optimisers are made for one thread.
    stepping = threading.Lock()

    def update(bucket: GradBucket) -> None:
        with stepping:
            step_some(optimizer, bucket.parameters())

    return _then_update(inner, update, "hook_then_optimizer")


def hook_then_optimizers_in_backward(hook: CommHook) -> CommHook:
    """A hook that runs the optimisers which parameters carry, once ``hook`` has averaged their gradients.

    They are in the attribute ``_in_backward_optimizers`` of each parameter, where
    ``torch.distributed.optim._apply_optimizer_in_backward`` puts them.

    Raises:
        UsageError: ``hook`` is no function.
    """
    inner = checked_hook(hook, "hook_then_optimizers_in_backward")

    def update(bucket: GradBucket) -> None:
        for parameter in bucket.parameters():
            for optimizer in getattr(parameter, "_in_backward_optimizers", ()):
                optimizer.step()

    return _then_update(inner, update, "hook_then_optimizers_in_backward")


def take_over_optimizers_in_backward(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Keep the optimisers that parameters carry from running by themselves, before gradients are averaged.

    Returns:
        The parameters that carry one; :func:`hook_then_optimizers_in_backward` runs them from now on.
    """
    carrying = [parameter for parameter in parameters if hasattr(parameter, "_in_backward_optimizers")]
    # Whoever put optimisers there has imported this module; we need not.
    module: Any = sys.modules.get("torch.distributed.optim.apply_optimizer_in_backward")
    if module is not None:
        for parameter in carrying:
            for handle in module.param_to_optim_hook_handle_map.pop(parameter, []):
                handle.remove()
    return carrying


def _then_update(hook: CommHook, update: Callable[[GradBucket], None], name: str) -> CommHook:
    def reduced_and_updated(state: Any, bucket: GradBucket) -> Future[torch.Tensor]:
        def finish(value: torch.Tensor) -> torch.Tensor:
            with averages_as_gradients(bucket, value):
                update(bucket)
            return bucket.buffer()

        return after(hook, state, bucket, finish)

    reduced_and_updated.__qualname__ = f"{name}({name_of(hook)})"
    return reduced_and_updated


@contextmanager
def averages_as_gradients(bucket: GradBucket, value: torch.Tensor) -> Iterator[None]:
    """Within this context the averages in ``value`` are the gradients of the parameters of ``bucket``."""
    buffer = bucket.buffer()
    if value.data_ptr() != buffer.data_ptr() or value.dtype != buffer.dtype:
        with torch.no_grad():
            bucket.set_buffer(value)
    parameters = bucket.parameters()
    before = [parameter.grad for parameter in parameters]
    # With mixed precision these are other tensors than the bucket's.  They must outlive the assignments
    # below: torch frees a gradient that `grad = None` drops before it forgets where it was, and lets other
    # threads run in between; backward may be reading it there.
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


def step_some(optimizer: torch.optim.Optimizer, parameters: Iterable[torch.Tensor]) -> None:
    """Let ``optimizer`` step ``parameters`` and no others.

    It is a twin that does so, with the same state and settings but only these parameters; made anew each
    time, because schedulers and ``load_state_dict`` replace what the optimiser holds.
    """
    wanted = {id(parameter) for parameter in parameters}
    groups = []
    for group in optimizer.param_groups:
        some = [parameter for parameter in group["params"] if id(parameter) in wanted]
        if some:
            groups.append({**group, "params": some})
    if not groups:
        return
    twin = object.__new__(type(optimizer))
    twin.__dict__.update(optimizer.__dict__, param_groups=groups)
    twin.__dict__.pop("step", None)  # a scheduler puts one there that steps the whole optimiser
    twin.step()
    optimizer._opt_called = True  # type: ignore[attr-defined]  # schedulers ask for it
