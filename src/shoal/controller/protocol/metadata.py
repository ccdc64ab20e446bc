"""The metadata of tensors on nodes: everything that the master knows about them, without the elements.

Equal metadata is one object, so that :mod:`shoal.controller.tensor.calls` can find calls by identity.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ...errors import UnsupportedOperation


class WireMetadata(NamedTuple):
    """The metadata sent between master and nodes, without the node.

    Attributes:
        shape, stride, offset, dtype: as in torch.
        conj, neg: whether it is lazily conjugated or negated.
        within: the device within the node; -1: its CPU.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    conj: bool = False
    neg: bool = False
    within: int = -1


class Metadata:
    """Shape, stride, storage offset, dtype and device of a tensor on a node; made by :func:`metadata`.

    Attributes:
        wire: the metadata without the node, as sent to and from nodes.
        within: the device within the node; -1: its CPU.
        lazy: True for a conjugated or negated view, which torch resolves when it is read.
        make: makes a tensor with this metadata; set by ``tensor/tensor.py`` with the first one.
    """

    __slots__ = (
        "__weakref__", "conj", "device", "dtype", "lazy", "make", "neg", "offset", "shape", "stride", "wire",
        "within",
    )  # fmt: skip

    def __init__(self, device: torch.device, wire: WireMetadata) -> None:
        self.device = device
        self.wire = wire
        self.shape, self.stride, self.offset, self.dtype, self.conj, self.neg, self.within = wire
        self.lazy = self.conj or self.neg
        self.make: Callable[[], Any] | None = None

    def set_lazy_bits(self, tensor: torch.Tensor) -> None:
        """Mark a new tensor as conjugated or negated like this one."""
        if self.lazy:
            torch._C._set_conj(tensor, self.conj)
            torch._C._set_neg(tensor, self.neg)

    def __repr__(self) -> str:
        where = f"{self.device}" if self.within < 0 else f"GPU {self.within} of {self.device}"
        return f"{format_metadata(self)} on {where}"


_known: weakref.WeakValueDictionary[tuple[Any, ...], Metadata] = weakref.WeakValueDictionary()


def metadata(device: torch.device, wire: WireMetadata) -> Metadata:
    """Return the only object with this metadata; the caller holds the master's lock."""
    key = (device, *wire)
    found = _known.get(key)
    if found is None:
        found = _known[key] = Metadata(device, wire)
    return found


def forget_device(device: torch.device) -> None:
    """Forget the objects of a device, whose tensors belong to a lost node with the same index.

    Calls interned for the new node are then never found for tensors of the old one.
    """
    for key in [key for key in list(_known.keys()) if key[0] == device]:
        _known.pop(key, None)


def format_metadata(tensor: Any) -> str:
    """Format the dtype and shape of a tensor or its metadata as ``float32[2, 3]``."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def is_layout_of(given: WireMetadata, expected: WireMetadata) -> bool:
    """Return whether metadata is equal except for strides of dimensions with one element."""
    if given._replace(stride=()) != expected._replace(stride=()):
        return False
    return 0 in given.shape or all(
        n == 1 or a == b for n, a, b in zip(given.shape, given.stride, expected.stride, strict=True)
    )


def format_reply(answer: Any) -> str:
    """Format the reply to ASK: ``("tensor", wire)``, ``("list", [...])``, or another kind with its value."""
    kind, value = answer
    if kind == "list":
        return f"[{', '.join(format_reply(each) for each in value)}]"
    if kind == "tensor":
        return format_metadata(value)
    return repr(value)


#: forms of tensors that are not dense, and the methods that convert them
NESTED, QUANTISED, SPARSE = (
    ("nested", "to_padded_tensor(0.0)"), ("quantised", "dequantize()"), ("sparse", "to_dense()")
)  # fmt: skip


def unsupported_layout(what: str, form: tuple[str, str]) -> UnsupportedOperation:
    """Return the error for a tensor that nodes do not support."""
    return UnsupportedOperation(f"nodes hold dense tensors, and {what} is {form[0]}: use .{form[1]}")


def wire_metadata(tensor: torch.Tensor) -> WireMetadata:
    """Return the metadata of a real or fake tensor; raises `UnsupportedOperation` if it is not dense."""
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested:
        form = QUANTISED if tensor.is_quantized else (f"of layout {tensor.layout}", "to_dense()")
        raise unsupported_layout("this tensor", NESTED if tensor.is_nested else form)
    shape, stride = tuple(tensor.shape), tuple(tensor.stride())
    device = tensor.device
    within = -1 if device.type == "cpu" else device.index
    offset = int(tensor.storage_offset())
    return WireMetadata(shape, stride, offset, tensor.dtype, tensor.is_conj(), tensor.is_neg(), within)
