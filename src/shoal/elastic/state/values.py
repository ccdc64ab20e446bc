"""The values that a checkpoint can hold, and the form in which they are saved.

``State.load`` and processes that join a session read with ``torch.load(weights_only=True)``, which builds
plain containers, numbers, strings and tensors only.  :func:`encode` refuses everything else before it is
written, and puts numpy's scalars and arrays into tensors; :func:`decode` turns these into numpy again.
"""

from __future__ import annotations

import copy
import dataclasses
import datetime
import decimal
import enum
import fractions
import io
import pathlib
import reprlib
import sys
import uuid
from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any

import torch

from ...errors import UsageError

#: levels of containers inside each other
MAX_DEPTH = 100

_ATOMS = (type(None), bool, float, complex, str, bytes, bytearray, torch.Size, torch.device, torch.dtype)
_COMMON = frozenset((float, str, bool))  # passed without a call
_DICTS = (dict, OrderedDict, Counter)
_SEQUENCES = (list, tuple)
_WORD = 1 << 63

#: The key of a dict with one entry, which encodes a numpy value as a tensor.
_ARRAY, _SCALAR = "shoal.numpy.ndarray", "shoal.numpy.generic"


def encode(value: Any, name: str) -> Any:
    """Return ``value``, or a copy of its containers in which tensors replace numpy values.

    Raises:
        UsageError: the value, called ``name``, contains something that cannot be loaded; the message names it
            and a replacement.
    """
    try:
        return _Encoder().encode(value, key=False)
    except _UnsavableValue as refused:
        where = "".join([name, *reversed(refused.path)])
        raise UsageError(
            f"State: {where} is {refused.what}, which State.load cannot read; use {refused.instead}"
        ) from None


def decode(value: Any) -> Any:
    """Return the argument of :func:`encode` from its result; UsageError: it needs numpy, which is missing."""
    return _decoded(value, {})


def is_plain_tensor(value: Any) -> bool:
    """Whether ``value`` is a dense tensor without attributes, described by dtype, shape and elements."""
    return (
        type(value) is torch.Tensor
        and value.layout == torch.strided
        and not (value.is_quantized or value.is_nested or value.__dict__)
    )


#: sparse layouts that ``torch.load`` can read
_SPARSE = frozenset(
    {torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc}
)


class _UnsavableValue(Exception):
    def __init__(self, what: str, instead: str) -> None:
        self.what, self.instead = what, instead
        self.path: list[str] = []  # innermost first


class _Encoder:
    """One walk over a value; a container that occurs several times is encoded once."""

    def __init__(self) -> None:
        self._done: dict[int, tuple[Any, Any]] = {}  # the value is kept alive, so its id stays its own
        self._inside: set[int] = set()

    def encode(self, value: Any, *, key: bool) -> Any:
        kind = type(value)
        if kind in _ATOMS or (kind is int and -_WORD <= value < _WORD) or is_plain_tensor(value):
            return value
        if kind not in _DICTS and kind not in _SEQUENCES and kind is not set:
            return self._encode_leaf(value, key)
        if (found := self._done.get(id(value))) is not None and not key:
            return found[1]
        if id(value) in self._inside:
            raise _UnsavableValue("a container inside itself", "a copy of it")
        if len(self._inside) == MAX_DEPTH:
            raise _UnsavableValue(f"a container more than {MAX_DEPTH} levels deep", "a flatter structure")
        self._inside.add(id(value))
        encoded = self._encode_container(value, key)
        self._inside.discard(id(value))
        if not key:
            self._done[id(value)] = value, encoded
        return encoded

    def _encode_container(self, value: Any, key: bool) -> Any:
        if isinstance(value, dict):
            return self._encode_dict(value)
        if isinstance(value, set):
            for each in value:
                self._inner(each, f" element {reprlib.repr(each)}", key=True)
            return value
        same = [
            each if type(each) in _COMMON else self._inner(each, f"[{index}]", key=key)
            for index, each in enumerate(value)
        ]
        changed = any(one is not other for one, other in zip(same, value, strict=True))
        return type(value)(same) if changed else value

    def _encode_dict(self, value: dict[Any, Any]) -> Any:
        changed = {}
        for name, each in value.items():
            if type(name) is not str:
                self._inner(name, f" key {reprlib.repr(name)}", key=True)
            elif name in (_ARRAY, _SCALAR):
                raise _UnsavableValue(f"a dict with the key {name!r}, which shoal itself uses", "another key")
            if (same := self._inner(each, f"[{reprlib.repr(name)}]", key=False)) is not each:
                changed[name] = same
        if attributes := getattr(value, "__dict__", None):
            self._inner(attributes, ".__dict__", key=False)  # such as _metadata of a module's state_dict
        if not changed:
            return value
        encoded = copy.copy(value)
        encoded.update(changed) if type(value) is not Counter else dict.update(encoded, changed)
        return encoded

    def _inner(self, value: Any, where: str, *, key: bool) -> Any:
        try:
            return self.encode(value, key=key)
        except _UnsavableValue as refused:
            refused.path.append(where)
            raise

    def _encode_leaf(self, value: Any, key: bool) -> Any:
        numpy = sys.modules.get("numpy")
        if (
            numpy is not None
            and (type(value) is numpy.ndarray or isinstance(value, numpy.generic))
            and not key
        ):
            tensor = _tensor_of(numpy, value)
            if tensor is not None:
                return {_SCALAR if isinstance(value, numpy.generic) else _ARRAY: tensor}
        elif _is_loadable(value):
            return value
        raise _UnsavableValue(_describe(value), _replacement(value))


def _tensor_of(numpy: Any, value: Any) -> torch.Tensor | None:
    """Return a numpy scalar or array as a tensor, or None if torch does not support its dtype."""
    array = numpy.asarray(value)
    if not array.dtype.isnative:
        return None
    if not array.flags.c_contiguous or not array.flags.writeable:
        array = array.copy(order="C")
    try:
        tensor = torch.from_numpy(array)
    except TypeError:
        return None
    return tensor if tensor.numpy().dtype == array.dtype else None


def _is_loadable(value: Any) -> bool:
    """Whether ``torch.load`` can read the saved value; programs can register more classes as safe."""
    if type(value) is torch.Tensor and value.layout in _SPARSE and not value.__dict__:
        return True  # not tried: from torch 2.14 on ``torch.load`` warns about its checks
    raw = io.BytesIO()
    try:
        torch.save(value, raw)
        raw.seek(0)
        torch.load(raw, map_location="cpu", weights_only=True)
    except Exception:
        return False
    return True


def _decoded(value: Any, done: dict[int, Any]) -> Any:
    kind = type(value)
    if kind not in _DICTS and kind not in _SEQUENCES:
        return value
    if id(value) in done:
        return done[id(value)]
    if kind is dict and len(value) == 1 and (_ARRAY in value or _SCALAR in value):
        ((name, tensor),) = value.items()
        try:
            array = tensor.numpy()
        except RuntimeError as error:
            raise UsageError("the state contains numpy values, and numpy is not installed here") from error
        decoded = array[()] if name == _SCALAR else array
    elif kind in _DICTS:
        decoded = value
        for key, each in value.items():
            value[key] = _decoded(each, done)  # in place: torch.load has just made this dict
    else:
        same = [_decoded(each, done) for each in value]
        changed = any(one is not other for one, other in zip(same, value, strict=True))
        decoded = kind(same) if changed else value
    done[id(value)] = decoded
    return decoded


# -- error messages ------------------------------------------------------------------------------


def _describe(value: Any) -> str:
    kind = type(value)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    if kind is int:
        return "an int of more than 64 bits"
    dtype = getattr(value, "dtype", None)
    return f"of type {name}{f' with dtype {dtype}' if dtype is not None else ''}"


#: For each type, the expression to use instead of ``x``.
_INSTEAD: tuple[tuple[type | tuple[type, ...], str], ...] = (
    (enum.Enum, "x.name or x.value"),
    (defaultdict, "dict(x)"),
    (deque, "list(x)"),
    (frozenset, "set(x)"),
    (range, "(x.start, x.stop, x.step)"),
    (slice, "(x.start, x.stop, x.step)"),
    ((datetime.datetime, datetime.date, datetime.time), "x.isoformat()"),
    (datetime.timedelta, "x.total_seconds()"),
    ((pathlib.PurePath, decimal.Decimal, fractions.Fraction, uuid.UUID), "str(x)"),
    (torch.Generator, "x.get_state()"),
    (torch.Tensor, "x.detach().clone() of a dense torch.Tensor without attributes"),
)

#: The same for kinds of numpy dtypes whose ``tolist()`` is refused too.
_INSTEAD_OF_KIND = {"m": "x.astype('int64')", "M": "x.astype('int64')", "f": "x.astype('float64')"}


def _replacement(value: Any) -> str:
    if hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
        return "a part for it, State(name=x)"
    for kinds, words in _INSTEAD:
        if isinstance(value, kinds):
            return words
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return "dataclasses.asdict(x)"
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return "x._asdict() or tuple(x)"
    if type(value) is int:
        return "str(x)"
    for kind in (dict, list, tuple, set, bool, int, float, complex, str, bytes):
        if isinstance(value, kind):
            return f"{kind.__name__}(x)"
    if hasattr(value, "tolist"):
        return _INSTEAD_OF_KIND.get(getattr(getattr(value, "dtype", None), "kind", ""), "x.tolist()")
    return (
        "None, numbers, strings, bytes, tensors and lists, tuples, dicts and sets of them, or pass an object "
        "with state_dict and load_state_dict as a part"
    )
