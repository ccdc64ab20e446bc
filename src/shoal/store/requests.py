"""The operations of a store as records, each with what it does to a table of keys.

They are what travels to a TCP store's server and what a file store writes to its log, and
``apply`` is the one place that says what each of them means.  The number of a record (``tag``)
stands in logs and on the wire: it is never given to another record.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar, Generic, TypeVar

import msgspec

from ..errors import StoreError
from .base import MAX_VALUE

T = TypeVar("T")

_MOST = 2**63


class Table:
    """Keys and values.

    Attributes:
        values: the data.
        touched: keys that were given a value or removed since the owner last emptied the list.
    """

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.touched: list[str] = []

    def put(self, key: str, value: bytes) -> None:
        """Give ``key`` a value.  StoreError if it is too long."""
        check_length(key, value)
        self.values[key] = value
        self.touched.append(key)

    def missing(self, keys: Iterable[str]) -> list[str]:
        """Those of ``keys`` that do not exist."""
        return [key for key in keys if key not in self.values]


def check_length(key: str, value: bytes) -> None:
    """Raise StoreError if ``value`` is longer than a store takes."""
    if len(value) > MAX_VALUE:
        raise StoreError(f"key {key!r}: {len(value)} bytes, a store takes at most {MAX_VALUE} in a value")


class Request(msgspec.Struct, Generic[T], frozen=True, array_like=True):
    """One operation whose result is a ``T``."""

    #: whether it can change the table
    writes: ClassVar[bool] = True

    def apply(self, table: Table) -> T:
        """Do it.  Raises StoreError, and then the table is as before."""
        raise NotImplementedError


class Blocking(Request[T], Generic[T], frozen=True, array_like=True):
    """An operation that is applied only once all its keys exist.

    Attributes:
        keys: what must exist.
        timeout: seconds until it fails.
    """

    keys: list[str]
    timeout: float
    writes: ClassVar[bool] = False


class Set(Request[None], frozen=True, array_like=True, tag=1):
    key: str
    value: bytes

    def apply(self, table: Table) -> None:
        table.put(self.key, self.value)


class Get(Blocking[list[bytes]], frozen=True, array_like=True, tag=2):
    """The values of the first keys: as many as fit into one message, and at least one."""

    def apply(self, table: Table) -> list[bytes]:
        values: list[bytes] = []
        total = 0
        for key in self.keys:
            total += len(table.values[key])
            if values and total > MAX_VALUE:
                break
            values.append(table.values[key])
        return values


class Wait(Blocking[None], frozen=True, array_like=True, tag=3):
    def apply(self, table: Table) -> None:
        return None


class Add(Request[int], frozen=True, array_like=True, tag=4):
    key: str
    amount: int

    def apply(self, table: Table) -> int:
        held = table.values.get(self.key, b"0")
        if not held.removeprefix(b"-").isdigit() or len(held) > 20:
            raise StoreError(f"cannot add to key {self.key!r}: it holds {held[:40]!r}, which is no counter")
        total = int(held) + self.amount
        if not -_MOST <= total < _MOST:
            raise StoreError(f"cannot add {self.amount} to key {self.key!r}: {total} does not fit in 64 bits")
        table.put(self.key, b"%d" % total)
        return total


class CompareSet(Request[bytes], frozen=True, array_like=True, tag=5):
    key: str
    expected: bytes
    desired: bytes

    def apply(self, table: Table) -> bytes:
        held = table.values.get(self.key)
        if held == self.expected or (held is None and not self.expected):
            table.put(self.key, self.desired)
            return self.desired
        return self.expected if held is None else held


class Delete(Request[bool], frozen=True, array_like=True, tag=6):
    key: str

    def apply(self, table: Table) -> bool:
        if table.values.pop(self.key, None) is None:
            return False
        table.touched.append(self.key)
        return True


class Check(Request[bool], frozen=True, array_like=True, tag=7):
    keys: list[str]
    writes: ClassVar[bool] = False

    def apply(self, table: Table) -> bool:
        return not table.missing(self.keys)


class NumKeys(Request[int], frozen=True, array_like=True, tag=8):
    writes: ClassVar[bool] = False

    def apply(self, table: Table) -> int:
        return len(table.values)


class ListKeys(Request[list[str]], frozen=True, array_like=True, tag=9):
    prefix: str
    writes: ClassVar[bool] = False

    def apply(self, table: Table) -> list[str]:
        return sorted(key for key in table.values if key.startswith(self.prefix))


class Append(Request[None], frozen=True, array_like=True, tag=10):
    key: str
    value: bytes

    def apply(self, table: Table) -> None:
        table.put(self.key, table.values.get(self.key, b"") + self.value)


class MultiSet(Request[None], frozen=True, array_like=True, tag=11):
    items: list[tuple[str, bytes]]

    def apply(self, table: Table) -> None:
        for key, value in self.items:
            check_length(key, value)
        for key, value in self.items:
            table.put(key, value)


_AnyRequest = (
    Set | Get | Wait | Add | CompareSet | Delete | Check | NumKeys | ListKeys | Append | MultiSet
)  # fmt: skip

#: the type of each request's result, for those who decode it
RESULTS: dict[type[Request[Any]], Any] = {
    Set: None, Get: list[bytes], Wait: None, Add: int, CompareSet: bytes, Delete: bool, Check: bool,
    NumKeys: int, ListKeys: list[str], Append: None, MultiSet: None,
}  # fmt: skip

#: turn a request into msgpack and back; ``msgspec.DecodeError`` for bytes that are none
encode = msgspec.msgpack.Encoder().encode
_decoder: msgspec.msgpack.Decoder[Request[Any]] = msgspec.msgpack.Decoder(_AnyRequest)
decode = _decoder.decode
