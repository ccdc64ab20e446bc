"""Decorators of the group methods that issue operations.

They call the group's hooks, pass tensors of other devices to the group of another backend, and notify
torch's dispatch modes of operations.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

from ..common.torch_features import group_method
from .hooks import HookedOperation
from .shown import modes_active
from .tensor_arguments import first_tensor

Method = TypeVar("Method", bound=Callable[..., Any])


def routed(hook: str, *, inputs: str = "", outputs: str = "", root: str = "") -> Callable[[Method], Method]:
    """Decorate a method with tensors; see :class:`~shoal.compat.hooks.HookedOperation` for the arguments.

    A call with tensors of another backend's devices is forwarded to that backend's group.  Torch's dispatch
    modes are notified of other calls.
    """

    def decorate(method: Method) -> Method:
        name = method.__name__
        operation = HookedOperation(method, hook, inputs, outputs, root)

        def issue(self: Any, *args: Any, **kwargs: Any) -> Any:
            if self._others:
                x = first_tensor((*args, *kwargs.values()))
                if x is not None and x.device.type in self._others:
                    return group_method(self._others[x.device.type], name)(*args, **kwargs)
            if modes_active():
                self._shown.show(name, args, kwargs)
            return method(self, *args, **kwargs)

        @functools.wraps(method)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            if self._hooked:
                return self._hooks.around(operation, issue, self, args, kwargs)
            if self._others or modes_active():
                return issue(self, *args, **kwargs)
            return method(self, *args, **kwargs)

        return cast(Method, call)

    return decorate


def hooked(hook: str) -> Callable[[Method], Method]:
    """Decorate a method without tensors: its hooks are called; it does its own routing."""

    def decorate(method: Method) -> Method:
        operation = HookedOperation(method, hook)

        @functools.wraps(method)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            if self._hooked:
                return self._hooks.around(operation, method, self, args, kwargs)
            return method(self, *args, **kwargs)

        return cast(Method, call)

    return decorate
