"""An adapter from the stores of ``torch.distributed`` to :class:`Store`.

The adapter uses only calls of the torch store that return at once, and polls to wait: a torch ``TCPStore``
serves one call at a time, so a blocking ``get`` would block all other threads, and some torch stores have no
timeout for a single call. It neither changes the torch store's timeout nor closes the torch store.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Protocol, cast

from ..common.decoding import from_json
from ..errors import ShoalError, StoreError, UsageError
from .backing import Backing
from .base import Store
from .operations import check_length, counted

#: longest value in bytes: a torch TCPStore's server drops a connection that sends more
MAX_FOREIGN_VALUE = 8 * 2**20
#: longest key in bytes: a torch TCPStore takes 8 KB, with all prefixes
MAX_FOREIGN_KEY = 4096
#: maximum number of keys in one message
_MAX_KEYS_PER_CALL = 10_000
#: up to this number, values are read one by one, which never blocks
_MAX_SINGLE_READS = 16
#: a value that no client stores; see ``_Adapter.get_now``
_ABSENT = b"\0shoal.store.foreign: there is no value\0"
#: key of the index in stores that cannot list their keys: lines of JSON, one for each key ever set
_INDEX = "shoal.keys"

_METHODS = ("set", "get", "add", "check", "compare_set", "delete_key")


class _TorchStore(Protocol):
    """The methods of a torch store that the adapter calls."""

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
    """Return ``store`` as a :class:`Store`; wrap a ``torch.distributed.Store`` in an adapter.

    The adapter fulfils the contract of :class:`Store`, within the limits of torch's stores:

    - values have at most 8 MB, keys at most 4 KB;
    - a blocking call polls, at intervals that grow to 20 ms;
    - a call waits while another thread's call blocks in the same torch ``TCPStore``;
    - where the torch store has no extended API (``FileStore``, stores written in Python),
      :meth:`Store.multi_set` sets the keys one by one, and if two clients append equal values at the same
      moment, one may be lost;
    - a store that cannot list its keys (written in Python, or of an old torch) gets one more key,
      ``shoal.keys``, and lists the keys that were set through adapters.

    The default deadline is the torch store's timeout. :meth:`Store.close` closes the adapter only, not the
    torch store. :meth:`Store.clone` returns another adapter of the same torch store.

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
    return Store(_Adapter(foreign), foreign.timeout.total_seconds())


class _Adapter(Backing):
    """A :class:`Backing` whose data is in a torch store."""

    longest_key = MAX_FOREIGN_KEY
    longest_value = MAX_FOREIGN_VALUE

    def __init__(self, foreign: _TorchStore) -> None:
        super().__init__()
        self._foreign: _TorchStore | None = foreign
        # A store written in Python needs a reference from Python; prefix stores above it hold none.
        self._bottom: object = _bottom(foreign)
        self.host = getattr(self._bottom, "host", None)
        self._extended = foreign.has_extended_api()
        self._index = None if _can_list(foreign) else _Index(self)

    def get_now(self, key: str) -> bytes | None:
        """Return the value without waiting; ``get`` would wait for a missing key.

        ``compare_set`` never waits, writes nothing unless the value is the expected one, and returns
        ``expected`` for a missing key.
        """
        value = self._compare_set(key, _ABSENT, _ABSENT)
        return None if value == _ABSENT else value

    def swap(self, key: str, held: bytes | None, value: bytes | None) -> bool:
        """Used by :meth:`append` only: True also if another client stored the same value."""
        assert value is not None
        return self._compare_set(key, held or b"", value) == value

    def list_keys(self, prefix: str) -> list[str]:
        if self._index is not None:
            found = self._index.keys()
        else:
            with self._calling() as foreign:
                found = {*foreign.list_keys()}
        names = [key for key in found if key.startswith(prefix)]
        # A torch PrefixStore "a" also lists the keys of a PrefixStore "ab", truncated, and a FileStore lists
        # its internal keys. Neither can be read.
        absent = {*self.missing(names)}
        return [key for key in names if key not in absent]

    def get_many(self, keys: Sequence[str]) -> Sequence[bytes | None]:
        if len(keys) <= _MAX_SINGLE_READS or not self._extended:
            return super().get_many(keys)
        with self._calling() as foreign:
            return foreign.multi_get(list(keys[:_MAX_KEYS_PER_CALL]))

    def peek(self, keys: Sequence[str]) -> Sequence[bytes | None]:
        return super().get_many(keys)  # torch's multi_get waits for a missing key

    def missing(self, keys: Sequence[str]) -> list[str]:
        missing: list[str] = []
        # All may exist when checked one by one, each at another moment: check again.
        while not (missing or self._exist(keys)):
            missing = [key for key in keys if not self._exist([key])]
        return missing

    def set(self, key: str, value: bytes) -> None:
        self.set_many([(key, value)])

    def set_many(self, items: Sequence[tuple[str, bytes]]) -> None:
        self._noted(*(key for key, _ in items))
        with self._calling() as foreign:
            if self._extended and len(items) != 1:
                foreign.multi_set([key for key, _ in items], [value for _, value in items])
                return
            for key, value in items:
                foreign.set(key, value)

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        self._noted(key)
        return self._compare_set(key, expected, desired)

    def add(self, key: str, amount: int) -> int:
        # Adding to a value that is not a counter ends a torch TCPStore's server, and with it the job.
        counted(key, self.get_now(key), amount)
        self._noted(key)
        with self._calling() as foreign:
            return foreign.add(key, amount)

    def append(self, key: str, value: bytes) -> None:
        self._noted(key)
        if not self._extended:
            super().append(key, value)
            return
        check_length(key, (self.get_now(key) or b"") + value, self.longest_value)
        with self._calling() as foreign:
            foreign.append(key, value)

    def delete(self, key: str) -> bool:
        # A torch FileStore returns True for every key.
        if not self._exist([key]):
            return False
        with self._calling() as foreign:
            return foreign.delete_key(key)

    def clone(self, timeout: float) -> _Adapter:
        with self._calling() as foreign:
            return _Adapter(foreign)

    def close(self) -> None:
        """Release the torch store without closing it."""
        self._foreign = self._bottom = None

    def __str__(self) -> str:
        return "adapter of a torch store"

    def _compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        with self._calling() as foreign:
            return bytes(foreign.compare_set(key, expected, desired))

    def _exist(self, keys: Sequence[str]) -> bool:
        with self._calling() as foreign:
            parts = (
                list(keys[start : start + _MAX_KEYS_PER_CALL])
                for start in range(0, len(keys), _MAX_KEYS_PER_CALL)
            )
            return all(foreign.check(part) for part in parts)

    def _noted(self, *keys: str) -> None:
        if self._index is not None:
            self._index.note(keys)

    @contextmanager
    def _calling(self) -> Iterator[_TorchStore]:
        """Convert exceptions of the torch store to StoreError."""
        foreign = self._foreign
        if foreign is None:
            raise StoreError("closed")  # Store replaces the message
        try:
            yield foreign
        except ShoalError:
            raise  # from a shoal store below the torch store
        except Exception as error:
            name = type(foreign).__name__
            raise StoreError(f"torch's {name}: {type(error).__name__}: {_first_line(error)}") from error


class _Index:
    """The keys that were ever set through adapters, recorded in the store itself."""

    def __init__(self, store: _Adapter) -> None:
        self._store = store
        self._known = {_INDEX}

    def note(self, keys: Sequence[str]) -> None:
        """Record ``keys``, before they are set so that none is missed."""
        if self._known.issuperset(keys):
            return
        new = {*keys} - self.keys() - {_INDEX}
        if new:
            lines = "".join(json.dumps(key) + "\n" for key in sorted(new))
            self._store.append(_INDEX, lines.encode())
            self._known.update(new)

    def keys(self) -> set[str]:
        """Return all recorded keys, including keys deleted since."""
        lines = (self._store.get_now(_INDEX) or b"").splitlines()
        found: set[str] = {from_json(line, str) for line in lines}
        self._known |= found
        return found


def _can_list(foreign: _TorchStore) -> bool:
    if type(_bottom(foreign)).__module__ == "torch._C._distributed_c10d":
        return True
    try:
        foreign.list_keys()
    except (AttributeError, NotImplementedError):
        return False
    return True


def _bottom(foreign: object) -> object:
    """Return the store below all prefix stores."""
    while (underlying := getattr(foreign, "underlying_store", None)) is not None:
        foreign = underlying
    return foreign


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
