"""Encoding of values: one pickle (the head), and the memory of tensors and buffers (the parts), not copied.

    message = encode(value, route, "torch.add at 'ps'")     # message.head, message.parts
    value = decode(head, parts, route)                      # at the other end

- Tensors, NumPy arrays and other out-of-band buffers (pickle protocol 5) are not in the pickle.  Tensors that
  share memory share it after decoding too; of each storage only the span in use is sent.
- Functions and classes are pickled by name.  Those that the other end cannot import (lambdas, closures, those
  of a ``__main__`` that the other end does not run) are pickled by value, with cloudpickle.
- The head begins with the number of storages and the start of each span; their memory is in the first parts.
- Small values of plain types (None, numbers, strings, bytes, tuples, lists, dictionaries, dense tensors) are
  packed as a whole by C++ (``cpp/python/packed.cc``) instead of pickled; the head has :data:`_PACKED` then.
"""

from __future__ import annotations

import io
import pickle
import struct
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from types import FunctionType
from typing import Any, Protocol

import torch

from ...common.formatting import describe_error, text_of
from ...errors import UsageError
from ..connection.device_maps import DeviceMap
from ..connection.post import pack, unpack
from .tensors import Collected, Part, arrived, check, check_count, kind_of

_COUNT = struct.Struct("<I")
#: replaces the number of storages: the value is packed and not pickled
_PACKED = 0xFFFFFFFF
_PACKED_HEAD = _COUNT.pack(_PACKED)
#: module names of the main program; the second one is that of multiprocessing's children
_MAIN = ("__main__", "__mp_main__")


class Route(Protocol):
    """The part of a connection between two workers that pickling uses."""

    @property
    def shares_main(self) -> bool:
        """Whether both ends run the same program, so that its functions and classes are sent by name."""

    @property
    def devices(self) -> DeviceMap | None:
        """The device map; None: tensors on devices cannot be sent."""

    def target(self, x: torch.Tensor) -> torch.device:
        """Return the device of ``x`` at the other end; raise UsageError if there is none."""


@dataclass(slots=True)
class EncodedValue:
    """A value, ready to be sent.  The memory of ``parts`` must not change until it is sent.

    Attributes:
        head: the packed or pickled value.
        parts: the memory of tensors and buffers.
        keep: the objects that own the memory.
        travellers: the objects that called :func:`traveller`.
        staged: index -> bytes of each part that is in device memory; None: there are none.
        lands: whether it has tensors that arrive on devices.
    """

    head: bytes
    parts: Sequence[Part] = ()
    keep: Sequence[object] = ()
    travellers: Sequence[Any] = ()
    staged: Mapping[int, torch.Tensor] | None = None
    lands: bool = False


class _PicklerLocal(threading.local):
    route: Any = None
    travellers: list[Any] | None = None


_local = _PicklerLocal()


def traveller(obj: object) -> None:
    """Add ``obj`` to the ``travellers`` of the value that this thread is pickling or unpickling."""
    if _local.travellers is not None:
        _local.travellers.append(obj)


def route() -> Any:
    """Return the route of the value that this thread is pickling or unpickling; None: it does neither."""
    return _local.route


class _On:
    """A context that sets the route of values that this thread pickles or unpickles; gives travellers."""

    __slots__ = ("_before", "_way")

    def __init__(self, way: Any) -> None:
        self._way = way

    def __enter__(self) -> list[Any]:
        self._before = _local.route, _local.travellers
        travellers: list[Any] = []
        _local.route, _local.travellers = self._way, travellers
        return travellers

    def __exit__(self, *_: object) -> None:
        _local.route, _local.travellers = self._before


def encode(value: object, way: Route | None, where: str) -> EncodedValue:
    """Pack or pickle ``value``.

    Args:
        way: the route, returned by :func:`route` during pickling.
        where: prefix of error messages.

    Raises:
        UsageError: the value, or something in it, cannot be sent.
    """
    if way is None or way.devices is None or not way.devices.maps_cpu:
        packed = pack(value, _PACKED_HEAD)
        if packed is not None:
            return EncodedValue(packed)
    with _On(way) as travellers:
        message = _encode(value, where, travellers)
        message.travellers = travellers
        return message


def _encode(value: object, where: str, travellers: list[Any]) -> EncodedValue:
    try:
        return _dump(_Pickler, value)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        if isinstance(error, UsageError):
            raise UsageError(f"{where}: {error}") from None
        refused = error
    except Exception as error:
        raise _refusal(where, error) from error
    travellers.clear()
    by_value = _by_value()
    if by_value is None:
        raise UsageError(
            f"{where}: {text_of(refused)}; to send by value what the other worker cannot import, install "
            "cloudpickle (pip install cloudpickle)"
        ) from refused
    try:
        return _dump(by_value, value)
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from None
    except Exception as error:
        raise _refusal(where, error) from error


def _refusal(where: str, error: Exception) -> UsageError:
    """The error for an exception raised while pickling, by code of the value or for too deep nesting."""
    return UsageError(f"{where} cannot be sent: {describe_error(error)}")


def decode(head: Any, parts: Sequence[Any], way: Route | None, travellers: list[Any] | None = None) -> Any:
    """Return the value that :func:`encode` encoded as ``head`` and ``parts``.

    Args:
        parts: writable memory, which becomes the memory of tensors and arrays.
        travellers: the objects that call :func:`traveller` are appended to it.
    """
    view = memoryview(head)
    (count,) = _COUNT.unpack_from(view)
    if count == _PACKED:
        return unpack(view, _COUNT.size)
    at = _COUNT.size + 8 * count
    if count > len(parts):
        raise pickle.UnpicklingError(f"{count} storages in {len(parts)} parts")
    with _On(way) as named:
        if count:
            starts = struct.unpack_from(f"<{count}Q", view, _COUNT.size)
            with arrived(parts[:count], starts):
                value = pickle.loads(view[at:], buffers=parts[count:])
        else:
            value = pickle.loads(view[at:], buffers=parts)
    if travellers is not None:
        travellers += named
    return value


def _override(collected: Collected, obj: Any) -> Any:
    """Return how ``obj`` is pickled, as ``reducer_override`` does; NotImplemented: the default way."""
    if isinstance(obj, torch.Tensor):
        check(obj)
        plain = type(obj) in (torch.Tensor, torch.nn.Parameter)
        if plain and obj.layout is torch.strided and not (obj.is_quantized or obj.is_meta or obj.is_nested):
            if obj.is_conj() or obj.is_neg():
                resolved = obj.detach().resolve_conj().resolve_neg()
                return collected.reduce(resolved.requires_grad_(obj.requires_grad))
            return collected.reduce(obj)
        if obj.device.type not in ("cpu", "meta"):
            raise UsageError(
                f"a {type(obj).__name__} {kind_of(obj)} and {obj.layout} is on {obj.device}, "
                "and only plain, dense tensors on devices can be sent: send x.cpu()"
            )
    elif (
        isinstance(obj, (FunctionType, type))
        and obj.__module__ in _MAIN
        and "<" not in obj.__qualname__  # not a lambda, not local to a function
    ):
        if _local.route is not None and _local.route.shares_main:
            return _of_main, (obj.__qualname__,)
        raise pickle.PicklingError(
            f"{obj.__qualname__} is defined in a program that the other worker does not run"
        )
    return NotImplemented


class _Pickler(pickle.Pickler):
    collected: Collected

    def reducer_override(self, obj: Any) -> Any:
        return _override(self.collected, obj)


def _by_value() -> type[Any] | None:
    """Return a pickler that pickles by value what the other end cannot import; None without cloudpickle."""
    global _value_pickler
    if _value_pickler is None:
        try:
            import cloudpickle  # type: ignore[import-untyped, unused-ignore]
        except ImportError:
            return None

        class ByValue(cloudpickle.Pickler):  # type: ignore[misc, unused-ignore]
            def reducer_override(self, obj: Any) -> Any:
                try:
                    reduced = _override(self.collected, obj)
                except pickle.PicklingError:
                    reduced = NotImplemented
                return super().reducer_override(obj) if reduced is NotImplemented else reduced

        _value_pickler = ByValue
    return _value_pickler


_value_pickler: type[Any] | None = None


def _dump(pickler: type[Any], value: object) -> EncodedValue:
    buffers: list[pickle.PickleBuffer] = []
    with io.BytesIO() as file:
        file.write(_NO_STORAGES)
        writer = pickler(file, 5, buffer_callback=buffers.append)
        collected = writer.collected = Collected(_local.route)
        writer.dump(value)
        beside = [_bytes_of(buffer.raw()) for buffer in buffers]
        parts = [*collected.parts(), *((x.data_ptr(), x.numel()) for x in beside)]
        keep = [*collected.keep, *beside]
        check_count(parts)
        if not collected.spans:
            return EncodedValue(file.getvalue(), parts, keep)
        starts = struct.pack(
            f"<I{len(collected.spans)}Q", len(collected.spans), *(s[0] for s in collected.spans)
        )
        head = b"".join((starts, file.getbuffer()[_COUNT.size :]))
    message = EncodedValue(head, parts, keep)
    if collected.on_devices:
        message.staged = collected.staged()
    message.lands = collected.lands
    return message


def _bytes_of(memory: memoryview) -> torch.Tensor:
    """Return a tensor over ``memory``, or over a copy if it is read-only, which torch does not support."""
    if not memory.nbytes:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.frombuffer(bytearray(memory) if memory.readonly else memory, dtype=torch.uint8)


_NO_STORAGES = _COUNT.pack(0)


def _of_main(qualname: str) -> Any:
    return reduce(getattr, qualname.split("."), sys.modules["__main__"])
