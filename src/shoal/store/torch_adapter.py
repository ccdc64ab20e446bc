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
from .requests import check_length, counted

#: longest value in bytes: a torch TCPStore's server drops a connection that sends more
MAX_TORCH_VALUE = 8 * 2**20
#: longest key in bytes: a torch TCPStore takes 8 KB, with all prefixes
MAX_TORCH_KEY = 4096
#: maximum number of keys in one message
_MAX_KEYS_PER_CALL = 10_000
#: up to this number, values are read one by one, which never blocks
_MAX_SINGLE_READS = 16
#: a value that no client stores; see ``_Adapter.get_now``
_NO_VALUE = b"\0shoal.store.foreign: there is no value\0"
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
    torch_store = cast(_TorchStore, store)
    return Store(_Adapter(torch_store), torch_store.timeout.total_seconds())


class _Adapter(Backing):
    """A :class:`Backing` whose data is in a torch store."""

    longest_key = MAX_TORCH_KEY
    longest_value = MAX_TORCH_VALUE

    def __init__(self, torch_store: _TorchStore) -> None:
        super().__init__()
        self._torch_store: _TorchStore | None = torch_store
        # A store written in Python needs a reference from Python; prefix stores above it hold none.
        self._underlying: object = _underlying(torch_store)
        self.host = getattr(self._underlying, "host", None)
        self._extended = torch_store.has_extended_api()
        self._key_index = None if _can_list(torch_store) else _KeyIndex(self)

    def get_now(self, key: str) -> bytes | None:
        """Return the value without waiting; ``get`` would wait for a missing key.

        ``compare_set`` never waits, writes nothing unless the value is the expected one, and returns
        ``expected`` for a missing key.
        """
        value = self._compare_set(key, _NO_VALUE, _NO_VALUE)
        return None if value == _NO_VALUE else value

    def swap(self, key: str, held: bytes | None, value: bytes | None) -> bool:
        """Used by :meth:`append` only: True also if another client stored the same value."""
        assert value is not None
        return self._compare_set(key, held or b"", value) == value

    def list_keys(self, prefix: str) -> list[str]:
        if self._key_index is not None:
            found = self._key_index.keys()
        else:
            with self._translating_errors() as torch_store:
                found = {*torch_store.list_keys()}
        names = [key for key in found if key.startswith(prefix)]
        # A torch PrefixStore "a" also lists the keys of a PrefixStore "ab", truncated, and a FileStore lists
        # its internal keys. Neither can be read.
        absent = {*self.missing(names)}
        return [key for key in names if key not in absent]

    def get_many(self, keys: Sequence[str]) -> Sequence[bytes | None]:
        if len(keys) <= _MAX_SINGLE_READS or not self._extended:
            return super().get_many(keys)
        with self._translating_errors() as torch_store:
            return torch_store.multi_get(list(keys[:_MAX_KEYS_PER_CALL]))

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
        self._record_keys(*(key for key, _ in items))
        with self._translating_errors() as torch_store:
            if self._extended and len(items) != 1:
                torch_store.multi_set([key for key, _ in items], [value for _, value in items])
                return
            for key, value in items:
                torch_store.set(key, value)

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        self._record_keys(key)
        return self._compare_set(key, expected, desired)

    def add(self, key: str, amount: int) -> int:
        # Adding to a value that is not a counter ends a torch TCPStore's server, and with it the job.
        counted(key, self.get_now(key), amount)
        self._record_keys(key)
        with self._translating_errors() as torch_store:
            return torch_store.add(key, amount)

    def append(self, key: str, value: bytes) -> None:
        self._record_keys(key)
        if not self._extended:
            super().append(key, value)
            return
        check_length(key, (self.get_now(key) or b"") + value, self.longest_value)
        with self._translating_errors() as torch_store:
            torch_store.append(key, value)

    def delete(self, key: str) -> bool:
        # A torch FileStore returns True for every key.
        if not self._exist([key]):
            return False
        with self._translating_errors() as torch_store:
            return torch_store.delete_key(key)

    def clone(self, timeout: float) -> _Adapter:
        with self._translating_errors() as torch_store:
            return _Adapter(torch_store)

    def close(self) -> None:
        """Release the torch store without closing it."""
        self._torch_store = self._underlying = None

    def __str__(self) -> str:
        return "adapter of a torch store"

    def _compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        with self._translating_errors() as torch_store:
            return bytes(torch_store.compare_set(key, expected, desired))

    def _exist(self, keys: Sequence[str]) -> bool:
        with self._translating_errors() as torch_store:
            parts = (
                list(keys[start : start + _MAX_KEYS_PER_CALL])
                for start in range(0, len(keys), _MAX_KEYS_PER_CALL)
            )
            return all(torch_store.check(part) for part in parts)

    def _record_keys(self, *keys: str) -> None:
        if self._key_index is not None:
            self._key_index.record(keys)

    @contextmanager
    def _translating_errors(self) -> Iterator[_TorchStore]:
        """Convert exceptions of the torch store to StoreError."""
        torch_store = self._torch_store
        if torch_store is None:
            raise StoreError("closed")  # Store replaces the message
        try:
            yield torch_store
        except ShoalError:
            raise  # from a shoal store below the torch store
        except Exception as error:
            name = type(torch_store).__name__
            raise StoreError(f"torch's {name}: {type(error).__name__}: {_first_line(error)}") from error


class _KeyIndex:
    """The keys that were ever set through adapters, recorded in the store itself."""

    def __init__(self, store: _Adapter) -> None:
        self._store = store
        self._known = {_INDEX}

    def record(self, keys: Sequence[str]) -> None:
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


def _can_list(torch_store: _TorchStore) -> bool:
    if type(_underlying(torch_store)).__module__ == "torch._C._distributed_c10d":
        return True
    try:
        torch_store.list_keys()
    except (AttributeError, NotImplementedError):
        return False
    return True


def _underlying(torch_store: object) -> object:
    """Return the store below all prefix stores."""
    while (underlying := getattr(torch_store, "underlying_store", None)) is not None:
        torch_store = underlying
    return torch_store


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
