"""What a recorded step depends on beside its arguments, found through its function, and whether it changed.

Found are the values of closures and of globals that the function names, and what hangs on them: the
modules' parameters, buffers, flags and hooks, the optimisers' groups and state, functions that it calls, and
objects' attributes that it names.  Of numbers, flags and texts the value is compared, of tensors the handle,
of other things the identity.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch.nn.modules.lazy import LazyModuleMixin

from .issuing import is_inside
from .tensor import Handle, RemoteTensor

#: what is compared by value
PLAIN = frozenset(
    {bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, range}
)
#: attributes of modules that only their saving looks at
_SAVING = ("_state_dict", "_load_state_dict", "_non_persistent")
#: methods that are called without being named
_CALLED = frozenset({"forward", "__call__"})
#: containers with more elements, none of them of the mode, count as one thing
_MANY = 1000


class Guards:
    """The state of all that was found.

    Attributes:
        tensors: each tensor, its handle, whether it requires a gradient, and its path.
        grads: tensors that may get gradients, those that they have, and their handles.
    """

    def __init__(self, roots: Iterable[tuple[str, Any]], names: set[str]) -> None:
        self.tensors: list[tuple[RemoteTensor, Handle, bool, str]] = []
        self.grads: list[tuple[RemoteTensor, RemoteTensor | None, Handle | None]] = []
        self.names = set(names)
        self._same: list[tuple[Any, Any, Any, str]] = []
        self._equal: list[tuple[Any, Any, Any, str]] = []
        self._absent: list[tuple[Any, str, str]] = []
        self._lengths: list[tuple[Any, int, str]] = []
        self._cells: list[tuple[CellType, Any, str]] = []
        self._versions: list[tuple[torch.Tensor, int, str]] = []
        self._seen: dict[int, Any] = {}
        for path, root in roots:
            self._visit(root, path)
        self._seen.clear()

    @property
    def handles(self) -> set[Handle]:
        """Of the tensors and of their gradients."""
        found = {handle for _, handle, _, _ in self.tensors}
        return found | {handle for _, _, handle in self.grads if handle is not None}

    def let_go_of_grads(self) -> dict[int, bool]:
        """Which tensors have gradients, by ``id``; holds them no more."""
        had = {id(tensor): grad is not None for tensor, grad, _ in self.grads}
        self.grads.clear()
        return had

    # -- comparison ------------------------------------------------------------------------------

    def changed(self) -> str | None:
        """The path of something that is not as it was; None: all is."""
        path = "what it uses"
        try:
            for container, key, expected, path in self._same:
                if container[key] is not expected:
                    return path
            for container, key, expected, path in self._equal:
                value = container[key]
                if value is not expected and (value != expected or type(value) is not type(expected)):
                    return path
            for container, key, path in self._absent:
                if key in container:
                    return path
            for container, length, path in self._lengths:
                if len(container) != length:
                    return path
            for cell, expected, path in self._cells:
                value = cell.cell_contents
                if value is not expected and (
                    type(value) not in PLAIN or value != expected or type(value) is not type(expected)
                ):
                    return path
            for tensor, handle, required, path in self.tensors:
                if tensor.handle is not handle or tensor.requires_grad is not required:
                    return path
            for value, version, path in self._versions:
                if value._version != version:
                    return path
        except (KeyError, IndexError, ValueError):
            return path
        return None

    def changed_by_call(self, before: Guards) -> str | None:
        """What the call changed since ``before`` that no replay would change."""
        theirs = {_place(c, k): v for c, k, v, _ in before._equal}
        for c, k, v, path in self._equal:
            old = theirs.get(_place(c, k), v)
            if old != v:
                return f"{path} was {old!r} before the call and is {v!r} after it"
        cells = {id(c): v for c, v, _ in before._cells}
        for cell, v, path in self._cells:
            old = cells.get(id(cell), v)
            if (
                old is not v
                and not (type(old) is type(v) is RemoteTensor)
                and (type(v) not in PLAIN or old != v)
            ):
                return f"{path} was another before the call"
        same = {_place(c, k): v for c, k, v, _ in before._same}
        for c, k, v, path in self._same:
            old = same.get(_place(c, k))
            if old is not v and not (type(old) is type(v) is RemoteTensor):
                return f"{path} was another before the call"
        lengths = {id(c): n for c, n, _ in before._lengths}
        for c, n, path in self._lengths:
            if lengths.get(id(c), n) != n:
                return f"{path} had {lengths[id(c)]} elements before the call and has {n} after it"
        handles = {id(t): h for t, h, _, _ in before.tensors}
        for tensor, handle, _, path in self.tensors:
            if handles.get(id(tensor), handle) is not handle:
                return f"{path} stands for another tensor after the call"
        versions = {id(t): n for t, n, _ in before._versions}
        for value, version, path in self._versions:
            if versions.get(id(value), version) != version:
                return f"{path}, a tensor of the master, was changed by the call"
        return None

    # -- finding ---------------------------------------------------------------------------------

    def _visit(self, value: Any, path: str) -> None:
        kind = type(value)
        if kind in PLAIN or id(value) in self._seen:
            return
        self._seen[id(value)] = value
        if kind is RemoteTensor:
            self.tensors.append((value, value.handle, value.requires_grad, path))
            grad: Any = value.grad if value.is_leaf else None
            if value.is_leaf and (value.requires_grad or grad is not None):
                self.grads.append((value, grad, None if grad is None else grad.handle))
        elif isinstance(value, torch.Tensor):
            self._versions.append((value, value._version, path))
        elif isinstance(value, torch.nn.Module):
            self._lengths.append((value.__dict__, len(value.__dict__), path))
            for key in [each for each in value.__dict__ if not each.startswith(_SAVING)]:
                self._slot(value.__dict__, key, f"{path}.{key}")
            if not isinstance(value, LazyModuleMixin):
                self._of_class(value, path)
        elif isinstance(value, torch.optim.Optimizer):
            self._slot(value.__dict__, "param_groups", f"{path}.param_groups")
            self._slot(value.__dict__, "state", f"{path}.state")
        elif isinstance(value, FunctionType):
            self._function(value, path)
        elif isinstance(value, MethodType):
            self._visit(value.__func__, path)
            self._visit(value.__self__, f"{path}.__self__")
        elif isinstance(value, partial):
            for i, each in enumerate((value.func, *value.args, *value.keywords.values())):
                self._visit(each, f"{path}[{i}]")
        elif isinstance(value, dict):
            if self._is_of_interest(value, value.values()):
                self._dictionary(value, path)
        elif isinstance(value, (list, tuple)):
            if self._is_of_interest(value, value):
                if kind is not tuple:
                    self._lengths.append((value, len(value), path))
                for i in range(len(value)):
                    self._slot(value, i, f"{path}[{i}]")
        elif isinstance(value, ModuleType):
            if not _is_library(value.__name__):
                self._named(value.__dict__, path)
        elif isinstance(value, type) or kind.__module__.startswith("shoal."):
            return
        elif isinstance(getattr(value, "__dict__", None), dict):
            self._named(value.__dict__, path)
            self._of_class(value, path)

    def _is_of_interest(self, container: Any, values: Iterable[Any]) -> bool:
        if len(container) <= _MANY:
            return True
        first = next(iter(values))
        return isinstance(first, (RemoteTensor, torch.nn.Module, dict))

    def _dictionary(self, held: dict[Any, Any], path: str) -> None:
        self._lengths.append((held, len(held), path))
        for key in list(held):
            self._slot(held, key, f"{path}.{key}" if isinstance(key, str) else f"{path}[...]")

    def _named(self, held: dict[Any, Any], path: str) -> None:
        for name in self.names.intersection(held):
            self._slot(held, name, f"{path}.{name}")

    def _slot(self, container: Any, key: Any, path: str) -> None:
        value = container[key]
        if type(value) in PLAIN:
            if type(container) is not tuple:
                self._equal.append((container, key, value, path))
            return
        if type(container) is not tuple:
            self._same.append((container, key, value, path))
        self._visit(value, path)

    def _of_class(self, value: Any, path: str) -> None:
        """Methods and other attributes that the object has of its class."""
        for each in type(value).__mro__:
            if _is_library(each.__module__):
                continue
            for name in self.names.intersection(each.__dict__) | _CALLED.intersection(each.__dict__):
                attribute = each.__dict__[name]
                if type(attribute) in PLAIN and name not in value.__dict__:
                    self._equal.append((each.__dict__, name, attribute, f"{path}.{name}"))
                    self._absent.append((value.__dict__, name, f"{path}.{name}"))
                self._visit(getattr(attribute, "__func__", attribute), f"{path}.{name}")

    def _function(self, function: FunctionType, path: str) -> None:
        code = function.__code__
        if is_inside(code) or _is_library(function.__module__):
            return
        used = set(_names(code))
        self.names |= used
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            try:
                value = cell.cell_contents
            except ValueError:
                continue
            self._cells.append((cell, value, name))
            self._visit(value, name)
        for name in used.intersection(function.__globals__):
            self._slot(function.__globals__, name, name)
        for each in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self._visit(each, path)


def _place(container: Any, key: Any) -> tuple[int, Any]:
    return id(container), key if type(key) in PLAIN else id(key)


def _names(code: CodeType) -> Iterable[str]:
    yield from code.co_names
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _names(each)


def _is_library(name: str | None) -> bool:
    return (name or "").partition(".")[0] in {"torch", "shoal", "builtins", "typing", "abc", "collections"}


def find(roots: Iterable[tuple[str, Any]]) -> Guards:
    """What hangs on the roots, each with its path."""
    roots, names = list(roots), set[str]()
    while True:
        found = Guards(roots, names)
        if found.names == names:
            return found
        names = found.names
