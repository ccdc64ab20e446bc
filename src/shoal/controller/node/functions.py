"""A node's half of ``Master.call``: user-defined functions that run on the node's tensors."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

# The dispatch keys of a thread that runs no batch: a function may use autograd.
_INCLUDED = torch._C._dispatch_tls_local_include_set()
_EXCLUDED = torch._C._dispatch_tls_local_exclude_set()


def answer(
    payload: bytes, tensor: Callable[[int, int], Any], poisoned: list[Any]
) -> tuple[bytes, list[torch.Tensor]]:
    """Call the function of a payload.

    Args:
        payload: the pickled function and its arguments.
        tensor: returns the tensor of a space and an id.
        poisoned: list to which `tensor` adds poisoned arguments; if any, the function is not called.

    Returns:
        The pickled result, in which tensors are replaced by positions in the returned list.

    Raises:
        BaseException: raised by the function or by pickling.
    """
    guard = torch._C._ForceDispatchKeyGuard(_INCLUDED, _EXCLUDED)
    with guard, torch.enable_grad():
        fn, args, kwargs = unpickled_with(payload, lambda named: tensor(*named))
        if poisoned:
            raise ValueError("an argument could not be computed")
        value = fn(*args, **kwargs)
    found: list[torch.Tensor] = []
    positions: dict[int, int] = {}

    def position(value: Any) -> int | None:
        if not isinstance(value, torch.Tensor):
            return None
        if id(value) not in positions:
            positions[id(value)] = len(found)
            found.append(value)
        return positions[id(value)]

    pickled = pickled_with(value, position)
    return pickled, [each.detach() for each in found]


@cache
def _writer() -> Any:
    """Return the pickler class; cached, as a class per pickle would be cyclic garbage that holds tensors."""
    try:
        from cloudpickle import Pickler  # type: ignore[import-untyped, unused-ignore]
    except ImportError:
        Pickler = pickle.Pickler

    class ResultPickler(Pickler):  # type: ignore[misc, unused-ignore]
        name: Callable[[Any], Any]

        def persistent_id(self, value: Any) -> Any:
            return self.name(value)

    return ResultPickler


def pickled_with(value: Any, name: Callable[[Any], Any]) -> bytes:
    """Pickle a value; objects for which `name` does not return None are replaced by that name.

    Objects that the receiver cannot import, such as those of ``__main__``, are pickled by value if
    cloudpickle is installed.
    """
    file = io.BytesIO()
    writer = _writer()(file)
    writer.name = name
    writer.dump(value)
    return file.getvalue()


def unpickled_with(pickled: bytes, named: Callable[[Any], Any]) -> Any:
    """Load a pickle of :func:`pickled_with`; `named` returns the object of a name."""
    return _NameUnpickler(pickled, named).load()


class _NameUnpickler(pickle.Unpickler):
    """An unpickler for names; CPython 3.13.0 does not allow setting ``persistent_load`` on an instance."""

    def __init__(self, pickled: bytes, named: Callable[[Any], Any]) -> None:
        super().__init__(io.BytesIO(pickled))
        self._named = named

    def persistent_load(self, name: Any) -> Any:
        return self._named(name)
