"""Notification of torch's dispatch modes about operations.

The methods of a C++ backend's group go through torch's dispatcher (``torch.ops.c10d.allreduce_``, ...), where
modes see each operation: ``CommDebugMode`` counts them.  The methods of a Python group are called directly.
While a mode is active, each operation is therefore also called on a torch group that does nothing, with
empty tensors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._C import _DisableTorchDispatch, _len_torch_dispatch_stack
from torch._C._distributed_c10d import FakeProcessGroup, HashStore
from torch._C._distributed_c10d import ProcessGroup as TorchGroup

from ..common.torch_features import group_method

#: Returns whether a mode is active (the number of modes).
modes_active = _len_torch_dispatch_stack


class Shown:
    """A torch group that only passes operations through torch's dispatcher.

    Args:
        rank, size: of the shoal group.
    """

    def __init__(self, rank: int, size: int) -> None:
        kind = TorchGroup.BackendType.CUSTOM
        idle = FakeProcessGroup._create_internal(rank, size)
        self._group = TorchGroup(HashStore(), rank, size)
        self._group._register_backend(torch.device("cpu"), kind, idle)
        self._group._set_default_backend(kind)

    def show(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Call the operator of the group method ``name`` with empty tensors in these arguments."""
        with _DisableTorchDispatch():
            args = [_emptied(argument) for argument in args]
            kwargs = {key: _emptied(argument) for key, argument in kwargs.items()}
        # shoal's methods accept more argument forms than torch's; those used by torch.distributed match.
        with contextlib.suppress(TypeError):
            group_method(self._group, name)(*args, **kwargs)


def _emptied(argument: Any) -> Any:
    if isinstance(argument, torch.Tensor):
        return torch.empty(0, dtype=argument.dtype, device="cpu")
    if isinstance(argument, (list, tuple)):  # ints are split sizes
        return [_emptied(part) for part in argument if not isinstance(part, int)]
    return argument
