"""The interface of a store: a small key-value server shared by the processes of a job.

Keys are any text, values are bytes, at most 64 MB each. Every call has a deadline: its own, or the store's.
The operations have the meaning that they have in the stores of ``torch.distributed``.
``tests/store/conformance.py`` tests this contract; a user-defined store should pass it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar, final

from msgspec.structs import replace

from .. import config
from ..common.copy_refusal import refuses_copies
from ..common.formatting import format_seconds
from ..errors import ForkedProcess, StoreError, StoreTimeout, UsageError
from ..net import Deadline
from . import requests
from .backing import RequestExecutor
from .requests import MAX_VALUE, Call, KeysMissing, StoreRequest

#: number of seconds, or a ``timedelta`` as in torch's stores; None: the store's default
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
    """A key-value store. All methods are thread-safe.

    This class checks arguments, waits and raises; a backing holds the data. Every method raises
    ``StoreError`` when the store cannot be reached or is closed, and ``ForkedProcess`` in a child that
    inherited the store by ``fork``.

    Args:
        backing: holds the data, see :class:`~shoal.store.Backing`. The store closes it.
        timeout: default deadline of every call in seconds; None: ``SHOAL_TIMEOUT``.
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
        """Name or address of the host that holds the data; None: unknown."""
        return self._backing.host

    @final
    def set(self, key: str, value: Value) -> None:
        """Set ``key`` to ``value``, replacing an earlier value; a ``str`` is encoded as UTF-8."""
        self._now(requests.Set(self._key(key), self._value(value)))

    @final
    def get(self, key: str, timeout: Timeout = None) -> bytes:
        """Wait until ``key`` exists and return its value. ``StoreTimeout`` at the deadline."""
        deadline = self._deadline(timeout)
        return self._execute(requests.Get([self._key(key)], deadline.timeout), deadline)[0]

    @final
    def wait(self, keys: Sequence[str], timeout: Timeout = None) -> None:
        """Block until all ``keys`` exist. ``StoreTimeout`` names the missing ones."""
        deadline = self._deadline(timeout)
        self._execute(requests.Wait(self._keys(keys), deadline.timeout), deadline)

    @final
    def add(self, key: str, amount: int) -> int:
        """Add ``amount`` to the counter ``key``, initially 0, and return the sum.

        The counter is stored as decimal ASCII. ``StoreError`` if the value of ``key`` is not a counter, or
        the sum does not fit in 64 bits.
        """
        return self._now(requests.Add(self._key(key), self._amount(key, amount)))

    @final
    def compare_set(self, key: str, expected: Value, desired: Value) -> bytes:
        """Set ``key`` to ``desired`` if its value is ``expected`` (b"" matches a missing key as well).

        Returns:
            the value after the call; ``expected`` if the key is missing.
        """
        request = requests.CompareSet(self._key(key), self._value(expected), self._value(desired))
        return self._now(request)

    @final
    def delete(self, key: str) -> bool:
        """Remove ``key`` and return whether it existed."""
        return self._now(requests.Delete(self._key(key)))

    @final
    def delete_prefix(self, prefix: str) -> int:
        """Remove all keys that start with ``prefix`` (``""``: all keys) and return their number."""
        return self._now(requests.DeletePrefix(self._key(prefix)))

    @final
    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all ``keys`` exist now."""
        return self._now(requests.Check(self._keys(keys)))

    @final
    def num_keys(self) -> int:
        """Return the number of keys."""
        return self._now(requests.NumKeys(""))

    @final
    def list_keys(self, prefix: str = "") -> list[str]:
        """Return all keys that start with ``prefix``, sorted."""
        return self._now(requests.ListKeys(self._key(prefix)))

    @final
    def append(self, key: str, value: Value) -> None:
        """Append ``value`` to the value of ``key``; a missing key is created."""
        self._now(requests.Append(self._key(key), self._value(value)))

    @final
    def multi_get(self, keys: Sequence[str], timeout: Timeout = None) -> list[bytes]:
        """Wait until all ``keys`` exist and return their values, in the same order."""
        deadline = self._deadline(timeout)
        return self._in_parts(
            keys, lambda rest: self._execute(requests.Get(rest, deadline.remaining()), deadline)
        )

    @final
    def peek(self, keys: Sequence[str]) -> list[bytes | None]:
        """Return the current values of ``keys``, in the same order; None for a missing key."""
        return self._in_parts(keys, lambda rest: self._now(requests.Peek(rest)))

    @final
    def multi_set(self, keys: Sequence[str], values: Sequence[Value]) -> None:
        """Set one value for each key. Other clients see all of them at once, up to 64 MB in total."""
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
        """Make several calls in one atomic step.

        In torch's stores, and in user-defined stores that do not implement this, each call is a separate
        step; in etcd too, if the resulting values exceed 1 MB in total. In Redis a step ends at a counter
        in a form that Redis does not accept (``007``).

        Args:
            calls: :class:`Set`, :class:`Add`, :class:`CompareSet`, :class:`Delete` and :class:`Append` of
                ``shoal.store.requests``; executed in order, up to a CompareSet whose result is not its
                desired value; at most 16, with at most 32 KB of keys and values.

        Returns:
            the result of each executed call, as returned by the method of the same name.

        Raises:
            StoreError: a call failed. The calls before it were executed, those after it were not.
        """
        if len(calls) > requests.MAX_CALLS:
            raise UsageError(f"together: {len(calls)} calls, at most {requests.MAX_CALLS}")
        outcome = self._now(requests.Together([self._call(each) for each in calls]))
        if outcome.failure:
            raise StoreError(outcome.failure)
        return outcome.results

    def clone(self: _Self, timeout: float | None = None, *, accept_new_data: bool = False) -> _Self:
        """Return an independent connection to the same data.

        Args:
            timeout: its default deadline in seconds, also for connecting; None: that of this store.
            accept_new_data: accept a server that has lost its data and restarted empty.
        """
        self._refuse()
        seconds = self.timeout if timeout is None else timeout
        other = type(self).__new__(type(self))
        backing = self._backing
        clone = backing.clone_accepting_new_data if accept_new_data else backing.clone
        Store.__init__(other, clone(seconds), seconds)
        return other

    def close(self) -> None:
        """Close the connection; calls in progress in other threads raise ``StoreError``."""
        if os.getpid() == self._pid:
            self._backing.closed.set()
            with contextlib.ExitStack() as afterwards:  # calls all of them, even if one raises
                while self._when_closed:
                    afterwards.callback(self._when_closed.pop(0))
                self._backing.close()

    def call_when_closed(self, function: Callable[[], None]) -> None:
        """Call ``function`` once, after the store is closed."""
        self._when_closed.append(function)

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _in_parts(self, keys: Sequence[str], read: Callable[[list[str]], list[T]]) -> list[T]:
        """Call ``read``, which returns values of the first keys, until all values are read."""
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
        """Execute a checked request; wait for missing keys until the deadline."""
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
                f"this {type(self).__name__} was opened by process {self._pid} and cannot be used in its "
                f"fork, process {os.getpid()}; open another store in the child, or start workers with spawn"
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
    """Return ``key`` if it is valid text; raise UsageError otherwise."""
    if not isinstance(key, str):
        raise UsageError(f"a key must be a str, not {type(key).__name__}")
    if not key.isascii():
        try:
            key.encode()
        except UnicodeEncodeError:
            raise UsageError(f"key {key!r} is not valid Unicode") from None
    return key


def checked_value(value: Value, longest: int = MAX_VALUE) -> bytes:
    """Return ``value`` as bytes. Raises UsageError for another type, StoreError if it is too long."""
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
    """Return the error that names the missing keys."""
    named = ", ".join(repr(key) for key in missing[:16])
    more = f" and {len(missing) - 16} more" if len(missing) > 16 else ""
    return StoreTimeout(f"waited {format_seconds(timeout)}, and these keys were not set: {named}{more}")
