"""Checks of the arguments and results of hooks, which name the hook and say what was expected."""

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
    """The ranks to reduce over: ``state`` if it is a group, those of the model if it is None.

    Raises:
        UsageError: it is something else.
    """
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
    """``group``, which an argument called ``what`` gave.

    Raises:
        UsageError: it is neither a group nor None.
    """
    if group is None:
        return None
    if (found := adopted(group)) is not None:
        return found
    if backend_of(group) is not None:
        raise not_ours(group, "a communication hook", what)
    raise UsageError(f"{what} must be a ProcessGroup or None, got {type(group).__name__}")


def checked_hook(hook: object, taker: str) -> CommHook:
    """``hook``, which ``taker`` was given to build upon.

    Raises:
        UsageError: it cannot be called.
    """
    if callable(hook):
        return hook
    raise UsageError(
        f"{taker} takes a communication hook, a function hook(state, bucket) -> Future; got "
        f"{type(hook).__name__}"
    )


def after(
    hook: CommHook, state: Any, bucket: GradBucket, fn: Callable[[torch.Tensor], torch.Tensor]
) -> Future[torch.Tensor]:
    """Call ``hook`` and then ``fn`` with the averaged gradients, once they are there.

    Args:
        hook: one that returns a future of ours or of torch's.

    Returns:
        A future of what ``fn`` returns.

    Raises:
        UsageError: the hook returned something else; through the future: the value is no tensor.
    """
    future = hook(state, bucket)
    if not callable(getattr(future, "then", None)):
        raise UsageError(
            f"the communication hook {name_of(hook)} must return a Future of a tensor, got "
            f"{type(future).__name__}"
        )
    return future.then(lambda done: fn(averaged(done.value(), hook)))


def averaged(value: object, hook: CommHook) -> torch.Tensor:
    """The gradients in the value of the future that ``hook`` returned: a tensor, or a list of one.

    Raises:
        UsageError: there is none.
    """
    value = unpacked(value)
    if isinstance(value, torch.Tensor):
        return value
    raise UsageError(
        f"the future of the communication hook {name_of(hook)} must have a tensor as its value, got "
        f"{type(value).__name__}"
    )


def waited(future: Any, *, blocking: bool = False) -> Any:
    """The value of a future of ours or of torch's, which decides itself whether to block."""
    return future.wait(blocking=blocking) if isinstance(future, Future) else future.wait()


def unpacked(value: object) -> object:
    """The value of a hook's future without the list of one that torch's futures of collectives have."""
    return value[0] if isinstance(value, (list, tuple)) and len(value) == 1 else value


def name_of(hook: object) -> str:
    """The name of ``hook`` in error messages."""
    return str(getattr(hook, "__qualname__", None) or repr(hook))
