"""The stores of ``torch.distributed``, used as ours.

Everything here asks a torch store only questions that it answers at once, and polls where it has to wait:
a torch ``TCPStore`` serves one call at a time, so that a blocking ``get`` would keep all other threads
from it, and some of torch's stores take no timeout of a single call.  The store itself is left as it is:
its timeout is not touched and it is never closed.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Protocol, TypeVar, cast

from ..errors import ShoalError, StoreError, UsageError
from ..wire import Deadline
from .base import Store, Value, checked_key, checked_keys, checked_value, timed_out

T = TypeVar("T")

#: longest value in bytes: a torch TCPStore's server drops the connection of who sends more
MAX_FOREIGN_VALUE = 8 * 2**20
#: longest key in bytes: a torch TCPStore takes 8 KB, with all prefixes
MAX_FOREIGN_KEY = 4096
#: so many keys are asked for in one message
_AT_ONCE = 10_000
#: up to so many values are read one by one, which never blocks
_FEW = 16
#: nobody's value; see ``ForeignStore._peek``
_ABSENT = b"\0shoal.store.foreign: there is no value\0"
#: seconds between two looks of one who waits: an eighth of the time that it waited already, within
_SHORTEST, _LONGEST = 0.0005, 0.05
#: lines of JSON: the keys that were ever set, in stores that cannot list theirs
_INDEX = "shoal.keys"

_METHODS = ("set", "get", "add", "check", "compare_set", "delete_key")


class _TorchStore(Protocol):
    """What is used of a torch store."""

    timeout: timedelta

    def set(self, key: str, value: bytes, /) -> object: ...
    def add(self, key: str, amount: int, /) -> int: ...
    def check(self, keys: list[str], /) -> bool: ...
    def compare_set(self, key: str, expected: bytes, desired: bytes, /) -> bytes: ...
    def delete_key(self, key: str, /) -> bool: ...
    def has_extended_api(self) -> bool: ...
    def append(self, key: str, value: bytes, /) -> object: ...
    def multi_get(self, keys: list[str], /) -> list[bytes]: ...
    def multi_set(self, keys: list[str], values: list[bytes], /) -> object: ...
    def list_keys(self) -> list[str]: ...


def adopt(store: object) -> Store:
    """``store`` as a :class:`Store`: one of ours as it is, a ``torch.distributed.Store`` behind an adapter.

    The adapter keeps the contract of :class:`Store`, with what torch's stores bring along:

    - values have at most 8 MB, keys 4 KB;
    - a blocking call polls, at intervals that grow to 50 ms;
    - a call that another thread makes on the same torch ``TCPStore`` and that blocks there delays ours;
    - where the torch store has no extended API (``FileStore``, stores written in Python),
      :meth:`Store.multi_set` sets one key after the other, and of two equal values that are appended at the
      same moment one may be lost;
    - a store that cannot list its keys (written in Python, or of an old torch) gets one more key,
      ``shoal.keys``, and lists what was set through adapters.

    Its default deadline is the torch store's timeout.  :meth:`Store.close` closes the adapter only: the torch
    store stays its owner's.  :meth:`Store.clone` is another adapter on the same torch store.

    Args:
        store: a :class:`Store`, or an object with the methods of ``torch.distributed.Store``.

    Raises:
        UsageError: it is neither.
    """
    if isinstance(store, Store):
        return store
    if isinstance(store, type) or not all(callable(getattr(store, name, None)) for name in _METHODS):
        raise UsageError(f"expected a shoal.store.Store or a torch.distributed.Store, not {store!r}")
    foreign = cast(_TorchStore, store)
    return ForeignStore(foreign, foreign.timeout.total_seconds())


class ForeignStore(Store):
    """A torch store behind our interface; made by :func:`adopt`."""

    def __init__(self, foreign: _TorchStore, timeout: float) -> None:
        super().__init__(timeout)
        self._foreign: _TorchStore | None = foreign
        # One written in Python must be held by Python; the prefix stores above it do not.
        self._bottom: object = _bottom(foreign)
        self._extended = foreign.has_extended_api()
        self._index = None if _can_list(foreign) else _Index(self)
        self._closed = threading.Event()

    @property
    def host(self) -> str | None:
        """Where the torch store is served, if it is a ``TCPStore``."""
        return getattr(self._bottom, "host", None)

    def set(self, key: str, value: Value) -> None:
        key, data = self._key(key), self._value(value)
        self._noted(key)
        with self._calling() as foreign:
            foreign.set(key, data)

    def get(self, key: str, timeout: float | None = None) -> bytes:
        return self.multi_get([key], timeout)[0]

    def wait(self, keys: Sequence[str], timeout: float | None = None) -> None:
        wanted = self._keys(keys)
        self._poll(wanted, self._deadline(timeout), lambda: self._exist(wanted) or None)

    def add(self, key: str, amount: int) -> int:
        if not isinstance(amount, int) or not -(2**63) <= amount < 2**63:
            raise UsageError(f"cannot add {amount!r} to key {key!r}: expected a whole number of 64 bits")
        key = self._key(key)
        # Adding to something else ends a torch TCPStore's server, with the job.
        self._check_counter(key, amount)
        self._noted(key)
        with self._calling() as foreign:
            return foreign.add(key, amount)

    def compare_set(self, key: str, expected: Value, desired: Value) -> bytes:
        key, old, new = self._key(key), self._value(expected), self._value(desired)
        self._noted(key)
        with self._calling() as foreign:
            return bytes(foreign.compare_set(key, old, new))

    def delete(self, key: str) -> bool:
        key = self._key(key)
        # A torch FileStore says of every key that it existed.
        if not self._exist([key]):
            return False
        with self._calling() as foreign:
            return foreign.delete_key(key)

    def check(self, keys: Sequence[str]) -> bool:
        return self._exist(self._keys(keys))

    def num_keys(self) -> int:
        # torch's own num_keys counts what is outside of a PrefixStore, too.
        return len(self.list_keys())

    def list_keys(self, prefix: str = "") -> list[str]:
        prefix = self._key(prefix)
        if self._index is not None:
            found = self._index.keys()
        else:
            with self._calling() as foreign:
                found = {*foreign.list_keys()}
        names = sorted(key for key in found if key.startswith(prefix))
        # A torch PrefixStore "a" also lists, cut short, the keys of its neighbour "ab", and a FileStore
        # lists what it notes for itself.  Neither can be got.
        return names if self._exist(names) else [key for key in names if self._exist([key])]

    def append(self, key: str, value: Value) -> None:
        key, data = self._key(key), self._value(value)
        self._noted(key)
        swapped = False
        while not swapped:
            old = self._peek(key) or b""
            new = self._value(old + data)
            with self._calling() as foreign:
                if self._extended:
                    foreign.append(key, data)
                    return
                swapped = foreign.compare_set(key, old, new) == new

    def multi_get(self, keys: Sequence[str], timeout: float | None = None) -> list[bytes]:
        wanted = self._keys(keys)
        few = len(wanted) <= _FEW or not self._extended
        return self._poll(
            wanted, self._deadline(timeout), lambda: self._read(wanted) if few else self._read_many(wanted)
        )

    def multi_set(self, keys: Sequence[str], values: Sequence[Value]) -> None:
        names = self._keys(keys)
        if len(names) != len(values):
            raise UsageError(f"{len(names)} keys and {len(values)} values: expected one value for each key")
        data = [self._value(value) for value in values]
        self._noted(*names)
        with self._calling() as foreign:
            if self._extended:
                foreign.multi_set(names, data)
            else:
                for name, value in zip(names, data, strict=True):
                    foreign.set(name, value)

    def clone(self) -> ForeignStore:
        """Another adapter on the same torch store; closing one leaves the other."""
        with self._calling() as foreign:
            return ForeignStore(foreign, self.timeout)

    def close(self) -> None:
        """Close this adapter and wake the threads that wait in it; the torch store goes on."""
        if not self._forked():
            self._foreign = self._bottom = None
            self._closed.set()

    def _poll(self, keys: Sequence[str], deadline: Deadline, look: Callable[[], T | None]) -> T:
        """What ``look`` returns as soon as it is not None, which it is when all keys exist."""
        while (found := look()) is None:
            if deadline.expired:
                missing = [key for key in keys if not self._exist([key])]
                raise timed_out(missing or keys, deadline.timeout)
            waited = deadline.timeout - deadline.remaining()
            self._closed.wait(min(max(waited / 8, _SHORTEST), _LONGEST, deadline.remaining()))
        return found

    def _read(self, keys: Sequence[str]) -> list[bytes] | None:
        values = []
        for key in keys:
            value = self._peek(key)
            if value is None:
                return None
            values.append(value)
        return values

    def _read_many(self, keys: list[str]) -> list[bytes] | None:
        if not self._exist(keys):
            return None
        values: list[bytes] = []
        with self._calling() as foreign:
            for start in range(0, len(keys), _AT_ONCE):
                values += foreign.multi_get(keys[start : start + _AT_ONCE])
        return values

    def _peek(self, key: str) -> bytes | None:
        """The value of ``key`` now, None if there is none.

        ``get`` would wait for it, for as long as the torch store's timeout says.  ``compare_set`` never
        waits, writes nothing unless it finds what it expects, and returns that where there is no value.
        """
        with self._calling() as foreign:
            value = bytes(foreign.compare_set(key, _ABSENT, _ABSENT))
        return None if value == _ABSENT else value

    def _exist(self, keys: Sequence[str]) -> bool:
        with self._calling() as foreign:
            parts = (list(keys[start : start + _AT_ONCE]) for start in range(0, len(keys), _AT_ONCE))
            return all(foreign.check(part) for part in parts)

    def _check_counter(self, key: str, amount: int) -> None:
        value = self._peek(key)
        if value is None:
            return
        digits = value.removeprefix(b"-")
        if not digits.isdigit() or not -(2**63) <= int(value) < 2**63:
            raise StoreError(f"cannot add to key {key!r}: its value {value[:40]!r} is no counter")
        if not -(2**63) <= int(value) + amount < 2**63:
            raise StoreError(f"adding {amount} to key {key!r}, which is {int(value)}, exceeds 64 bits")

    def _noted(self, *keys: str) -> None:
        if self._index is not None:
            self._index.note(keys)

    @contextmanager
    def _calling(self) -> Iterator[_TorchStore]:
        """Around calls of the torch store: what it raises becomes a StoreError."""
        self._refuse_forked()
        foreign = self._foreign
        if foreign is None:
            raise StoreError("this adapter of a torch store has been closed")
        try:
            yield foreign
        except ShoalError:
            raise  # a store of ours is below torch's
        except Exception as error:
            name = type(foreign).__name__
            raise StoreError(f"torch's {name}: {type(error).__name__}: {_first_line(error)}") from error

    def _deadline(self, timeout: float | None) -> Deadline:
        return Deadline(self.timeout if timeout is None else timeout)

    @staticmethod
    def _key(key: str) -> str:
        size = len(checked_key(key).encode())
        if size > MAX_FOREIGN_KEY:
            raise StoreError(f"a key of {size} bytes: through a torch store at most {MAX_FOREIGN_KEY}")
        return key

    def _keys(self, keys: Sequence[str]) -> list[str]:
        return [self._key(key) for key in checked_keys(keys)]

    @staticmethod
    def _value(value: Value) -> bytes:
        data = checked_value(value)
        if len(data) > MAX_FOREIGN_VALUE:
            raise StoreError(
                f"a value of {len(data)} bytes: through a torch store at most {MAX_FOREIGN_VALUE}"
            )
        return data


class _Index:
    """The keys that were ever set through adapters, noted in the store itself."""

    def __init__(self, store: ForeignStore) -> None:
        self._store = store
        self._known = {_INDEX}

    def note(self, keys: Sequence[str]) -> None:
        """See to it that ``keys`` are noted; before they are set, so that none is missed."""
        if self._known.issuperset(keys):
            return
        new = {*keys} - self.keys() - {_INDEX}
        if new:
            self._store.append(_INDEX, "".join(json.dumps(key) + "\n" for key in sorted(new)))
            self._known.update(new)

    def keys(self) -> set[str]:
        """All keys that were noted, those that were deleted since among them."""
        lines = (self._store._peek(_INDEX) or b"").splitlines()
        found: set[str] = {json.loads(line) for line in lines}
        self._known |= found
        return found


def _can_list(foreign: _TorchStore) -> bool:
    """Whether ``list_keys`` works."""
    if type(_bottom(foreign)).__module__ == "torch._C._distributed_c10d":
        return hasattr(foreign, "list_keys")  # older torch has none
    try:
        foreign.list_keys()
    except (AttributeError, NotImplementedError):
        return False
    return True


def _bottom(foreign: object) -> object:
    """The store that prefix stores stand on."""
    while (underlying := getattr(foreign, "underlying_store", None)) is not None:
        foreign = underlying
    return foreign


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
