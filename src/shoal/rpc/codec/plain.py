"""Encoding of values to and from restricted workers: msgpack and the memory of tensors, never a pickle.

    message = encode([x, {"k": 3}], "'score' at 'ps'")
    value = decode(head, parts)                     # at the other end, which does not trust it

Values are None, bool, int, float, str and bytes, lists of values, dicts of values with str keys, and tensors;
a tuple arrives as a list.  The receiver only builds these types.  It checks each field against the others and
against the received bytes before it builds a value.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
import torch

from ...common.containers import is_tensor
from ...common.decoding import msgpack_decoder
from ...common.formatting import describe_error
from ...errors import RpcError, UsageError
from .pickled import EncodedValue
from .tensors import MAX_PARTS, Part, check, check_count

#: maximum nesting of lists and dicts
MAX_DEPTH = 64
#: maximum values in one message, including items and keys: an empty list takes 72 bytes of memory, but only
#: one byte of a message
MAX_VALUES = 1 << 18
#: maximum dimensions of a tensor
_MAX_DIMENSIONS = 64
#: upper bound of the elements of a tensor, where a dimension of size 0 counts as one of size 1
_MAX_ELEMENTS = 2**48
#: msgpack extension code of a tensor
_TENSOR = 1
#: key of the number of tensors without elements, in the dict of unused parts
_EMPTY = -1

_DTYPES = {
    name: getattr(torch, name)
    for name in (
        "bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64",
        "float8_e4m3fn", "float8_e5m2", "float16", "bfloat16", "float32", "float64", "complex64",
        "complex128",
    )
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_PLAIN = (type(None), bool, int, float, str, bytes)

_Size = Annotated[int, msgspec.Meta(ge=0, lt=2**48)]
_Sizes = Annotated[list[_Size], msgspec.Meta(max_length=_MAX_DIMENSIONS)]


class _Layout(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """Metadata of a tensor; ``part`` is the index of its memory if it has elements; strides in elements."""

    part: _Size
    dtype: str
    shape: _Sizes
    strides: _Sizes


_decode_layout = msgpack_decoder(_Layout)


class _InvalidBytes(Exception):
    """Raised for bytes that :func:`encode` cannot have produced."""


def encode(value: object, where: str) -> EncodedValue:
    """Encode ``value``; raise UsageError, with the prefix ``where``, if it cannot be sent."""
    packer = _Packer()
    tensors = packer.tensors
    try:
        head = msgspec.msgpack.encode(packer.packed(value, 0))
        check_count(range(packer.layouts))
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from None
    except (OverflowError, msgspec.MsgspecError, UnicodeError) as error:
        raise UsageError(f"{where} cannot be sent: {describe_error(error)}") from error
    parts: list[Part] = [(x.data_ptr(), x.numel() * x.element_size()) for x in tensors]
    return EncodedValue(head, parts, tensors)


def encode_call(fn: object, args: Sequence[Any], kwargs: dict[str, Any], where: str) -> EncodedValue:
    """Encode a call of the function that is served as ``fn``; raise UsageError if it cannot be sent."""
    if not isinstance(fn, str):
        raise UsageError(
            f"{where}: one of the two is a restricted worker: call it by a name of its join(serve=), "
            "peer.call('name', ...); it takes no functions, references or actors"
        )
    return encode([fn, args, kwargs], where)


def decode(head: bytes, parts: Sequence[Any]) -> Any:
    """Decode a value; raise RpcError if :func:`encode` cannot have produced ``head`` and ``parts``."""
    left = dict(enumerate(parts))
    try:
        _check_values(head)
        value = msgpack_decoder(Any, ext_hook=lambda code, data: _tensor(code, data, left))(head)
        _check(value, 0)
    except (_InvalidBytes, ValueError, TypeError, RuntimeError) as error:
        raise RpcError(f"received an invalid message of plain values: {describe_error(error)}") from None
    return value


def decode_call(head: bytes, parts: Sequence[Any]) -> tuple[str, list[Any], dict[str, Any]]:
    """Return name, arguments and keyword arguments of a call; raise RpcError if it is invalid."""
    call = decode(head, parts)
    if type(call) is not list or [type(each) for each in call] != [str, list, dict]:
        raise RpcError("received an invalid call: expected a list of name, arguments and keyword arguments")
    return call[0], call[1], call[2]


class _Packer:
    """Turns a value into what msgpack encodes.

    Attributes:
        tensors: the tensors in it that have memory.
        layouts: the number of all tensors.
    """

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self._values = 0
        self.layouts = 0

    def packed(self, value: Any, depth: int) -> Any:
        self._count(1)
        if type(value) in _PLAIN:
            return value
        if is_tensor(value):
            self.layouts += 1
            return msgspec.msgpack.Ext(_TENSOR, msgspec.msgpack.encode(_laid_out(value, self.tensors)))
        if depth == MAX_DEPTH:
            raise UsageError(f"a value has more than {MAX_DEPTH} nested lists and dicts")
        if type(value) in (list, tuple):
            return [self.packed(each, depth + 1) for each in value]
        if type(value) is dict and all(type(key) is str for key in value):
            self._count(len(value))
            return {key: self.packed(each, depth + 1) for key, each in value.items()}
        what = "a dict with keys other than str" if type(value) is dict else f"a {type(value).__qualname__}"
        raise UsageError(
            f"{what} cannot be sent to or from a restricted worker: only None, bool, int, float, str, bytes, "
            "lists, dicts with str keys, and tensors can"
        )

    def _count(self, more: int) -> None:
        self._values += more
        if self._values > MAX_VALUES:
            raise UsageError(
                f"more than {MAX_VALUES} values in one message to or from a restricted worker: send numbers "
                "as a tensor, and text as one str"
            )


def _laid_out(x: torch.Tensor, tensors: list[torch.Tensor]) -> _Layout:
    check(x)
    if x.is_nested:
        raise UsageError(
            "a nested tensor cannot be sent to or from a restricted worker: send the list of its parts, "
            "list(x.unbind())"
        )
    if x.dtype not in _NAMES or x.layout is not torch.strided or x.is_meta:
        raise UsageError(
            f"a tensor of {x.dtype}, {x.layout} on {x.device} cannot be sent to or from a restricted worker: "
            "only plain, dense tensors on the CPU can"
        )
    x = x.detach().resolve_conj().resolve_neg()
    if math.prod(max(size, 1) for size in x.shape) >= _MAX_ELEMENTS:
        raise UsageError(f"a tensor of shape {tuple(x.shape)} is too large for a restricted worker")
    if not x.numel():
        return _Layout(0, _NAMES[x.dtype], list(x.shape), [0] * x.dim())
    if not _is_dense(x.shape, x.stride()):
        x = x.contiguous()
    tensors.append(x)
    return _Layout(len(tensors) - 1, _NAMES[x.dtype], list(x.shape), list(x.stride()))


def _is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether the elements of a tensor, in any order of dimensions, are contiguous and do not overlap."""
    expected = 1
    for stride, size in sorted(
        (stride, size) for stride, size in zip(strides, shape, strict=True) if size > 1
    ):
        if stride != expected:
            return False
        expected *= size
    return True


# -- decoding ------------------------------------------------------------------------------------------


def _check_values(head: Any) -> None:
    """Raise for too many values, before decoding the message would allocate memory for all of them."""
    if len(head) <= MAX_VALUES:  # each takes at least one byte
        return
    view = memoryview(head)
    at, count, end = 0, 0, len(view)
    while at < end:
        count += 1
        if count > MAX_VALUES:
            raise _InvalidBytes(f"more than {MAX_VALUES} values")
        width, fixed = _LENGTHS[view[at]]
        at += 1
        if width:
            at += width + int.from_bytes(view[at : at + width], "big")
        at += fixed


def _lengths() -> list[tuple[int, int]]:
    """Return, for each first byte of a msgpack value, the width of its length field and its other bytes.

    The items of lists and maps are counted as separate values.  The type byte of an extension is one of the
    other bytes.
    """
    found = [(0, 0)] * 256
    for size in range(32):
        found[0xA0 + size] = (0, size)
    for first, width, fixed in (
        (0xC4, 1, 0), (0xC5, 2, 0), (0xC6, 4, 0),  # bytes
        (0xD9, 1, 0), (0xDA, 2, 0), (0xDB, 4, 0),  # text
        (0xC7, 1, 1), (0xC8, 2, 1), (0xC9, 4, 1),  # extensions
        (0xD4, 0, 2), (0xD5, 0, 3), (0xD6, 0, 5), (0xD7, 0, 9), (0xD8, 0, 17),
        (0xCA, 0, 4), (0xCB, 0, 8), (0xCC, 0, 1), (0xCD, 0, 2), (0xCE, 0, 4), (0xCF, 0, 8),  # numbers
        (0xD0, 0, 1), (0xD1, 0, 2), (0xD2, 0, 4), (0xD3, 0, 8),
        (0xDC, 0, 2), (0xDD, 0, 4), (0xDE, 0, 2), (0xDF, 0, 4),  # lists and maps: their counts
    ):  # fmt: skip
        found[first] = (width, fixed)
    return found


_LENGTHS = _lengths()


def _check(value: Any, depth: int) -> None:
    """Raise for values that :func:`encode` cannot have produced: other types, other keys, more depth."""
    kind = type(value)
    if kind in _PLAIN or kind is torch.Tensor:
        return
    if depth == MAX_DEPTH:
        raise _InvalidBytes(f"more than {MAX_DEPTH} nested lists and dicts")
    if kind is list:
        for each in value:
            _check(each, depth + 1)
    elif kind is dict:
        for key, each in value.items():
            if type(key) is not str:
                raise _InvalidBytes(f"a {type(key).__qualname__} as a key")
            _check(each, depth + 1)
    else:
        raise _InvalidBytes(f"a {kind.__qualname__}")


def _tensor(code: int, data: memoryview, left: dict[int, Any]) -> torch.Tensor:
    """Build the tensor that a msgpack extension describes; remove its part from ``left``."""
    if code != _TENSOR:
        raise _InvalidBytes(f"unknown tag {code}")
    layout: _Layout = _decode_layout(data)
    dtype = _DTYPES.get(layout.dtype)
    if dtype is None:
        raise _InvalidBytes(f"unknown dtype {layout.dtype!r}")
    if len(layout.strides) != len(layout.shape):
        raise _InvalidBytes(f"{len(layout.strides)} strides for {len(layout.shape)} dimensions")
    if math.prod(max(size, 1) for size in layout.shape) >= _MAX_ELEMENTS:
        raise _InvalidBytes(f"a tensor of shape {layout.shape}")
    if 0 in layout.shape:
        left[_EMPTY] = left.get(_EMPTY, 0) + 1
        if left[_EMPTY] > MAX_PARTS:
            raise _InvalidBytes(f"more than {MAX_PARTS} tensors without elements")
        return torch.empty(layout.shape, dtype=dtype, device="cpu")
    part = left.pop(layout.part, None)
    count = math.prod(layout.shape)
    if part is None or len(part) != count * dtype.itemsize:
        there = "no part" if part is None else f"{len(part)} bytes"
        raise _InvalidBytes(f"{layout.dtype} of shape {layout.shape} in {there}")
    if not _is_dense(layout.shape, layout.strides):
        raise _InvalidBytes(f"strides {layout.strides} of shape {layout.shape}")
    memory = torch.frombuffer(part, dtype=torch.uint8)
    if dtype is torch.bool and bool(memory.max() > 1):  # torch's kernels require 0 or 1
        raise _InvalidBytes("a bool that is neither true nor false")
    strides = [step if size > 1 else 1 for size, step in zip(layout.shape, layout.strides, strict=True)]
    return torch.empty(0, dtype=dtype, device="cpu").set_(memory.untyped_storage(), 0, layout.shape, strides)
