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
from typing import Any

import torch

from ...common.formatting import describe_error, text_of
from ...errors import UsageError
from ..connection.endpoint import pack, unpack
from ..connection.worker_connection import WorkerConnection
from .tensors import Part, TensorCollector, check, check_count, kind_of, received_storages

_COUNT = struct.Struct("<I")
#: replaces the number of storages: the value is packed and not pickled
_PACKED = 0xFFFFFFFF
_PACKED_HEAD = _COUNT.pack(_PACKED)
#: module names of the main program; the second one is that of multiprocessing's children
_MAIN = ("__main__", "__mp_main__")


@dataclass(slots=True)
class EncodedValue:
    """A value, ready to be sent.  The memory of ``parts`` must not change until it is sent.

    Attributes:
        head: the packed or pickled value.
        parts: the memory of tensors and buffers.
        keep: the objects that own the memory.
        references: the objects that called :func:`note_reference`.
        device_parts: index -> bytes of each part that is in device memory; None: there are none.
        arrives_on_device: whether it has tensors that arrive on devices.
    """

    head: bytes
    parts: Sequence[Part] = ()
    keep: Sequence[object] = ()
    references: Sequence[Any] = ()
    device_parts: Mapping[int, torch.Tensor] | None = None
    arrives_on_device: bool = False


class _PicklerLocal(threading.local):
    current_route: WorkerConnection | None = None
    references: list[Any] | None = None


_local = _PicklerLocal()


def note_reference(obj: object) -> None:
    """Add ``obj`` to the ``references`` of the value that this thread is pickling or unpickling."""
    if _local.references is not None:
        _local.references.append(obj)


def current_route() -> WorkerConnection | None:
    """Return the route of the value that this thread is pickling or unpickling; None: it does neither."""
    return _local.current_route


class _PicklingContext:
    """A context that sets the route of values that this thread pickles or unpickles; gives references."""

    __slots__ = ("_before", "_route")

    def __init__(self, route: WorkerConnection | None) -> None:
        self._route = route

    def __enter__(self) -> list[Any]:
        self._before = _local.current_route, _local.references
        references: list[Any] = []
        _local.current_route, _local.references = self._route, references
        return references

    def __exit__(self, *_: object) -> None:
        _local.current_route, _local.references = self._before


def encode(value: object, route: WorkerConnection | None, where: str) -> EncodedValue:
    """Pack or pickle ``value``.

    Args:
        route: the route, returned by :func:`current_route` during pickling.
        where: prefix of error messages.

    Raises:
        UsageError: the value, or something in it, cannot be sent.
    """
    if route is None or route.devices is None or not route.devices.maps_cpu:
        packed = pack(value, _PACKED_HEAD)
        if packed is not None:
            return EncodedValue(packed)
    with _PicklingContext(route) as references:
        encoded = _encode(value, where, references)
        encoded.references = references
        return encoded


def _encode(value: object, where: str, references: list[Any]) -> EncodedValue:
    try:
        return _dump(_Pickler, value)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        if isinstance(error, UsageError):
            raise UsageError(f"{where}: {error}") from None
        refused = error
    except Exception as error:
        raise _refusal(where, error) from error
    references.clear()
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


def decode(head: Any, parts: Sequence[Any], route: WorkerConnection | None) -> Any:
    """Return the value that :func:`encode` encoded as ``head`` and ``parts``.

    Args:
        parts: writable memory, which becomes the memory of tensors and arrays.
    """
    view = memoryview(head)
    (count,) = _COUNT.unpack_from(view)
    if count == _PACKED:
        return unpack(view, _COUNT.size)
    if count > len(parts):
        raise pickle.UnpicklingError(f"{count} storages in {len(parts)} parts")
    pickled = view[_COUNT.size + 8 * count :]
    with _PicklingContext(route):
        if not count:
            return pickle.loads(pickled, buffers=parts)
        starts = struct.unpack_from(f"<{count}Q", view, _COUNT.size)
        with received_storages(parts[:count], starts):
            return pickle.loads(pickled, buffers=parts[count:])


def _override(collector: TensorCollector, obj: Any) -> Any:
    """Return how ``obj`` is pickled, as ``reducer_override`` does; NotImplemented: the default way."""
    if isinstance(obj, torch.Tensor):
        check(obj)
        plain = type(obj) in (torch.Tensor, torch.nn.Parameter)
        if plain and obj.layout is torch.strided and not (obj.is_quantized or obj.is_meta or obj.is_nested):
            if obj.is_conj() or obj.is_neg():
                resolved = obj.detach().resolve_conj().resolve_neg()
                return collector.reduce(resolved.requires_grad_(obj.requires_grad))
            return collector.reduce(obj)
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
        if _local.current_route is not None and _local.current_route.shares_main:
            return _of_main, (obj.__qualname__,)
        raise pickle.PicklingError(
            f"{obj.__qualname__} is defined in a program that the other worker does not run"
        )
    return NotImplemented


class _Pickler(pickle.Pickler):
    collector: TensorCollector

    def reducer_override(self, obj: Any) -> Any:
        return _override(self.collector, obj)


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
                    reduced = _override(self.collector, obj)
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
        collector = writer.collector = TensorCollector(_local.current_route)
        writer.dump(value)
        beside = [_bytes_of(buffer.raw()) for buffer in buffers]
        parts = [*collector.parts(), *((x.data_ptr(), x.numel()) for x in beside)]
        keep = [*collector.keep, *beside]
        check_count(parts)
        if not collector.spans:
            return EncodedValue(file.getvalue(), parts, keep)
        starts = struct.pack(
            f"<I{len(collector.spans)}Q", len(collector.spans), *(s[0] for s in collector.spans)
        )
        head = b"".join((starts, file.getbuffer()[_COUNT.size :]))
    encoded = EncodedValue(head, parts, keep)
    if collector.on_devices:
        encoded.device_parts = collector.device_parts()
    encoded.arrives_on_device = collector.arrives_on_device
    return encoded


def _bytes_of(memory: memoryview) -> torch.Tensor:
    """Return a tensor over ``memory``, or over a copy if it is read-only, which torch does not support."""
    if not memory.nbytes:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.frombuffer(bytearray(memory) if memory.readonly else memory, dtype=torch.uint8)


_NO_STORAGES = _COUNT.pack(0)


def _of_main(qualname: str) -> Any:
    return reduce(getattr, qualname.split("."), sys.modules["__main__"])
