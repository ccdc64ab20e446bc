"""A node's half of ``Master.call``: functions of the program that run on the node's own tensors."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from ..protocol.metadata import WireMetadata, told

# As it is in a thread that runs no batch: a function may differentiate.
_INCLUDED = torch._C._dispatch_tls_local_include_set()
_EXCLUDED = torch._C._dispatch_tls_local_exclude_set()


class FunctionReply:
    """The result of a function.

    Attributes:
        value: pickled; a tensor is its position among ``tensors``.
        tensors: in it.
    """

    def __init__(self, value: bytes, tensors: list[torch.Tensor]) -> None:
        self.value = value
        self.tensors = tensors

    @property
    def told(self) -> list[WireMetadata]:
        """The metadata of the tensors."""
        return [told(each) for each in self.tensors]


def answer(payload: bytes, tensor: Callable[[int, int], Any], poisoned: list[Any]) -> FunctionReply:
    """Call the function of a payload.

    Args:
        payload: pickled: the function and its arguments.
        tensor: gives the one with an id in a space.
        poisoned: has those that were given and could not be computed: the function is not called then.

    Raises:
        BaseException: what the function raises, and what pickling does.
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
    return FunctionReply(pickled, [each.detach() for each in found])


@cache
def _writer() -> Any:
    """The class of picklers, once: one for each pickle would be garbage in a cycle, and hold tensors."""
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
    """A pickle of a value in which objects that ``name`` names are their names.

    What the other end cannot import, as a ``__main__``, goes by value where cloudpickle is installed.
    """
    file = io.BytesIO()
    writer = _writer()(file)
    writer.name = name
    writer.dump(value)
    return file.getvalue()


def unpickled_with(pickled: bytes, named: Callable[[Any], Any]) -> Any:
    """The value of such a pickle.

    Args:
        named: gives the object of a name.
    """
    return _NameUnpickler(pickled, named).load()


class _NameUnpickler(pickle.Unpickler):
    """An unpickler for names; CPython 3.13.0 refuses to set ``persistent_load`` of an instance."""

    def __init__(self, pickled: bytes, named: Callable[[Any], Any]) -> None:
        super().__init__(io.BytesIO(pickled))
        self._named = named

    def persistent_load(self, name: Any) -> Any:
        return self._named(name)
