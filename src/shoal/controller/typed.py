"""Constructors with torch's names of types, for tensors on nodes: ``FloatTensor(20, 20).fill_(4)``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from . import current
from .tensor import RemoteTensor
from .within import chosen, node


class _Typed(type):
    """Calling such a class makes a tensor, of which ``isinstance`` says that it is of the class."""

    dtype: torch.dtype

    def __call__(cls, *data: Any, device: int | None = None) -> torch.Tensor:
        at = chosen.device if device is None else device
        with node(chosen.node, at):
            if all(type(each) is int for each in data):
                return torch.empty(data or (0,), dtype=cls.dtype)
            if len(data) == 1 and isinstance(data[0], torch.Size):
                return torch.empty(data[0], dtype=cls.dtype)
            if len(data) == 1 and isinstance(data[0], torch.Tensor):
                return data[0].to(current.master().space(chosen.node).device, cls.dtype)
            if len(data) == 1 and isinstance(data[0], Sequence):
                return torch.tensor(data[0], dtype=cls.dtype)
        raise TypeError(f"{cls.__name__} takes sizes, a sequence of numbers, or a tensor, and not {data!r}")

    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, RemoteTensor) and value.dtype == cls.dtype


class _Made(metaclass=_Typed):
    """The part that the constructors have in common.

    Args:
        data: sizes, of a tensor whose elements are not set; or a sequence of numbers; or a tensor.
        device: within the node that ``with node(i)`` chose, or node 0; -1: its processor.
    """

    dtype: ClassVar[torch.dtype]


class FloatTensor(_Made):
    """A tensor of ``torch.float32`` on a node."""

    dtype = torch.float32


class DoubleTensor(_Made):
    """A tensor of ``torch.float64`` on a node."""

    dtype = torch.float64


class HalfTensor(_Made):
    """A tensor of ``torch.float16`` on a node."""

    dtype = torch.float16


class BFloat16Tensor(_Made):
    """A tensor of ``torch.bfloat16`` on a node."""

    dtype = torch.bfloat16


class ByteTensor(_Made):
    """A tensor of ``torch.uint8`` on a node."""

    dtype = torch.uint8


class CharTensor(_Made):
    """A tensor of ``torch.int8`` on a node."""

    dtype = torch.int8


class ShortTensor(_Made):
    """A tensor of ``torch.int16`` on a node."""

    dtype = torch.int16


class IntTensor(_Made):
    """A tensor of ``torch.int32`` on a node."""

    dtype = torch.int32


class LongTensor(_Made):
    """A tensor of ``torch.int64`` on a node."""

    dtype = torch.int64


class BoolTensor(_Made):
    """A tensor of ``torch.bool`` on a node."""

    dtype = torch.bool
