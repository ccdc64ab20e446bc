"""The calls of a store as records, which a TCP store sends to its server and a file store writes to its log.

``apply`` executes a request on :class:`~shoal.store.operations.Operations`, which define each operation.
The number of a request (``tag``) is part of logs and of the wire format: it is never reused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, ClassVar, Generic, TypeVar

import msgspec
from msgspec.structs import replace

from ..common.decoding import Raw, msgpack_decoder
from .operations import KeysMissing, Operations, ValueRefused

T = TypeVar("T")
_Self = TypeVar("_Self", bound="StoreRequest[Any]")


class StoreRequest(msgspec.Struct, Generic[T], frozen=True, array_like=True):
    """One operation whose result is a ``T``."""

    #: whether the request can change something
    writes: ClassVar[bool] = True

    def apply(self, operations: Operations) -> T:
        """Execute the request. Raises StoreError or KeysMissing, and has changed nothing then."""
        raise NotImplementedError

    def under(self: _Self, start: str) -> _Self:
        """Return the same request with ``start`` before each key."""
        raise NotImplementedError


class _OneKey(StoreRequest[T], Generic[T], frozen=True, array_like=True):
    key: str

    def under(self: _Self, start: str) -> _Self:
        return replace(self, key=start + self.key)  # type: ignore[attr-defined]


class _Keys(StoreRequest[T], Generic[T], frozen=True, array_like=True):
    keys: list[str]
    writes: ClassVar[bool] = False

    def under(self: _Self, start: str) -> _Self:
        return replace(self, keys=[start + key for key in self.keys])  # type: ignore[attr-defined]


class _Prefix(StoreRequest[T], Generic[T], frozen=True, array_like=True):
    prefix: str

    def under(self: _Self, start: str) -> _Self:
        return replace(self, prefix=start + self.prefix)  # type: ignore[attr-defined]


class Blocking(_Keys[T], Generic[T], frozen=True, array_like=True):
    """An operation that waits until all its keys exist, for at most ``timeout`` seconds."""

    timeout: float


class Set(_OneKey[None], frozen=True, array_like=True, tag=1):
    value: bytes

    def apply(self, operations: Operations) -> None:
        operations.set(self.key, self.value)


class Get(Blocking[list[bytes]], frozen=True, array_like=True, tag=2):
    """The values of the first keys: as many as fit into one message, at least one."""

    def apply(self, operations: Operations) -> list[bytes]:
        if len(self.keys) == 1:
            value = operations.get_now(self.keys[0])
            if value is None:
                raise KeysMissing(self.keys)
            return [value]
        if missing := operations.missing(self.keys):  # checked first, so that no value is read in vain
            raise KeysMissing(missing)
        values = []
        for key, value in zip(self.keys, operations.get_many(self.keys)):  # noqa: B905
            if value is None:
                raise KeysMissing([key])
            values.append(value)
        return values


class Wait(Blocking[None], frozen=True, array_like=True, tag=3):
    def apply(self, operations: Operations) -> None:
        if missing := operations.missing(self.keys):
            raise KeysMissing(missing)


class Add(_OneKey[int], frozen=True, array_like=True, tag=4):
    amount: int

    def apply(self, operations: Operations) -> int:
        return operations.add(self.key, self.amount)


class CompareSet(_OneKey[bytes], frozen=True, array_like=True, tag=5):
    expected: bytes
    desired: bytes

    def apply(self, operations: Operations) -> bytes:
        return operations.compare_set(self.key, self.expected, self.desired)


class Delete(_OneKey[bool], frozen=True, array_like=True, tag=6):
    def apply(self, operations: Operations) -> bool:
        return operations.delete(self.key)


class Check(_Keys[bool], frozen=True, array_like=True, tag=7):
    def apply(self, operations: Operations) -> bool:
        return not operations.missing(self.keys)


class NumKeys(_Prefix[int], frozen=True, array_like=True, tag=8):
    writes: ClassVar[bool] = False

    def apply(self, operations: Operations) -> int:
        return operations.count(self.prefix)


class ListKeys(_Prefix[list[str]], frozen=True, array_like=True, tag=9):
    writes: ClassVar[bool] = False

    def apply(self, operations: Operations) -> list[str]:
        return sorted(operations.list_keys(self.prefix))


class Append(_OneKey[None], frozen=True, array_like=True, tag=10):
    value: bytes

    def apply(self, operations: Operations) -> None:
        operations.append(self.key, self.value)


class MultiSet(StoreRequest[None], frozen=True, array_like=True, tag=11):
    items: list[tuple[str, bytes]]

    def apply(self, operations: Operations) -> None:
        operations.set_many(self.items)

    def under(self, start: str) -> MultiSet:
        return MultiSet([(start + key, value) for key, value in self.items])


class DeletePrefix(_Prefix[int], frozen=True, array_like=True, tag=12):
    def apply(self, operations: Operations) -> int:
        return operations.delete_prefix(self.prefix)


class Peek(_Keys[list[bytes | None]], frozen=True, array_like=True, tag=13):
    """The current values of the first keys: as many as fit into one message."""

    def apply(self, operations: Operations) -> list[bytes | None]:
        return list(operations.peek(self.keys)) if self.keys else []


#: the calls that :class:`Together` accepts
Call = Set | Add | CompareSet | Delete | Append
#: limits: number of calls; bytes of their keys and values, and of a value that a CompareSet finds.
#: They keep the replies that a server stores short, and other clients from waiting long.
MAX_CALLS, SHORT = 16, 2**15


def _size(call: Call) -> int:
    values = (getattr(call, name, b"") for name in ("value", "expected", "desired"))
    return len(call.key.encode()) + sum(map(len, values))


class TogetherResult(msgspec.Struct, frozen=True, array_like=True):
    """The results of the executed requests of :class:`Together`, and the reason why the next one failed."""

    results: list[Any]
    failure: str = ""


def too_long_found(length: int) -> str:
    """Return the failure of a CompareSet that found a value of ``length`` bytes."""
    return f"a value of {length} bytes was found: {SHORT} at most"


def _one_by_one(operations: Operations, calls: Sequence[Call]) -> TogetherResult:
    results: list[Any] = []
    for call in calls:
        try:
            result: Any = call.apply(operations)
        except ValueRefused as error:
            return TogetherResult(results, str(error))
        if isinstance(call, CompareSet) and result != call.desired:
            if len(result) > SHORT:
                return TogetherResult(results, too_long_found(len(result)))
            return TogetherResult([*results, result])
        results.append(result)
    return TogetherResult(results)


class Together(StoreRequest[TogetherResult], frozen=True, array_like=True, tag=14):
    """Writes, executed in order, up to the first that fails or a CompareSet that finds another value.

    Atomic, with the exceptions that :meth:`shoal.store.Store.together` lists.
    """

    requests: Annotated[list[Call], msgspec.Meta(max_length=MAX_CALLS)]

    def apply(self, operations: Operations) -> TogetherResult:
        if (size := sum(map(_size, self.requests))) > SHORT:
            return TogetherResult([], f"{size} bytes of keys and values: at most {SHORT} can be set together")
        return operations.together(self.requests, _one_by_one) if self.requests else TogetherResult([])

    def under(self, start: str) -> Together:
        return Together([request.under(start) for request in self.requests])


_AnyRequest = (
    Set | Get | Wait | Add | CompareSet | Delete | Check | NumKeys | ListKeys | Append | MultiSet
    | DeletePrefix | Peek | Together
)  # fmt: skip

#: the type of each request's result, for decoding replies
RESULTS: dict[type[StoreRequest[Any]], Any] = {
    Set: None, Get: list[bytes], Wait: None, Add: int, CompareSet: bytes, Delete: bool, Check: bool,
    NumKeys: int, ListKeys: list[str], Append: None, MultiSet: None, DeletePrefix: int,
    Peek: list[bytes | None], Together: TogetherResult,
}  # fmt: skip

#: convert a request to msgpack and back; MalformedMessage for bytes that are not a request
_encoder = msgspec.msgpack.Encoder()
encode, encode_into = _encoder.encode, _encoder.encode_into
decode: Callable[[Raw], StoreRequest[Any]] = msgpack_decoder(_AnyRequest)
