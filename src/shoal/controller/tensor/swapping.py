"""Modules that move to nodes: their parameters stay the same objects, as optimisers and tied weights need it.

A parameter of the master and one of a node are of two classes, so torch would put a new one into the module.
Where a parameter goes to a node, or comes from one, it is swapped with what it becomes; elsewhere modules
move as torch moves them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import nn

from ...errors import UsageError
from .tensor import RemoteTensor

#: of a tensor of a module, what it is to become
_Fn = Callable[[torch.Tensor], torch.Tensor]


class Swapping:
    """Lets modules swap their parameters where they move to nodes or from there, until it is closed."""

    def __init__(self) -> None:
        self._apply = apply = nn.Module._apply

        def apply_swapping(module: nn.Module, fn: _Fn, recurse: bool = True) -> nn.Module:
            swapped = fn if type(fn) is _Swapped else _Swapped(fn)
            return cast(nn.Module, apply(module, swapped, recurse))  # type: ignore[no-untyped-call]

        nn.Module._apply = apply_swapping  # type: ignore[method-assign]

    def close(self) -> None:
        """Let modules move as they did."""
        nn.Module._apply = self._apply  # type: ignore[method-assign]


class _Swapped:
    """A function of a module's tensors that swaps parameters itself."""

    def __init__(self, fn: _Fn) -> None:
        self._fn = fn

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        made = self._fn(tensor)
        if (type(made) is RemoteTensor) is (type(tensor) is RemoteTensor):
            return made
        if nn.parameter.is_lazy(tensor):
            raise UsageError(
                f"a parameter that is not initialized yet cannot move to {made.device}: give the lazy module "
                "one input here first"
            )
        if not isinstance(tensor, nn.Parameter):
            return made
        gradient, tensor.grad = tensor.grad, None
        try:
            becomes = nn.Parameter(made, tensor.requires_grad)
            torch.utils.swap_tensors(tensor, becomes)  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            tensor.grad = gradient
            raise UsageError(
                f"a parameter of shape {list(tensor.shape)} cannot move from {tensor.device} to "
                f"{made.device} while a weak reference, a graph, or a module of TorchScript holds it: move a "
                f"module before its first forward pass, and before it becomes one of TorchScript ({error})"
            ) from error
        if gradient is not None:
            tensor.grad = self._fn(gradient)
        return tensor.data
