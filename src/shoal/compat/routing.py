"""Decorators of the group methods that issue operations.

They call the group's hooks, pass tensors of other devices to the group of another backend, and notify
torch's dispatch modes of operations.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch._C import _DisableTorchDispatch, _len_torch_dispatch_stack
from torch._C._distributed_c10d import FakeProcessGroup, HashStore
from torch._C._distributed_c10d import ProcessGroup as TorchGroup

from ..common.torch_features import group_method
from .hooks import HookedOperation
from .tensor_arguments import first_tensor

if TYPE_CHECKING:
    from .process_group import TorchProcessGroup

Method = TypeVar("Method", bound=Callable[..., Any])


def routed(hook: str, *, inputs: str = "", outputs: str = "", root: str = "") -> Callable[[Method], Method]:
    """Decorate a method; see :class:`~shoal.compat.hooks.HookedOperation` for the arguments.

    A call with tensors of another backend's devices is forwarded to that backend's group.  Torch's dispatch
    modes are notified of other calls with tensors.  A method without tensors does its own routing.
    """

    def decorate(method: Method) -> Method:
        name = method.__name__
        operation = HookedOperation(method, hook, inputs, outputs, root)

        def route(self: TorchProcessGroup, *args: Any, **kwargs: Any) -> Any:
            if self._others:
                x = first_tensor((*args, *kwargs.values()))
                if x is not None and x.device.type in self._others:
                    return group_method(self._others[x.device.type], name)(*args, **kwargs)
            if modes_active():
                self._dispatch_notifier.notify(name, args, kwargs)
            return method(self, *args, **kwargs)

        issue = route if inputs or outputs else method

        @functools.wraps(method)
        def call(self: TorchProcessGroup, *args: Any, **kwargs: Any) -> Any:
            if self._hooked:
                return self._hooks.around(operation, issue, self, args, kwargs)
            if self._others or modes_active():
                return issue(self, *args, **kwargs)
            return method(self, *args, **kwargs)

        return cast(Method, call)

    return decorate


#: Returns whether a mode is active (the number of modes).
modes_active = _len_torch_dispatch_stack


class DispatchNotifier:
    """A torch group that only passes operations through torch's dispatcher.

    The methods of a C++ backend's group go through the dispatcher (``torch.ops.c10d.allreduce_``, ...), where
    modes see each operation: ``CommDebugMode`` counts them.  The methods of a Python group are called
    directly.  While a mode is active, each operation is therefore also called on this group, which does
    nothing, with empty tensors.
    """

    def __init__(self, rank: int, size: int) -> None:
        kind = TorchGroup.BackendType.CUSTOM
        idle = FakeProcessGroup._create_internal(rank, size)
        self._group = TorchGroup(HashStore(), rank, size)
        self._group._register_backend(torch.device("cpu"), kind, idle)
        self._group._set_default_backend(kind)

    def notify(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Call the operator of the group method ``name`` with empty tensors in these arguments."""
        with _DisableTorchDispatch():
            args = [_without_data(argument) for argument in args]
            kwargs = {key: _without_data(argument) for key, argument in kwargs.items()}
        # shoal's methods accept more argument forms than torch's; those used by torch.distributed match.
        with contextlib.suppress(TypeError):
            group_method(self._group, name)(*args, **kwargs)


def _without_data(argument: Any) -> Any:
    if isinstance(argument, torch.Tensor):
        return torch.empty(0, dtype=argument.dtype, device="cpu")
    if isinstance(argument, (list, tuple)):  # ints are split sizes
        return [_without_data(part) for part in argument if not isinstance(part, int)]
    return argument
