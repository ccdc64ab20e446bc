"""Validation of the arguments of ZeroRedundancyOptimizer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from ...errors import UsageError
from ..coalesced import broadcast_obstacle, writable_elements
from ..consistency import describe_parameter, describe_tensor

#: The argument ``what`` of :func:`check_same`.
MISMATCH = "passed different arguments to ZeroRedundancyOptimizer"


def describe(
    groups: Sequence[Mapping[str, Any]],
    settings: Mapping[str, str],
    first: int = 0,
    *,
    shapes_only: bool = False,
) -> list[tuple[str, str]]:
    """Describe what must be equal on all ranks: ``settings``, and groups that are numbered from ``first``.

    With ``shapes_only``, leave out options and ``requires_grad``, which may change between steps.
    """
    describe_one = describe_tensor if shapes_only else describe_parameter
    items = [(f"option {name}", value) for name, value in settings.items()]
    items += [(name, describe_one(parameter)) for name, parameter in named_parameters(groups, first)]
    for index, group in enumerate(groups, first) if not shapes_only else ():
        for name, value in sorted(group.items()):
            if isinstance(value, (bool, int, float, str, tuple, type(None))):
                items.append((f"option {name} of group {index}", repr(value)))
    return items


def check_can_be_sent(groups: Iterable[Mapping[str, Any]], first: int = 0) -> None:
    """Raise UsageError, with reasons, unless owners can send the parameters of ``groups``.

    Groups are numbered from ``first``.
    """
    lines = []
    for name, parameter in named_parameters(groups, first):
        reason = broadcast_obstacle(parameter)
        if reason is None and writable_elements(parameter).shape != parameter.shape:
            reason = "it is expanded, so no optimiser can write to it"
        if reason is not None:
            lines.append(f"  {name}: {reason}")
    if lines:
        raise UsageError(
            "ZeroRedundancyOptimizer cannot send these parameters to other ranks:\n" + "\n".join(lines)
        )


def named_parameters(
    groups: Iterable[Mapping[str, Any]], first: int = 0
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters of groups that are numbered from ``first``, with names for messages."""
    for index, group in enumerate(groups, first):
        given = group.get("param_names")
        for place, parameter in enumerate(group["params"]):
            yield f"parameter {place if given is None else repr(given[place])} of group {index}", parameter


def checked_parameters(params: Iterable[Any], optimizer_class: type[Optimizer]) -> list[Any]:
    """Return ``params`` as a list; raise UsageError if an argument is invalid."""
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, Optimizer)):
        raise UsageError(f"optimizer_class must be a class of torch.optim's kind, got {optimizer_class!r}")
    if issubclass(optimizer_class, torch.optim.LBFGS):
        raise UsageError(
            "LBFGS takes all parameters as one vector, so they cannot be distributed; use it without "
            "ZeroRedundancyOptimizer"
        )
    if isinstance(params, torch.Tensor) or not isinstance(params, Iterable):
        raise UsageError(
            f"params must be an iterable of tensors or of dictionaries, got {type(params).__name__}"
        )
    given = list(params)
    parameters = [
        entry[1] if isinstance(entry, tuple) else entry
        for item in given
        for entry in (_entries(item) if isinstance(item, dict) else [item])
    ]
    if not parameters:
        raise UsageError("there are no parameters to optimise; give at least one")
    for index, parameter in enumerate(parameters):
        if not isinstance(parameter, torch.Tensor):
            raise UsageError(f"parameter {index} must be a tensor, got {type(parameter).__name__}")
    if len(set(parameters)) != len(parameters):
        raise UsageError("a parameter is given twice; each can be in one group, once")
    return given


def check_copies(copies: Any, size: int | None, *, overlap_with_ddp: bool) -> None:
    """Raise UsageError if ``copies`` is invalid for a group of ``size`` ranks (None: no group yet)."""
    is_number = isinstance(copies, int) and not isinstance(copies, bool) and copies >= 1
    if not is_number or (size is not None and copies > size):
        most = "the size of the group" if size is None else size
        raise UsageError(
            f"copies={copies!r}: expected 1 to {most}: each copy of a state is on another rank of the group"
        )
    if copies > 1 and overlap_with_ddp:
        raise UsageError(
            f"copies={copies} with overlap_with_ddp=True: a hook that updates parameters in backward "
            "supports one owner only; omit overlap_with_ddp, and call step() after backward"
        )


def _entries(group: dict[str, Any]) -> list[Any]:
    """Return the parameters of a user's group, after making ``group["params"]`` a list."""
    if "params" not in group:
        raise UsageError(f"a parameter group needs 'params', got {sorted(group)}")
    params = group["params"]
    group["params"] = [params] if isinstance(params, torch.Tensor) else list(params)
    entries: list[Any] = group["params"]
    return entries
