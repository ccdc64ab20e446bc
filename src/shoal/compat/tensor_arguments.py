"""Conversion of torch's tensor arguments: one tensor, a list of one, or lists of lists."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ..errors import UsageError


def only(tensors: Any, what: str) -> torch.Tensor:
    """Return the only tensor of torch's list (which once had one tensor per device of the process)."""
    if isinstance(tensors, torch.Tensor):
        return real(tensors)
    if len(tensors) != 1:
        raise UsageError(f"{what}: expected one tensor per rank, got {len(tensors)}")
    return real(tensors[0])


def are_several(tensors: Any) -> bool:
    """Return whether torch's list has several tensors of this rank."""
    return not isinstance(tensors, torch.Tensor) and len(tensors) > 1


def parts(tensors: Any, what: str) -> list[torch.Tensor]:
    """Return one tensor per rank, from torch's list of tensors or list of one such list."""
    if tensors and not isinstance(tensors[0], torch.Tensor):
        if len(tensors) != 1:
            raise UsageError(f"{what}: expected one list of tensors, got {len(tensors)}")
        tensors = tensors[0]
    return [real(x) for x in tensors]


def real(x: torch.Tensor) -> torch.Tensor:
    """Return ``x``, or the tensor in the result of a functional collective, after waiting for it."""
    if x.__class__ is torch.Tensor:
        return x
    wait = getattr(x, "trigger_wait", None)
    return x if wait is None else wait()


def first_tensor(arguments: Iterable[Any]) -> torch.Tensor | None:
    """Return the first tensor in arguments that may be tensors, lists of them, and lists of lists."""
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            return argument
        if isinstance(argument, (list, tuple)) and (found := first_tensor(argument)) is not None:
            return found
    return None


def every_tensor(argument: Any) -> list[torch.Tensor]:
    """Return the tensors in an argument that may be a tensor, a list of them, or a list of lists."""
    if isinstance(argument, torch.Tensor):
        return [real(argument)]
    if isinstance(argument, (list, tuple)):
        return [x for part in argument for x in every_tensor(part)]
    return []
