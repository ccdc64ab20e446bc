"""Values on their way, as torch's pickler makes them: bytes, tensors, and references.

Torch's pickler (``torch.distributed.rpc.internal``) takes tensors out of the bytes by itself, and asks
references for what to write.  They write a number, and stand themselves in a list beside the bytes, so that
shoal knows who holds them.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch.distributed.rpc import internal as _internal

from ...rpc import RRef

internal: Any = _internal
#: a pickle, its tensors, and its references
Packed: TypeAlias = tuple[bytes, list[torch.Tensor], list[RRef[Any]]]


class _Travelling(threading.local):
    def __init__(self) -> None:
        self.leaving: list[RRef[Any]] = []
        self.arrived: Sequence[RRef[Any]] = ()


_travelling = _Travelling()


def leaving(ref: RRef[Any]) -> int:
    """The number of a reference in the pickle that this thread makes."""
    _travelling.leaving.append(ref)
    return len(_travelling.leaving) - 1


def arrived(number: int) -> RRef[Any]:
    """The reference with this number in the pickle that this thread reads."""
    return _travelling.arrived[number]


def packed(pickled: bytes, tensors: Sequence[torch.Tensor]) -> Packed:
    """A pickle that torch's pickler has just made in this thread, ready to be sent."""
    refs, _travelling.leaving = _travelling.leaving, []
    return pickled, [_leaf(x) for x in tensors], refs


def pack(value: Any) -> Packed:
    """Pickle ``value``."""
    try:
        return packed(*internal.serialize(value))
    finally:
        _travelling.leaving = []


def unpack(what: Packed) -> Any:
    """The value that was packed; an AttributeError in its place: this process lacks a function or class."""
    pickled, tensors, refs = what
    before, _travelling.arrived = _travelling.arrived, refs
    try:
        return internal.deserialize(pickled, tensors)
    finally:
        _travelling.arrived = before


def _leaf(x: torch.Tensor) -> torch.Tensor:
    """``x`` without its graph, which torch too sends only where dist_autograd asks for it."""
    return x if x.grad_fn is None else x.detach().requires_grad_(x.requires_grad)
