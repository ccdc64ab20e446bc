"""The operations of a store: as requests, and as methods of the object that holds the data.

A TCP store sends requests to its server, and a file store writes them to its log. ``apply`` executes a
request on :class:`Operations`, which define each operation in terms of three; :class:`KeyTable` executes all
of them on a dictionary. The number of a request (``tag``) is part of logs and of the wire format: it is never
reused.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Annotated, Any, ClassVar, Generic, TypeVar, get_args, get_type_hints

import msgspec
from msgspec.structs import replace

from ..common.decoding import Raw, msgpack_decoder
from ..errors import StoreError

#: longest value in bytes
MAX_VALUE = 64 * 2**20

#: counters are in the range from -_MOST to _MOST - 1
_COUNTER_LIMIT = 2**63

T = TypeVar("T")
_Self = TypeVar("_Self", bound="StoreRequest[Any]")


class ValueRefused(StoreError):
    """The old or new value of a key does not permit the operation; nothing was changed."""


class KeysMissing(Exception):
    """A request cannot be executed until these keys exist."""

    def __init__(self, keys: Sequence[str]) -> None:
        super().__init__(keys)
        self.keys = keys


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
MAX_CALLS, MAX_TOGETHER_BYTES = 16, 2**15


def _size(call: Call) -> int:
    values = (getattr(call, name, b"") for name in ("value", "expected", "desired"))
    return len(call.key.encode()) + sum(map(len, values))


class TogetherResult(msgspec.Struct, frozen=True, array_like=True):
    """The results of the executed requests of :class:`Together`, and the reason why the next one failed."""

    results: list[Any]
    failure: str = ""


def too_long_found(length: int) -> str:
    """Return the failure of a CompareSet that found a value of ``length`` bytes."""
    return f"a value of {length} bytes was found: {MAX_TOGETHER_BYTES} at most"


def one_by_one(operations: Operations, calls: Sequence[Call]) -> TogetherResult:
    """Make the calls in order, up to the first that fails or a CompareSet that finds another value."""
    results: list[Any] = []
    for call in calls:
        try:
            result: Any = call.apply(operations)
        except ValueRefused as error:
            return TogetherResult(results, str(error))
        if isinstance(call, CompareSet) and result != call.desired:
            if len(result) > MAX_TOGETHER_BYTES:
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
        if (size := sum(map(_size, self.requests))) > MAX_TOGETHER_BYTES:
            return TogetherResult(
                [], f"{size} bytes of keys and values: at most {MAX_TOGETHER_BYTES} can be set together"
            )
        return operations.together(self.requests) if self.requests else TogetherResult([])

    def under(self, start: str) -> Together:
        return Together([request.under(start) for request in self.requests])


class Operations(abc.ABC):
    """All operations on keys, in terms of the three abstract ones.

    A subclass overrides the operations that it can do in fewer steps.
    """

    #: longest value in bytes
    longest_value: int = MAX_VALUE

    @abc.abstractmethod
    def get_now(self, key: str) -> bytes | None:
        """Return the value of ``key``; None if it does not exist."""

    @abc.abstractmethod
    def swap(self, key: str, held: bytes | None, value: bytes | None) -> bool:
        """Set ``key`` to ``value`` if its value is ``held``, in one atomic step.

        None stands for a missing key: ``held=None`` creates the key, ``value=None`` removes it.

        Returns:
            whether ``value`` was stored; False: the key has another value.
        """

    @abc.abstractmethod
    def list_keys(self, prefix: str) -> Sequence[str]:
        """Return the keys that start with ``prefix``, in any order."""

    def get_many(self, keys: Sequence[str]) -> Sequence[bytes | None]:
        """Return the values of ``keys``, or of at least one of the first ones if all would be too long."""
        return [self.get_now(key) for key in keys]

    def peek(self, keys: Sequence[str]) -> Sequence[bytes | None]:
        """Like :meth:`get_many`, for keys that may be missing or be removed meanwhile."""
        return self.get_many(keys)

    def missing(self, keys: Sequence[str]) -> list[str]:
        """Return those of ``keys`` that do not exist."""
        return [key for key in keys if self.get_now(key) is None]

    def count(self, prefix: str) -> int:
        """Return the number of keys that start with ``prefix``."""
        return len(self.list_keys(prefix))

    def set(self, key: str, value: bytes) -> None:
        """Set ``key`` to ``value``, whatever its value was."""
        self._change(key, lambda held: value)

    def set_many(self, items: Sequence[tuple[str, bytes]]) -> None:
        """Set several values, in one step if the store can do that."""
        for key, value in items:
            self.set(key, value)

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """See :meth:`shoal.store.Store.compare_set`."""
        _, value = self._change(key, lambda held: desired if (held or b"") == expected else held)
        return expected if value is None else value

    def add(self, key: str, amount: int) -> int:
        """Add to a counter and return the sum; StoreError if the value is not a counter."""

        def total(held: bytes | None) -> bytes:
            found = counted(key, held, amount)
            return held if held is not None and amount == 0 else b"%d" % found

        return int(self._change(key, total)[1] or 0)

    def append(self, key: str, value: bytes) -> None:
        """Append ``value`` to the value of ``key``; StoreError if it becomes too long."""

        def joined(held: bytes | None) -> bytes:
            whole = (held or b"") + value
            check_length(key, whole, self.longest_value)
            return whole

        self._change(key, joined)

    def delete(self, key: str) -> bool:
        """Remove ``key`` and return whether it existed."""
        held, _ = self._change(key, lambda held: None)
        return held is not None

    def delete_prefix(self, prefix: str) -> int:
        """Remove the keys that start with ``prefix`` and return their number."""
        return sum(self.delete(key) for key in self.list_keys(prefix))

    def together(self, calls: Sequence[Call]) -> TogetherResult:
        """Make several calls in order, in one step if the store can do that."""
        return one_by_one(self, calls)

    def _change(
        self, key: str, value_of: Callable[[bytes | None], bytes | None]
    ) -> tuple[bytes | None, bytes | None]:
        """Replace the value of ``key`` by ``value_of`` that value; return the old and the new value."""
        refusals = 0
        while True:
            held = self._held(key)
            value = value_of(held)
            if value is held or self.swap(key, held, value):
                return held, value
            refusals += 1
            self.swap_failed(key, refusals)

    def swap_failed(self, key: str, times: int) -> None:
        """Called after the ``times``-th failed :meth:`swap` of one call; may raise to stop the attempts."""

    def _held(self, key: str) -> bytes | None:
        """Return the value of ``key`` and check its type: :meth:`swap` would never match another type."""
        value = self.get_now(key)
        if value is None or isinstance(value, bytes):
            return value
        raise StoreError(
            f"{type(self).__name__}.get_now({key!r}) returned {type(value).__name__}, not bytes or None"
        )


class KeyTable(Operations):
    """Keys and values in a dictionary, for one thread at a time.

    Attributes:
        values: the data.
        touched: keys that were set or removed since the owner last cleared the list.
    """

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.touched: list[str] = []

    def get_now(self, key: str) -> bytes | None:
        return self.values.get(key)

    def swap(self, key: str, held: bytes | None, value: bytes | None) -> bool:
        if self.values.get(key) != held:
            return False
        if value is None:
            self.values.pop(key, None)
            self.touched.append(key)
        else:
            self.set(key, value)
        return True

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        held = self.values.get(key)
        if (held or b"") != expected:
            return expected if held is None else held
        if held != desired:
            self.set(key, desired)
        return desired

    def add(self, key: str, amount: int) -> int:
        held = self.values.get(key)
        total = counted(key, held, amount)
        if amount or held is None:
            self.set(key, b"%d" % total)
        return total

    def list_keys(self, prefix: str) -> list[str]:
        return [key for key in self.values if key.startswith(prefix)]

    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        """Return the values of the first keys: as many as fit into one message, at least one."""
        values: list[bytes | None] = []
        total = 0
        for key in keys:
            value = self.values.get(key)
            total += len(value or b"")
            if values and total > MAX_VALUE:
                break
            values.append(value)
        return values

    def missing(self, keys: Sequence[str]) -> list[str]:
        return [key for key in keys if key not in self.values]

    def count(self, prefix: str) -> int:
        return len(self.list_keys(prefix)) if prefix else len(self.values)

    def set(self, key: str, value: bytes) -> None:
        check_length(key, value, self.longest_value)
        self.values[key] = value
        self.touched.append(key)

    def set_many(self, items: Sequence[tuple[str, bytes]]) -> None:
        for key, value in items:
            check_length(key, value, self.longest_value)
        super().set_many(items)


def counted(key: str, held: bytes | None, amount: int) -> int:
    """Return ``held`` plus ``amount``. StoreError if it is not a counter, or the sum exceeds 64 bits."""
    held = b"0" if held is None else held
    if not held.removeprefix(b"-").isdigit() or len(held) > 20:
        raise ValueRefused(f"cannot add to key {key!r}: it holds {held[:40]!r}, which is no counter")
    total = int(held) + amount
    if not -_COUNTER_LIMIT <= total < _COUNTER_LIMIT:
        raise ValueRefused(f"cannot add {amount} to key {key!r}: {total} does not fit in 64 bits")
    return total


def check_length(key: str, value: bytes, longest: int) -> None:
    """Raise StoreError if ``value`` is longer than the store permits."""
    if len(value) > longest:
        raise too_long(key, len(value), longest)


def too_long(key: str, length: int, longest: int) -> ValueRefused:
    """Return the error for a value of ``length`` bytes."""
    return ValueRefused(f"key {key!r}: {length} bytes, this store takes at most {longest} in a value")


_AnyRequest = (
    Set | Get | Wait | Add | CompareSet | Delete | Check | NumKeys | ListKeys | Append | MultiSet
    | DeletePrefix | Peek | Together
)  # fmt: skip

#: the type of each request's result, for decoding replies
RESULTS: dict[type[StoreRequest[Any]], Any] = {
    request: get_type_hints(request.apply)["return"] for request in get_args(_AnyRequest)
}

#: convert a request to msgpack and back; MalformedMessage for bytes that are not a request
_encoder = msgspec.msgpack.Encoder()
encode, encode_into = _encoder.encode, _encoder.encode_into
decode: Callable[[Raw], StoreRequest[Any]] = msgpack_decoder(_AnyRequest)
