"""Guards of recorded steps: a step is recorded again if the state that its function depends on has changed.

Guards cover closures and the globals that the function names, and everything reachable from them: parameters,
buffers, flags and hooks of modules; groups, state and hooks of optimizers; called functions; and named
attributes of objects and classes. Numbers, flags, strings and small arrays are compared by value, tensors by
handle, other objects by identity. Globals of installed packages are assumed to be constant.
"""

from __future__ import annotations

import array
import gc
import sys
import sysconfig
import weakref
from collections import deque
from collections.abc import Iterable
from functools import cached_property, partial
from types import (
    CellType,
    CodeType,
    FunctionType,
    MappingProxyType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any

import torch
from torch.nn.modules import module as of_modules
from torch.nn.modules.lazy import LazyModuleMixin
from torch.optim import optimizer as of_optimizers

from ..commands.origin import is_internal
from ..tensor.tensor import RemoteTensor, TensorHandle
from .effects import memory_of, version_of

#: types that are compared by value
PLAIN = frozenset(
    {bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, range}
)
#: prefixes of module attributes that only saving and loading use
_STATE_DICT_ATTRIBUTES = ("_state_dict", "_load_state_dict", "_non_persistent")
#: methods that do not affect the behavior of an object
_IGNORED_METHODS = frozenset(
    {"__init__", "__new__", "__repr__", "__str__", "__del__", "__reduce__", "__slots__"}
)
#: containers with more elements are compared as a whole, unless they contain tensors of nodes or modules
MAX_COMPARED_ELEMENTS = 1000
_OF_INTEREST = (RemoteTensor, torch.nn.Module, dict)
#: maximum size in bytes of arrays and tensors of the master that are compared by value
MAX_COMPARED_BYTES = 1 << 16
_MISSING = object()
#: hooks of all modules and of all optimizers
_HOOKS = {
    name: value
    for module in (of_modules, of_optimizers)
    for name, value in vars(module).items()
    if name.startswith("_global_") and isinstance(value, dict)
}
_INSTALLED = tuple({sysconfig.get_path(each) for each in ("stdlib", "platstdlib", "purelib", "platlib")})


class Grad:
    """A weak reference to a gradient before a call; `place` is its space number and id."""

    def __init__(self, grad: RemoteTensor, handle: TensorHandle) -> None:
        self.place = handle.space.number, handle.id
        self._grad = weakref.ref(grad)

    @property
    def tensor(self) -> RemoteTensor | None:
        """The gradient, or None if it was released or replaced."""
        grad = self._grad()
        return grad if grad is None or (grad.handle.space.number, grad.handle.id) == self.place else None


class Guards:
    """The recorded state of everything reachable from the roots.

    Attributes:
        tensors: each tensor with its handle, requires_grad, hooks and path.
        grads: tensors that may get gradients, with their gradients and the gradients' handles.
    """

    def __init__(self, roots: Iterable[tuple[str, Any]], names: set[str]) -> None:
        self.tensors: list[tuple[RemoteTensor, TensorHandle, bool, tuple[int, ...], str]] = []
        self.grads: list[tuple[RemoteTensor, RemoteTensor | None, TensorHandle | None]] = []
        self.names = set(names)
        self._same: list[tuple[Any, Any, Any, str]] = []
        self._equal: list[tuple[Any, Any, Any, str]] = []
        self._absent: list[tuple[Any, str, str]] = []
        self._lengths: list[tuple[Any, int, str]] = []
        self._cells: list[tuple[CellType, Any, str]] = []
        self._versions: list[tuple[torch.Tensor, int | None, tuple[Any, ...], str]] = []
        self._values: list[tuple[torch.Tensor, torch.Tensor, str]] = []
        self._copies: list[tuple[Any, Any, str]] = []
        self._arrays: list[tuple[Any, bytes, str]] = []
        self._functions: list[tuple[FunctionType, CodeType, Any, Any, str]] = []
        self._classes: list[tuple[Any, type, str]] = []
        self._seen: dict[int, Any] = {}
        #: a queue, because recursion would overflow Python's stack for long chains of objects
        self._pending: deque[tuple[Any, str]] = deque()
        for path, root in roots:
            self._visit(root, path)
        while self._pending:
            self._inspect(*self._pending.popleft())
        for path, hooks in _HOOKS.items():
            self._lengths.append((hooks, len(hooks), path))
        self._seen.clear()
        self._written = {id(each): each._version for each, *_ in self.tensors if not each.is_inference()}

    @property
    def handles(self) -> set[TensorHandle]:
        """The handles of the tensors and of their gradients."""
        found = {handle for _, handle, _, _, _ in self.tensors}
        return found | {handle for _, _, handle in self.grads if handle is not None}

    @property
    def storages(self) -> set[int]:
        """The storages of the master's tensors."""
        return {memory[0] for _, _, memory, _ in self._versions if memory}

    def release_grads(self) -> dict[int, Grad | None]:
        """Release the gradients and return weak references to them, by the ``id`` of the tensor."""
        had = {
            id(tensor): None if grad is None or handle is None else Grad(grad, handle)
            for tensor, grad, handle in self.grads
        }
        self.grads.clear()
        return had

    def written(self, before: Guards) -> list[RemoteTensor]:
        """The tensors that a call wrote to since `before`."""
        old, new = before._written, self._written
        return [each for each, *_ in self.tensors if new.get(id(each)) != old.get(id(each))]

    # -- comparison ------------------------------------------------------------------------------

    def changed(self) -> str | None:
        """Return the path of a changed object, or None."""
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
            for tensor, handle, required, hooks, path in self.tensors:
                if (
                    tensor.handle is not handle
                    or tensor.requires_grad is not required
                    or (required and _hooks(tensor) != hooks)
                ):
                    return path
            for value, version, memory, path in self._versions:
                if version_of(value) != version or _memory(value) != memory:
                    return path
            for value, elements, path in self._values:
                if not torch.equal(value, elements) and not _are_alike(value, elements):
                    return path
            for held, copy, path in self._copies:
                if held != copy:
                    return path
            for held, content, path in self._arrays:
                if held.tobytes() != content:
                    return path
            for function, code, defaults, named, path in self._functions:
                if (
                    function.__code__ is not code
                    or function.__defaults__ is not defaults
                    or function.__kwdefaults__ is not named
                ):
                    return path
            for value, kind, path in self._classes:
                if type(value) is not kind:
                    return path
        except (KeyError, IndexError, ValueError):
            return path
        return None

    def describe_call_effects(self, before: Guards) -> str | None:
        """Describe a change since `before` that a replay would not make, or return None."""
        lengths = {id(c): n for c, n, _ in before._lengths}
        for c, n, path in self._lengths:
            if lengths.get(id(c), n) != n:
                return f"{path} had {lengths[id(c)]} elements before the call and has {n} after it"
        theirs = {_place(c, k): v for c, k, v, _ in before._equal}
        for c, k, v, path in self._equal:
            old = theirs.get(_place(c, k), v)
            if old is not v and old != v:  # NaN is the same object
                return f"{path} was {old!r} before the call and is {v!r} after it"
        cells = {id(c): v for c, v, _ in before._cells}
        for cell, v, path in self._cells:
            old = cells.get(id(cell), v)
            if (
                old is not v
                and not (type(old) is type(v) is RemoteTensor)
                and (type(v) not in PLAIN or old != v)
            ):
                return f"{path} was another object before the call"
        same = {_place(c, k): v for c, k, v, _ in before._same}
        for c, k, v, path in self._same:
            old = same.get(_place(c, k))
            if old is not v and not (type(old) is type(v) is RemoteTensor):
                return f"{path} was another object before the call"
        kinds: list[tuple[Iterable[Any], Iterable[Any], str]] = [
            (
                before.tensors, self.tensors,
                " is another tensor after the call, or has other hooks or requires_grad",
            ),
            (before._copies, self._copies, " has other elements after the call"),
            (before._arrays, self._arrays, " has other elements after the call"),
            (before._versions, self._versions, ", a tensor of the master, was changed by the call"),
        ]  # fmt: skip
        for were, are, change in kinds:
            known = {id(each): rest for each, *rest, _ in were}
            for each, *now, path in are:
                if known.get(id(each), now) != now:
                    return f"{path}{change}"
        return None

    # -- finding ---------------------------------------------------------------------------------

    def _visit(self, value: Any, path: str) -> None:
        if type(value) not in PLAIN and id(value) not in self._seen:
            self._seen[id(value)] = value
            self._pending.append((value, path))

    def _inspect(self, value: Any, path: str) -> None:
        kind = type(value)
        if kind is RemoteTensor:
            self.tensors.append((value, value.handle, value.requires_grad, _hooks(value), path))
            grad: Any = value.grad if value.is_leaf else None
            if value.is_leaf and (value.requires_grad or grad is not None):
                self.grads.append((value, grad, None if grad is None else grad.handle))
            for hooks in (value._backward_hooks, value._post_accumulate_grad_hooks):
                for hook in (hooks or {}).values():
                    self._visit(hook, f"a hook of {path}")
        elif isinstance(value, torch.Tensor):
            memory = _memory(value)
            self._versions.append((value, version_of(value), memory, path))
            if (
                memory and value.device.type == "cpu" and value.nbytes <= MAX_COMPARED_BYTES
            ):  # detects writes through .data or NumPy as well
                self._values.append((value, value.detach().clone(), path))
        elif isinstance(value, torch.nn.Module):
            self._lengths.append((value.__dict__, len(value.__dict__), path))
            for key in [each for each in value.__dict__ if not each.startswith(_STATE_DICT_ATTRIBUTES)]:
                self._guard_item(value.__dict__, key, f"{path}.{key}")
            if not isinstance(value, LazyModuleMixin):
                self._guard_class(value, path)
        elif isinstance(value, torch.optim.Optimizer):
            for key in ("param_groups", "state", *(each for each in value.__dict__ if "_step_" in each)):
                self._guard_item(value.__dict__, key, f"{path}.{key}")
            self._guard_names(value.__dict__, path)
            self._guard_class(value, path)
        elif isinstance(value, FunctionType):
            self._function(value, path)
        elif isinstance(value, MethodType):
            self._visit(value.__func__, path)
            self._visit(value.__self__, f"{path}.__self__")
        elif isinstance(value, partial):
            for i, each in enumerate((value.func, *value.args)):
                self._visit(each, f"{path}[{i}]")
            self._visit(value.keywords, path)
        elif isinstance(value, dict):
            if self._is_of_interest(value, value.values(), path):
                self._lengths.append((value, len(value), path))
                for key in list(value):
                    self._guard_item(value, key, f"{path}.{key}" if isinstance(key, str) else f"{path}[...]")
        elif isinstance(value, (list, tuple, deque)):
            if self._is_of_interest(value, value, path):
                if kind is not tuple:
                    self._lengths.append((value, len(value), path))
                for i in range(len(value)):
                    self._guard_item(value, i, f"{path}[{i}]")
        elif isinstance(value, (set, frozenset)):
            if self._is_of_interest(value, value, path):
                self._lengths.append((value, len(value), path))
                for each in value:
                    self._visit(each, f"an element of {path}")
                self._copies.append((value, value.copy(), path))
        elif isinstance(value, (bytearray, array.array)):
            self._copies.append((value, value[:], path))
        elif isinstance(value, ModuleType):
            if not _is_library(value.__name__) and not _is_installed(getattr(value, "__file__", None)):
                self._guard_names(value.__dict__, path)
        elif isinstance(value, type):
            for each in value.__mro__:
                if not _is_library(each.__module__):
                    self._guard_names(each.__dict__, path)
        elif isinstance(value, (property, cached_property)):
            self._visit(value.fget if isinstance(value, property) else value.func, path)
        elif "numpy" in sys.modules and isinstance(value, sys.modules["numpy"].ndarray):
            if value.nbytes <= MAX_COMPARED_BYTES:
                self._arrays.append((value, value.tobytes(), path))
        elif not kind.__module__.startswith("shoal."):
            self._visit(_own(value, "__wrapped__"), path)
            if isinstance(held := _own(value, "__dict__"), dict):
                self._guard_names(held, path)
            self._guard_class(value, path)

    def _is_of_interest(self, container: Any, values: Iterable[Any], path: str) -> bool:
        if len(container) <= MAX_COMPARED_ELEMENTS or any(isinstance(each, _OF_INTEREST) for each in values):
            return True
        if not isinstance(container, tuple) and all(type(each) in PLAIN for each in values):
            self._copies.append((container, container.copy(), path))
        return False

    def _guard_names(self, held: Any, path: str) -> None:
        for name in self.names.intersection(held):
            self._guard_item(held, name, f"{path}.{name}")

    def _guard_item(self, container: Any, key: Any, path: str) -> None:
        value = container[key]
        if type(value) in PLAIN:
            if type(container) is not tuple:
                self._equal.append((container, key, value, path))
            return
        if type(container) is not tuple:
            self._same.append((container, key, value, path))
        self._visit(value, path)

    def _guard_class(self, value: Any, path: str) -> None:
        """Guard the methods and other attributes that an object has from its class."""
        held = _own(value, "__dict__", {})
        seen: set[str] = set()
        self._classes.append((value, type(value), path))
        for each in type(value).__mro__:
            if _is_library(each.__module__):
                continue
            for name, attribute in list(each.__dict__.items()):
                if isinstance(attribute, MemberDescriptorType):
                    if name in self.names and _own(value, name, _MISSING) is not _MISSING:
                        self._guard_item(_Slots(value), name, f"{path}.{name}")
                    continue
                called = name == "forward" or (name.startswith("__") and name not in _IGNORED_METHODS)
                if name not in self.names and not (called and callable(attribute)):
                    continue
                if name in seen:
                    continue  # overridden by a class earlier in the MRO
                seen.add(name)
                if name not in held:
                    of = self._equal if type(attribute) in PLAIN else self._same
                    of.append((each.__dict__, name, attribute, f"{path}.{name}"))
                    if not isinstance(value, torch.nn.Module):  # whose number of attributes is compared
                        self._absent.append((held, name, f"{path}.{name}"))
                self._visit(getattr(attribute, "__func__", attribute), f"{path}.{name}")

    def _function(self, function: FunctionType, path: str) -> None:
        code = function.__code__
        if is_internal(code) or _is_library(function.__module__):
            self._visit(getattr(function, "__wrapped__", None), path)
            return
        used = set(_names(code))
        self._functions.append((function, code, function.__defaults__, function.__kwdefaults__, path))
        self.names |= used
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            try:
                value = cell.cell_contents
            except ValueError:
                continue
            self._cells.append((cell, value, name))
            self._visit(value, name)
        if not _is_installed(code.co_filename):
            for name in used.intersection(function.__globals__):
                self._guard_item(function.__globals__, name, name)
        self._visit(function.__defaults__, path)
        self._visit(function.__kwdefaults__, path)


class _Slots:
    """Access by name to the ``__slots__`` of an object."""

    def __init__(self, of: Any) -> None:
        self.of = of

    def __getitem__(self, name: str) -> Any:
        try:
            return getattr(self.of, name)
        except AttributeError:
            raise KeyError(name) from None


def _hooks(tensor: torch.Tensor) -> tuple[int, ...]:
    """The ids of a tensor's hooks; torch never reuses them."""
    return (*(tensor._backward_hooks or ()), *(tensor._post_accumulate_grad_hooks or ()))


def _memory(value: torch.Tensor) -> tuple[Any, ...]:
    return memory_of(value) if value.layout == torch.strided else ()


def _are_alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether the elements are equal, with NaN equal to NaN."""
    return bool(((a == b) | ((a != a) & (b != b))).all())


def _own(value: Any, name: str, default: Any = None) -> Any:
    """``getattr`` that ignores exceptions of the object's ``__getattr__``."""
    try:
        return getattr(value, name, default)
    except Exception:
        return default


def _place(container: Any, key: Any) -> tuple[int, Any]:
    if type(container) is MappingProxyType:  # the proxy of a class is a new object in every access
        container = gc.get_referents(container)[0]
    elif type(container) is _Slots:
        container = container.of
    return id(container), key if type(key) in PLAIN else id(key)


def _names(code: CodeType) -> Iterable[str]:
    """The names in the code, and strings that may be names for ``getattr`` and ``vars``."""
    yield from code.co_names
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _names(each)
        elif isinstance(each, str) and each.isidentifier():
            yield each


def _is_installed(file: str | None) -> bool:
    return file is None or file.startswith((*_INSTALLED, "<frozen"))


def _is_library(name: str | None) -> bool:
    return (name or "").partition(".")[0] in {"torch", "shoal", "builtins", "typing", "abc", "collections"}


def find(roots: Iterable[tuple[str, Any]]) -> Guards:
    """Guard everything reachable from the roots, each with its path."""
    roots, names = list(roots), set[str]()
    while True:
        found = Guards(roots, names)
        if found.names == names:
            return found
        names = found.names
