"""Values on their way to or from a restricted worker: msgpack and the memory of tensors, never a pickle.

    message = encode([x, {"k": 3}], "'score' at 'ps'")
    value = decode(head, parts)                     # at the other end, which does not trust it

The values are None, bool, int, float, str and bytes, lists of values, dicts of values by str, and tensors;
a tuple arrives as a list.  Nothing is made of what arrives but these: each field is checked here, against
the others and against the bytes that came, before anything is built of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
import torch

from ..errors import RpcError, UsageError
from ..wording import in_words
from .codec import Message
from .tensors import Part, check, check_count

#: lists and dicts inside one another
DEPTH = 64
#: of a tensor
_DIMENSIONS = 64
#: msgpack's code of a tensor
_TENSOR = 1

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
_Sizes = Annotated[list[_Size], msgspec.Meta(max_length=_DIMENSIONS)]


class _Layout(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """A tensor without its memory, which is that of a part if it has elements; strides in elements."""

    part: _Size
    dtype: str
    shape: _Sizes
    strides: _Sizes


_layouts = msgspec.msgpack.Decoder(_Layout)


class _Refused(Exception):
    """Bytes have arrived that :func:`encode` does not make."""


def encode(value: object, where: str) -> Message:
    """Pack ``value``.

    Args:
        where: begins the message of an error.

    Raises:
        UsageError: the value, or something in it, cannot be sent.
    """
    tensors: list[torch.Tensor] = []
    try:
        head = msgspec.msgpack.encode(_packed(value, tensors, 0))
        check_count(tensors)
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from None
    except (OverflowError, msgspec.MsgspecError, UnicodeError) as error:
        raise UsageError(f"{where} cannot be sent: {in_words(error)}") from error
    parts: list[Part] = [(x.data_ptr(), x.numel() * x.element_size()) for x in tensors]
    return Message(head, parts, tensors)


def encode_call(fn: object, args: Sequence[Any], kwargs: dict[str, Any], where: str) -> Message:
    """Pack a call of what goes by the name ``fn``.

    Raises:
        UsageError: it cannot be sent.
    """
    if not isinstance(fn, str):
        raise UsageError(
            f"{where}: one of the two is a restricted worker, which is called by the names of join(serve=), "
            "peer.call('name', ...); it takes no functions, references or actors"
        )
    return encode([fn, args, kwargs], where)


def decode(head: bytes, parts: Sequence[Any]) -> Any:
    """The value that :func:`encode` made ``head`` and ``parts`` of.

    Raises:
        RpcError: nothing that it makes.
    """
    left = dict(enumerate(parts))
    try:
        value = msgspec.msgpack.decode(head, ext_hook=lambda code, data: _tensor(code, data, left))
        _check(value, 0)
    except (_Refused, msgspec.MsgspecError, RecursionError, ValueError, TypeError, RuntimeError) as error:
        raise RpcError(f"what came is no message of plain values: {in_words(error)}") from None
    return value


def decode_call(head: bytes, parts: Sequence[Any]) -> tuple[str, list[Any], dict[str, Any]]:
    """Name, arguments and keyword arguments of a call.

    Raises:
        RpcError: it is none.
    """
    call = decode(head, parts)
    if type(call) is not list or [type(each) for each in call] != [str, list, dict]:
        raise RpcError("what came is no call by name, with its arguments")
    return call[0], call[1], call[2]


def _packed(value: Any, tensors: list[torch.Tensor], depth: int) -> Any:
    """``value`` as msgpack has it, with its tensors that have memory in ``tensors``."""
    if type(value) in _PLAIN:
        return value
    if isinstance(value, torch.Tensor):
        return msgspec.msgpack.Ext(_TENSOR, msgspec.msgpack.encode(_laid_out(value, tensors)))
    if depth == DEPTH:
        raise UsageError(f"a value has more than {DEPTH} lists and dicts inside one another")
    if type(value) in (list, tuple):
        return [_packed(each, tensors, depth + 1) for each in value]
    if type(value) is dict and all(type(key) is str for key in value):
        return {key: _packed(each, tensors, depth + 1) for key, each in value.items()}
    what = "a dict with keys that are no str" if type(value) is dict else f"a {type(value).__qualname__}"
    raise UsageError(
        f"{what} goes neither to nor from a restricted worker: None, bool, int, float, str, bytes, lists, "
        "dicts by str, and tensors do"
    )


def _laid_out(x: torch.Tensor, tensors: list[torch.Tensor]) -> _Layout:
    check(x)
    if x.dtype not in _NAMES or x.layout is not torch.strided or x.is_meta:
        raise UsageError(
            f"a tensor of {x.dtype}, {x.layout} on {x.device} goes neither to nor from a restricted worker: "
            "plain, dense ones of the CPU do"
        )
    x = x.detach().resolve_conj().resolve_neg()
    if not x.numel():
        return _Layout(0, _NAMES[x.dtype], list(x.shape), [0] * x.dim())
    if not _is_dense(x.shape, x.stride()):
        x = x.contiguous()
    tensors.append(x)
    return _Layout(len(tensors) - 1, _NAMES[x.dtype], list(x.shape), list(x.stride()))


def _is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether the elements of such a tensor lie side by side, each at a place of its own, in any order."""
    expected = 1
    for stride, size in sorted(
        (stride, size) for stride, size in zip(strides, shape, strict=True) if size > 1
    ):
        if stride != expected:
            return False
        expected *= size
    return True


# -- what arrived --------------------------------------------------------------------------------------


def _check(value: Any, depth: int) -> None:
    """Refuse what :func:`encode` does not make: other types, other keys, more depth."""
    kind = type(value)
    if kind in _PLAIN or kind is torch.Tensor:
        return
    if depth == DEPTH:
        raise _Refused(f"more than {DEPTH} lists and dicts inside one another")
    if kind is list:
        for each in value:
            _check(each, depth + 1)
    elif kind is dict:
        for key, each in value.items():
            if type(key) is not str:
                raise _Refused(f"a {type(key).__qualname__} as a key")
            _check(each, depth + 1)
    else:
        raise _Refused(f"a {kind.__qualname__}")


def _tensor(code: int, data: memoryview, left: dict[int, Any]) -> torch.Tensor:
    """The tensor that a field of msgpack describes; takes its memory out of ``left``."""
    if code != _TENSOR:
        raise _Refused(f"unknown tag {code}")
    layout = _layouts.decode(data)
    dtype = _DTYPES.get(layout.dtype)
    if dtype is None:
        raise _Refused(f"unknown dtype {layout.dtype!r}")
    if len(layout.strides) != len(layout.shape):
        raise _Refused(f"{len(layout.strides)} strides of {len(layout.shape)} dimensions")
    if math.prod(max(size, 1) for size in layout.shape) >= 2**48:
        raise _Refused(f"a tensor of shape {layout.shape}")
    if 0 in layout.shape:
        return torch.empty(layout.shape, dtype=dtype)
    part = left.pop(layout.part, None)
    count = math.prod(layout.shape)
    if part is None or len(part) != count * dtype.itemsize:
        there = "no part" if part is None else f"{len(part)} bytes"
        raise _Refused(f"{layout.dtype} of shape {layout.shape} in {there}")
    if not _is_dense(layout.shape, layout.strides):
        raise _Refused(f"strides {layout.strides} of shape {layout.shape}")
    memory = torch.frombuffer(part, dtype=torch.uint8)
    if dtype is torch.bool and bool(memory.max() > 1):  # torch's kernels count on 0 and 1
        raise _Refused("a bool that is neither true nor false")
    strides = [step if size > 1 else 1 for size, step in zip(layout.shape, layout.strides, strict=True)]
    return torch.empty(0, dtype=dtype).set_(memory.untyped_storage(), 0, layout.shape, strides)
