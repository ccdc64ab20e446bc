"""The interface of a store: a small key-value server through which the processes of a job meet.

Keys are any text, values bytes of up to 64 MB.  Every call has a deadline: its own, or the store's.
``tests/store/conformance.py`` is the same contract as tests; a store of one's own should pass it.

The operations are those of ``torch.distributed``'s stores, and have their meaning.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any, TypeVar, final

from msgspec.structs import replace

from .. import config
from ..common.copy_refusal import refuses_copies
from ..common.wording import in_seconds
from ..errors import ForkedProcess, StoreError, StoreTimeout, UsageError
from ..net import Deadline
from . import requests
from .backing import RequestExecutor
from .operations import MAX_VALUE, KeysMissing
from .requests import Call, StoreRequest

#: a number of seconds, or a ``timedelta`` as torch's stores take it; None: the store's default
Timeout = float | timedelta | None
Value = bytes | bytearray | memoryview | str
T = TypeVar("T")
_Self = TypeVar("_Self", bound="Store")


@refuses_copies(
    "a Store",
    "a connection, a file or memory",
    "Call clone() for a second client, or shoal.store.open_store() in the other process",
)
class Store:
    """A key-value store.  All methods may be called from several threads at once.

    This class checks arguments, waits, and raises; a backing holds the data.
    Every method raises ``StoreError`` when the store cannot be reached or was closed, and
    ``ForkedProcess`` in a child that inherited the store by ``fork``.

    Args:
        backing: holds the data, see :class:`~shoal.store.Backing`.  The store closes it.
        timeout: default deadline of every call in seconds; ``SHOAL_TIMEOUT`` unless given.
    """

    #: default deadline of every call in seconds; may be assigned
    timeout: float

    def __init__(self, backing: RequestExecutor, timeout: float | None = None) -> None:
        self.timeout = config.TIMEOUT.get() if timeout is None else timeout
        self._backing = backing
        self._when_closed: list[Callable[[], None]] = []
        self._pid = os.getpid()

    @property
    def host(self) -> str | None:
        """Name or address of the host that holds the data, where that is known."""
        return self._backing.host

    @final
    def set(self, key: str, value: Value) -> None:
        """Store ``value`` under ``key``, in place of an earlier value; a ``str`` is encoded as UTF-8."""
        self._now(requests.Set(self._key(key), self._value(value)))

    @final
    def get(self, key: str, timeout: Timeout = None) -> bytes:
        """The value of ``key``, as soon as it has one.  ``StoreTimeout`` when it gets none in time."""
        deadline = self._deadline(timeout)
        return self._execute(requests.Get([self._key(key)], deadline.timeout), deadline)[0]

    @final
    def wait(self, keys: Sequence[str], timeout: Timeout = None) -> None:
        """Block until all ``keys`` exist.  ``StoreTimeout`` names those that were missing."""
        deadline = self._deadline(timeout)
        self._execute(requests.Wait(self._keys(keys), deadline.timeout), deadline)

    @final
    def add(self, key: str, amount: int) -> int:
        """Add ``amount`` to the counter ``key``, which starts from 0, and return the sum.

        The counter is stored as decimal ASCII.  ``StoreError`` if ``key`` holds something else or
        the sum does not fit in 64 bits.
        """
        return self._now(requests.Add(self._key(key), self._amount(key, amount)))

    @final
    def compare_set(self, key: str, expected: Value, desired: Value) -> bytes:
        """Store ``desired`` if the value equals ``expected``, or if there is none and ``expected`` is empty.

        Returns:
            the value that is stored now; ``expected`` when there is none.
        """
        request = requests.CompareSet(self._key(key), self._value(expected), self._value(desired))
        return self._now(request)

    @final
    def delete(self, key: str) -> bool:
        """Remove ``key``; whether it existed."""
        return self._now(requests.Delete(self._key(key)))

    @final
    def delete_prefix(self, prefix: str) -> int:
        """Remove all keys that start with ``prefix``; how many there were.  ``""`` removes all keys."""
        return self._now(requests.DeletePrefix(self._key(prefix)))

    @final
    def check(self, keys: Sequence[str]) -> bool:
        """Whether all ``keys`` exist now."""
        return self._now(requests.Check(self._keys(keys)))

    @final
    def num_keys(self) -> int:
        """The number of keys."""
        return self._now(requests.NumKeys(""))

    @final
    def list_keys(self, prefix: str = "") -> list[str]:
        """All keys that start with ``prefix``, sorted."""
        return self._now(requests.ListKeys(self._key(prefix)))

    @final
    def append(self, key: str, value: Value) -> None:
        """Add ``value`` at the end of the value of ``key``, or store it if there is none."""
        self._now(requests.Append(self._key(key), self._value(value)))

    @final
    def multi_get(self, keys: Sequence[str], timeout: Timeout = None) -> list[bytes]:
        """The values of ``keys``, in their order, as soon as all exist."""
        deadline = self._deadline(timeout)
        return self._in_parts(
            keys, lambda rest: self._execute(requests.Get(rest, deadline.remaining()), deadline)
        )

    @final
    def peek(self, keys: Sequence[str]) -> list[bytes | None]:
        """The values that ``keys`` have now, in their order; None for a key that has none."""
        return self._in_parts(keys, lambda rest: self._now(requests.Peek(rest)))

    @final
    def multi_set(self, keys: Sequence[str], values: Sequence[Value]) -> None:
        """Store one value under each key.  All at once as far as others can see, up to 64 MB in all."""
        names = self._keys(keys)
        if len(names) != len(values):
            raise UsageError(f"{len(names)} keys and {len(values)} values: expected one value for each key")
        items: list[tuple[str, bytes]] = []
        total = 0
        for key, value in zip(names, map(self._value, values), strict=True):
            if total + len(value) > MAX_VALUE:
                self._now(requests.MultiSet(items))
                items, total = [], 0
            items.append((key, value))
            total += len(value)
        self._now(requests.MultiSet(items))

    @final
    def together(self, calls: Sequence[Call]) -> list[Any]:
        """Make several calls in one step, which no other client comes between.

        In torch's stores, and in stores of one's own that do not say how, each is a step by itself.  So it is
        in etcd where the values that result have more than 1 MB together; in Redis a step ends at a counter
        that is not written as Redis writes numbers (``007``).

        Args:
            calls: :class:`Set`, :class:`Add`, :class:`CompareSet`, :class:`Delete` and :class:`Append` of
                ``shoal.store.requests``; done one after the other, up to a CompareSet that finds another
                value than it sets; 16 at most, with 32 KB of keys and values.

        Returns:
            the result of each that was done, as of the method of the same name.

        Raises:
            StoreError: one failed.  Those before it were done, those after it were not.
        """
        if len(calls) > requests.MOST_CALLS:
            raise UsageError(f"together: {len(calls)} calls, at most {requests.MOST_CALLS}")
        outcome = self._now(requests.Together([self._call(each) for each in calls]))
        if outcome.failure:
            raise StoreError(outcome.failure)
        return outcome.results

    def clone(self: _Self, timeout: float | None = None, *, anew: bool = False) -> _Self:
        """An independent connection to the same data.

        Args:
            timeout: its default deadline in seconds, also for connecting; None: the one that this store has.
            anew: to whatever data is there now, also if the server has lost what it held and began anew.
        """
        self._refuse()
        seconds = self.timeout if timeout is None else timeout
        other = type(self).__new__(type(self))
        backing = self._backing
        Store.__init__(other, (backing.clone_anew if anew else backing.clone)(seconds), seconds)
        return other

    def close(self) -> None:
        """Give up the connection; calls that are in progress in other threads raise ``StoreError``."""
        if os.getpid() == self._pid:
            self._backing.closed.set()
            with contextlib.ExitStack() as afterwards:  # whatever the backing or one of them raises
                while self._when_closed:
                    afterwards.callback(self._when_closed.pop(0))
                self._backing.close()

    def call_when_closed(self, function: Callable[[], None]) -> None:
        """Have ``function`` called once, after the store was closed."""
        self._when_closed.append(function)

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _in_parts(self, keys: Sequence[str], read: Callable[[list[str]], list[T]]) -> list[T]:
        """What ``read`` gives for ``keys``: for the first ones, as many values as fit into a message."""
        rest = self._keys(keys)
        values: list[T] = []
        while rest:
            part = read(rest)
            values += part
            rest = rest[len(part) :]
        return values

    def _now(self, request: StoreRequest[T]) -> T:
        return self._execute(request, Deadline(self.timeout))

    def _execute(self, request: StoreRequest[T], deadline: Deadline) -> T:
        """Execute a checked request, however long its keys are missing before the deadline."""
        backing = self._backing
        while True:
            self._refuse()
            try:
                return backing.execute(request, deadline)
            except KeysMissing as error:
                missing = error.keys
            except StoreError as error:
                if backing.closed.is_set():
                    raise self._closed_error() from error
                raise
            if deadline.expired:
                raise timed_out(missing, deadline.timeout)
            backing.watch(missing, deadline)

    def _refuse(self) -> None:
        if os.getpid() != self._pid:
            raise ForkedProcess(
                f"this {type(self).__name__} was opened by process {self._pid}, and process {os.getpid()} "
                "is a fork of it; open a store of its own in the child, or start workers with spawn"
            )
        if self._backing.closed.is_set():
            raise self._closed_error()

    def _closed_error(self) -> StoreError:
        return StoreError(f"this {self._backing} has been closed")

    def _deadline(self, timeout: Timeout) -> Deadline:
        if isinstance(timeout, timedelta):
            timeout = timeout.total_seconds()
        return Deadline(self.timeout if timeout is None else timeout)

    def _key(self, key: str) -> str:
        checked_key(key)
        longest = self._backing.longest_key
        if longest is not None and len(key.encode()) > longest:
            raise StoreError(f"a key of {len(key.encode())} bytes: this store takes at most {longest}")
        return key

    def _keys(self, keys: Sequence[str]) -> list[str]:
        if isinstance(keys, str):
            raise UsageError(f"expected a sequence of keys, got the single str {keys!r}")
        return [self._key(key) for key in keys]

    def _call(self, call: Call) -> Call:
        if not isinstance(call, Call):
            raise UsageError(f"together: expected Set, Add, CompareSet, Delete or Append, got {call!r}")
        changed: dict[str, Any] = {"key": self._key(call.key)}
        if isinstance(call, requests.Add):
            changed["amount"] = self._amount(call.key, call.amount)
        for field in ("value", "expected", "desired"):
            if hasattr(call, field):
                changed[field] = self._value(getattr(call, field))
        return replace(call, **changed)

    def _amount(self, key: str, amount: int) -> int:
        if not isinstance(amount, int) or not -(2**63) <= amount < 2**63:
            raise UsageError(f"cannot add {amount!r} to key {key!r}: expected a whole number of 64 bits")
        return int(amount)

    def _value(self, value: Value) -> bytes:
        return checked_value(value, self._backing.longest_value)


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


def checked_value(value: Value, longest: int = MAX_VALUE) -> bytes:
    """``value`` as bytes.  Raises UsageError for another type, StoreError if it is too long."""
    if isinstance(value, str):
        value = value.encode()
    elif not isinstance(value, bytes):
        if not isinstance(value, (bytearray, memoryview)):
            raise UsageError(f"a value must be bytes or str, not {type(value).__name__}")
        value = bytes(value)
    if len(value) > longest:
        raise StoreError(f"a value of {len(value)} bytes: this store takes at most {longest}")
    return value


def timed_out(missing: Sequence[str], timeout: float) -> StoreTimeout:
    """The error that names the keys that were missing."""
    named = ", ".join(repr(key) for key in missing[:16])
    more = f" and {len(missing) - 16} more" if len(missing) > 16 else ""
    return StoreTimeout(f"waited {in_seconds(timeout)}, and these keys were not set: {named}{more}")
