"""Lets the dispatch modes of torch see operations.

The group object of a backend in C++ goes through torch's dispatcher (``torch.ops.c10d.allreduce_``, ...),
where modes see each operation: ``CommDebugMode`` counts them.  The methods of a group in Python are
called directly.  So while a mode is active, each operation is shown to it: the operator is called on a
group that does nothing, and with empty tensors in place of the others.
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

#: whether a mode is active, as a number
modes_active = _len_torch_dispatch_stack


class Shown:
    """A group of torch's for its dispatcher alone.

    Args:
        rank, size: of the group whose operations are shown.
    """

    def __init__(self, rank: int, size: int) -> None:
        kind = TorchGroup.BackendType.CUSTOM
        idle = FakeProcessGroup._create_internal(rank, size)
        self._group = TorchGroup(HashStore(), rank, size)
        self._group._register_backend(torch.device("cpu"), kind, idle)
        self._group._set_default_backend(kind)

    def show(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Call the operator behind the method ``name`` of a group, with these arguments."""
        with _DisableTorchDispatch():
            args = [_emptied(argument) for argument in args]
            kwargs = {key: _emptied(argument) for key, argument in kwargs.items()}
        # Our methods take arguments in more forms than torch's; those of torch.distributed's functions fit.
        with contextlib.suppress(TypeError):
            group_method(self._group, name)(*args, **kwargs)


def _emptied(argument: Any) -> Any:
    if isinstance(argument, torch.Tensor):
        return torch.empty(0, dtype=argument.dtype, device="cpu")
    if isinstance(argument, (list, tuple)):  # numbers are sizes of the parts of a tensor
        return [_emptied(part) for part in argument if not isinstance(part, int)]
    return argument
