"""Values on their way: one pickle, and beside it the memory of tensors and buffers, which nobody copies.

    message = encode(value, route, "torch.add at 'ps'")     # message.head, message.parts
    value = decode(head, parts, route)                      # at the other end

Tensors are taken out of the pickle (protocol 5), and so are NumPy's arrays and whatever else offers its
memory.  Tensors that share memory here share it there, and of memory that several tensors look into only the
span from the first byte in use to the last one is sent.  Functions and classes go by name.  What the other
end cannot import goes by value, through cloudpickle: lambdas, closures, and what stands in a ``__main__``
that the other end does not have.

The head begins with the number of storages and where each one's span begins; their memory is the first parts.

Small values of plain types (None, numbers, strings, bytes, tuples, lists, dictionaries, dense tensors) need
no pickle: C packs them whole (``cpp/bind/packed.cc``), elements of tensors among them, and the head says so.
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

from ...common.wording import in_words, text_of
from ...errors import UsageError
from ..connection.device_maps import DeviceMap
from ..connection.post import pack, unpack
from .tensors import Collected, Part, arrived, check, check_count, kind_of

_COUNT = struct.Struct("<I")
#: in the place of the number of storages: the value is packed and not pickled
_PACKED = 0xFFFFFFFF
_PACKED_HEAD = _COUNT.pack(_PACKED)
#: modules under which the program itself is known; multiprocessing's children have the second one
_MAIN = ("__main__", "__mp_main__")


class Route(Protocol):
    """Between which two workers a value travels, as far as pickling must know it."""

    @property
    def shares_main(self) -> bool:
        """Whether both ends run the same program, so that what stands in it is known by name."""

    @property
    def devices(self) -> DeviceMap | None:
        """Where tensors of devices go, if they can go at all."""

    def target(self, x: torch.Tensor) -> torch.device:
        """The device of ``x`` at the other end; raises UsageError if there is none."""


@dataclass(slots=True)
class EncodedValue:
    """A value, ready to be sent.  The memory of ``parts`` must not change until it is sent.

    Attributes:
        head: what is packed or pickled.
        parts: the memory beside it.
        keep: the objects that own it.
        travellers: what named itself to :func:`traveller`.
        staged: of the parts whose memory is a device's, their places among the parts, and their bytes;
            None: there are none.
        lands: whether tensors of it arrive on devices.
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
    """``obj`` is part of what this thread is pickling or unpickling, and those at its ends have to know."""
    if _local.travellers is not None:
        _local.travellers.append(obj)


def route() -> Any:
    """The route of the value that this thread is pickling or unpickling; None: it does neither."""
    return _local.route


class _On:
    """While the block runs, what this thread pickles or unpickles travels on ``way``."""

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
    """Pack ``value``, or pickle it.

    Args:
        way: where it goes; rebuilding functions at the other end find theirs by :func:`route`.
        where: begins the message of an error.

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
            f"{where}: {text_of(refused)}; what the other worker cannot import goes by value, for which "
            "cloudpickle is needed (pip install cloudpickle)"
        ) from refused
    try:
        return _dump(by_value, value)
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from None
    except Exception as error:
        raise _refusal(where, error) from error


def _refusal(where: str, error: Exception) -> UsageError:
    """For what pickling raised: code of the value's own, or the pickler of a value that is too deep."""
    return UsageError(f"{where} cannot be sent: {in_words(error)}")


def decode(head: Any, parts: Sequence[Any], way: Route | None, travellers: list[Any] | None = None) -> Any:
    """The value that :func:`encode` made ``head`` and ``parts`` of.

    Args:
        parts: writable memory, which tensors and arrays take over.
        travellers: gets what names itself to :func:`traveller`.
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
    """How ``obj`` is pickled; NotImplemented: as it says itself."""
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
                f"a {type(obj).__name__} {kind_of(obj)} and {obj.layout} lies on {obj.device}, "
                "and only plain and dense tensors of devices can be sent: send x.cpu()"
            )
    elif (
        isinstance(obj, (FunctionType, type))
        and obj.__module__ in _MAIN
        and "<" not in obj.__qualname__  # no lambda, nothing local to a function
    ):
        if _local.route is not None and _local.route.shares_main:
            return _of_main, (obj.__qualname__,)
        raise pickle.PicklingError(
            f"{obj.__qualname__} stands in a program that the other worker does not run"
        )
    return NotImplemented


class _Pickler(pickle.Pickler):
    collected: Collected

    def reducer_override(self, obj: Any) -> Any:
        return _override(self.collected, obj)


def _by_value() -> type[Any] | None:
    """A pickler that takes along what has no name at the other end; None: cloudpickle is not installed."""
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
    """A tensor over ``memory``, or over a copy if it may not be written to: torch has no such tensors."""
    if not memory.nbytes:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.frombuffer(bytearray(memory) if memory.readonly else memory, dtype=torch.uint8)


_NO_STORAGES = _COUNT.pack(0)


def _of_main(qualname: str) -> Any:
    return reduce(getattr, qualname.split("."), sys.modules["__main__"])
