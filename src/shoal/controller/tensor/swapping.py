"""Moving modules to nodes such that parameters stay the same objects, for optimizers and tied weights.

Parameters of the master and of nodes have different classes, so torch would replace them in the module.
Instead, a parameter that moves to or from a node is swapped in place (``torch.utils.swap_tensors``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import nn

from ...errors import UsageError
from .tensor import RemoteTensor

#: maps a tensor of a module to its replacement
_Fn = Callable[[torch.Tensor], torch.Tensor]


class Swapping:
    """Patches ``nn.Module._apply`` to swap parameters that move to or from nodes, until :meth:`close`."""

    def __init__(self) -> None:
        self._apply = apply = nn.Module._apply

        def apply_swapping(module: nn.Module, fn: _Fn, recurse: bool = True) -> nn.Module:
            swapped = fn if type(fn) is _Swapped else _Swapped(fn)
            return cast(nn.Module, apply(module, swapped, recurse))  # type: ignore[no-untyped-call]

        nn.Module._apply = apply_swapping  # type: ignore[method-assign]

    def close(self) -> None:
        """Restore torch's ``_apply``."""
        nn.Module._apply = self._apply  # type: ignore[method-assign]


class _Swapped:
    """Wraps the function given to ``_apply``; swaps parameters in place."""

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
                f"{made.device} while a weak reference, a graph, or a TorchScript module holds it: move a "
                f"module before its first forward pass and before compiling it with TorchScript ({error})"
            ) from error
        if gradient is not None:
            tensor.grad = self._fn(gradient)
        return tensor.data
