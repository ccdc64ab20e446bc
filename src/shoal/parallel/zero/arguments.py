"""Checks of the arguments of ZeroRedundancyOptimizer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from ...errors import UsageError
from ..consistency import describe_parameter


def describe(group: Mapping[str, Any], index: int) -> list[tuple[str, str]]:
    """The properties of parameter group ``index`` that must be equal on all ranks, by name."""
    names = group.get("param_names")
    items = []
    for place, parameter in enumerate(group["params"]):
        name = f"{place}" if names is None else f"{names[place]!r}"
        items.append((f"parameter {name} of group {index}", describe_parameter(parameter)))
    for name, value in sorted(group.items()):
        if isinstance(value, (bool, int, float, str, tuple, type(None))):
            items.append((f"option {name} of group {index}", repr(value)))
    return items


def checked_parameters(params: Iterable[Any], optimizer_class: type[Optimizer]) -> list[Any]:
    """``params`` as a list that can be gone through again.

    Raises:
        UsageError: there are none, some are none, or the optimiser cannot be distributed.
    """
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


def check_copies(copies: object, size: int, *, overlap_with_ddp: bool) -> None:
    """Refuse a number of copies that a group of ``size`` cannot have.

    Raises:
        UsageError: it is out of range, or parameters are updated in backward.
    """
    if not isinstance(copies, int) or isinstance(copies, bool) or not 1 <= copies <= size:
        raise UsageError(
            f"copies={copies!r}: expected 1 to {size}: each copy of a state is on another rank of the group"
        )
    if copies > 1 and overlap_with_ddp:
        raise UsageError(
            f"copies={copies} with overlap_with_ddp=True: a hook that updates parameters in backward lets "
            "one owner do it; leave overlap_with_ddp out, and call step() after backward"
        )


def _entries(group: dict[str, Any]) -> list[Any]:
    """The parameters of a group as the user gave it."""
    if "params" not in group:
        raise UsageError(f"a parameter group needs 'params', got {sorted(group)}")
    params = group["params"]
    group["params"] = [params] if isinstance(params, torch.Tensor) else list(params)
    entries: list[Any] = group["params"]
    return entries
