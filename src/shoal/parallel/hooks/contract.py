"""Checks of the arguments and results of hooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...errors import UsageError
from ...future import Future
from ...group import ProcessGroup
from ...group.group_argument import adopted, backend_of, not_ours
from .bucket import CommHook, GradBucket


def group_of(state: object, bucket: GradBucket, hook: str) -> ProcessGroup:
    """Return the group ``state``, or the model's if that is None; raise UsageError for anything else."""
    if state is None:
        return bucket.group
    if (group := adopted(state)) is not None:
        return group
    if backend_of(state) is not None:
        raise not_ours(state, hook, "its state")
    raise UsageError(
        f"the state of {hook} is a ProcessGroup, or None for the group of the model; got "
        f"{type(state).__name__}.  Register it with model.register_comm_hook(None, {hook})"
    )


def checked_group(group: object, what: str) -> ProcessGroup | None:
    """Return ``group``, the argument ``what``, or raise UsageError if it is neither a group nor None."""
    if group is None:
        return None
    if (found := adopted(group)) is not None:
        return found
    if backend_of(group) is not None:
        raise not_ours(group, "a communication hook", what)
    raise UsageError(f"{what} must be a ProcessGroup or None, got {type(group).__name__}")


def checked_hook(hook: object, taker: str) -> CommHook:
    """Return ``hook``, an argument of the function ``taker``, or raise UsageError if it is not callable."""
    if callable(hook):
        return hook
    raise UsageError(
        f"{taker} takes a communication hook, a function hook(state, bucket) -> Future; got "
        f"{type(hook).__name__}"
    )


def after(
    hook: CommHook, state: Any, bucket: GradBucket, fn: Callable[[torch.Tensor], torch.Tensor]
) -> Future[torch.Tensor]:
    """Call ``hook``, then ``fn`` with the averaged gradients; return a future of the result of ``fn``.

    Raises UsageError if ``hook`` does not return a future of shoal or torch; the future fails with UsageError
    if the value of that future is not a tensor.
    """
    future = hook(state, bucket)
    if not callable(getattr(future, "then", None)):
        raise UsageError(
            f"the communication hook {name_of(hook)} must return a Future of a tensor, got "
            f"{type(future).__name__}"
        )
    return future.then(lambda done: fn(averaged(done.value(), hook)))


def averaged(value: object, hook: CommHook) -> torch.Tensor:
    """Return the tensor in ``value``, the result of ``hook``, or raise UsageError if there is none."""
    value = unpacked(value)
    if isinstance(value, torch.Tensor):
        return value
    raise UsageError(
        f"the future of the communication hook {name_of(hook)} must have a tensor as its value, got "
        f"{type(value).__name__}"
    )


def waited(future: Any, *, blocking: bool = False) -> Any:
    """Wait for a future and return its value; ``blocking`` is ignored for futures of torch."""
    return future.wait(blocking=blocking) if isinstance(future, Future) else future.wait()


def unpacked(value: object) -> object:
    """Unpack the list of one element that is the value of torch's futures of collectives."""
    return value[0] if isinstance(value, (list, tuple)) and len(value) == 1 else value


def name_of(hook: object) -> str:
    """Return the name of ``hook`` for error messages."""
    return str(getattr(hook, "__qualname__", None) or repr(hook))
