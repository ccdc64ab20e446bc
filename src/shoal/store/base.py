"""The interface of a store: a small key-value server through which the processes of a job meet.

Keys are any text, values bytes of up to 64 MB.  A blocking call has a deadline always: its own, or
the store's.  ``tests/store/conformance.py`` is the same contract as tests; a store of one's own
should pass it.

The set of operations is that of ``torch.distributed``'s stores, so that what is known about those
holds here.
"""

from __future__ import annotations

import abc
import os
from collections.abc import Sequence
from types import TracebackType
from typing import TypeVar

from .. import config
from ..errors import ForkedProcess, StoreError, StoreTimeout, UsageError

#: longest value in bytes
MAX_VALUE = 64 * 2**20

Value = bytes | bytearray | memoryview | str
_Self = TypeVar("_Self", bound="Store")


class Store(abc.ABC):
    """A key-value store.  All methods may be called from several threads at once.

    Every method raises ``StoreError`` when the store cannot be reached or was closed, and
    ``ForkedProcess`` in a child that inherited the store by ``fork``.

    Args:
        timeout: default deadline of every call in seconds; ``SHOAL_TIMEOUT`` unless given.
    """

    #: default deadline of every call in seconds; may be assigned
    timeout: float

    def __init__(self, timeout: float | None = None) -> None:
        self.timeout = config.TIMEOUT.get() if timeout is None else timeout
        self._pid = os.getpid()

    @abc.abstractmethod
    def set(self, key: str, value: Value) -> None:
        """Store ``value`` under ``key``, in place of what was there; a ``str`` is encoded as UTF-8."""

    @abc.abstractmethod
    def get(self, key: str, timeout: float | None = None) -> bytes:
        """The value of ``key``, as soon as it has one.  ``StoreTimeout`` when it gets none in time."""

    @abc.abstractmethod
    def wait(self, keys: Sequence[str], timeout: float | None = None) -> None:
        """Block until all ``keys`` exist.  ``StoreTimeout`` names those that were missing."""

    @abc.abstractmethod
    def add(self, key: str, amount: int) -> int:
        """Add ``amount`` to the counter ``key``, which starts from 0, and return the sum.

        The counter is stored as decimal ASCII.  ``StoreError`` if ``key`` holds something else or
        the sum does not fit in 64 bits.
        """

    @abc.abstractmethod
    def compare_set(self, key: str, expected: Value, desired: Value) -> bytes:
        """Store ``desired`` if the value equals ``expected``, or if there is none and ``expected`` is empty.

        Returns:
            the value that is stored now; ``expected`` when there is none.
        """

    @abc.abstractmethod
    def delete(self, key: str) -> bool:
        """Remove ``key``; whether it existed."""

    @abc.abstractmethod
    def check(self, keys: Sequence[str]) -> bool:
        """Whether all ``keys`` exist now."""

    @abc.abstractmethod
    def num_keys(self) -> int:
        """The number of keys."""

    @abc.abstractmethod
    def list_keys(self, prefix: str = "") -> list[str]:
        """All keys that start with ``prefix``, sorted."""

    @abc.abstractmethod
    def append(self, key: str, value: Value) -> None:
        """Add ``value`` at the end of what ``key`` holds, or store it if there is nothing."""

    @abc.abstractmethod
    def multi_get(self, keys: Sequence[str], timeout: float | None = None) -> list[bytes]:
        """The values of ``keys``, in their order, as soon as all exist."""

    @abc.abstractmethod
    def multi_set(self, keys: Sequence[str], values: Sequence[Value]) -> None:
        """Store one value under each key.  All at once as far as others can see, up to 64 MB in all."""

    @abc.abstractmethod
    def clone(self) -> Store:
        """An independent connection to the same data, with a default deadline of its own."""

    @abc.abstractmethod
    def close(self) -> None:
        """Give up the connection; calls that are in progress in other threads raise ``StoreError``."""

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _forked(self) -> bool:
        return os.getpid() != self._pid

    def _refuse_forked(self) -> None:
        if self._forked():
            raise ForkedProcess(
                f"this {type(self).__name__} was opened by process {self._pid}, and process {os.getpid()} "
                "is a fork of it; open a store of its own in the child, or start workers with spawn"
            )


def checked_key(key: str) -> str:
    """``key`` itself, if it is text.  Raises UsageError."""
    if not isinstance(key, str):
        raise UsageError(f"a key must be a str, not {type(key).__name__}")
    if not key.isascii():
        try:
            key.encode()
        except UnicodeEncodeError:
            raise UsageError(f"key {key!r} is not valid Unicode") from None
    return key


def checked_keys(keys: Sequence[str]) -> list[str]:
    """``keys`` as a list, if it is a sequence of text and not one string.  Raises UsageError."""
    if isinstance(keys, str):
        raise UsageError(f"expected a sequence of keys, got the single str {keys!r}")
    return [checked_key(key) for key in keys]


def checked_value(value: Value) -> bytes:
    """``value`` as bytes.  Raises UsageError for another type, StoreError if it is too long."""
    if isinstance(value, str):
        value = value.encode()
    elif not isinstance(value, bytes):
        if not isinstance(value, (bytearray, memoryview)):
            raise UsageError(f"a value must be bytes or str, not {type(value).__name__}")
        value = bytes(value)
    if len(value) > MAX_VALUE:
        raise StoreError(f"a value of {len(value)} bytes: a store takes at most {MAX_VALUE}")
    return value


def timed_out(missing: Sequence[str], timeout: float) -> StoreTimeout:
    """The error that names the keys that were missing."""
    named = ", ".join(repr(key) for key in missing[:16])
    more = f" and {len(missing) - 16} more" if len(missing) > 16 else ""
    return StoreTimeout(f"waited {timeout:g} s, and these keys were not set: {named}{more}")
