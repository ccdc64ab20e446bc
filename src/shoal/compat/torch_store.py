"""shoal's stores, wrapped for use as stores of torch.distributed.

Torch's C++ (the Gloo backend, ``PrefixStore``) calls some methods of a Python store by their C++ names,
cannot call others, and does not keep the Python object alive.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import msgspec
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from ..common.copy_refusal import refuses_copies
from ..common.decoding import MalformedMessage, from_msgpack
from ..common.formatting import format_seconds
from ..errors import ShoalError, UsageError
from ..net import Deadline
from ..store import Store

#: All open stores: torch keeps only the C++ part of a store alive, which needs the Python object.
_kept: set[TorchStore] = set()

#: polling interval of an empty queue, in seconds
_POLL_INTERVAL_S = 0.01
#: maximum timeout in seconds: a timedelta cannot be infinite
_MAX_TIMEOUT_S = 1e9
#: the value read for a queue that does not exist; no queue has this value
_MISSING = b"none"


class _Queue(msgspec.Struct, array_like=True):
    """The values of a queue, with a random state: after ``compare_set`` a writer recognises its own value."""

    values: list[bytes] = []
    state: bytes = msgspec.field(default_factory=lambda: secrets.token_bytes(16))


@refuses_copies("a Store", "a connection, a file or memory", "Call clone() for a second client")
class TorchStore(c10d.Store):
    """A ``torch.distributed.Store`` on top of a store of shoal.

    ``dist.init_process_group("gloo", store=TorchStore(shoal.TCPStore(...)), rank=..., world_size=...)``.
    It has all methods of torch's stores, with torch's types.  Through a ``dist.PrefixStore``, and so within a
    process group, torch cannot call ``list_keys`` and the queue methods of a Python store, and raises
    NotImplementedError.

    Torch does not keep the object alive while it uses the store, so the object exists until :meth:`close` or
    the end of the process.  Errors of the wrapped store are raised as ``dist.DistStoreError``.

    Args:
        store: the wrapped store; its timeout is the initial timeout, see :meth:`set_timeout`.
    """

    #: the default timeout of calls; torch stores it
    timeout: timedelta

    def __init__(self, store: Store) -> None:
        if not isinstance(store, Store):
            raise UsageError(f"TorchStore: expected a shoal.store.Store, not {type(store).__name__}")
        super().__init__()
        self._store = store
        self.set_timeout(timedelta(seconds=min(store.timeout, _MAX_TIMEOUT_S)))
        _kept.add(self)

    @property
    def store(self) -> Store:
        """The wrapped store."""
        return self._store

    def close(self) -> None:
        """Close the wrapped store.  No process group may use it afterwards."""
        _kept.discard(self)
        self._store.close()

    def clone(self) -> TorchStore:
        """Return a store of the same data with separate connections."""
        with _errors():
            other = TorchStore(self._store.clone())
        other.set_timeout(self.timeout)
        return other

    def set(self, key: str, value: str | bytes) -> None:
        with _errors():
            self._store.set(key, value)

    def get(self, key: str) -> bytes:
        with _errors():
            return self._store.get(key, self._seconds())

    def add(self, key: str, value: int) -> int:
        with _errors():
            return self._store.add(key, value)

    def check(self, keys: list[str]) -> bool:
        with _errors():
            return self._store.check(keys)

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        with _errors():
            return self._store.compare_set(key, expected_value, desired_value)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        with _errors():
            self._store.wait(keys, self._seconds() if timeout is None else timeout.total_seconds())

    def append(self, key: str, value: str | bytes) -> None:
        with _errors():
            self._store.append(key, value)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        with _errors():
            return self._store.multi_get(keys, self._seconds())

    def multi_set(self, keys: list[str], values: list[str] | list[bytes]) -> None:
        with _errors():
            self._store.multi_set(keys, values)

    def has_extended_api(self) -> bool:
        return True

    def delete_key(self, key: str) -> bool:
        with _errors():
            return self._store.delete(key)

    def num_keys(self) -> int:
        with _errors():
            return self._store.num_keys()

    def list_keys(self) -> list[str]:
        with _errors():
            return self._store.list_keys()

    def queue_push(self, key: str, value: bytes | str) -> None:
        """Append ``value`` to the queue ``key``."""
        data = value.encode() if isinstance(value, str) else bytes(value)
        deadline = Deadline(self._seconds())
        with _errors():
            while True:
                old, queue = self._queue(key)
                if self._swap(key, old, [*queue.values, data], deadline):
                    return

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        """Remove and return the first value of the queue ``key``; with ``block``, wait until there is one.

        Raises:
            dist.QueueEmptyError: the queue is empty and ``block`` is False.
            dist.DistStoreError: the queue was empty until the timeout.
        """
        deadline = Deadline(self._seconds())
        with _errors():
            while True:
                old, queue = self._queue(key)
                if queue.values:
                    if self._swap(key, old, queue.values[1:], deadline):
                        return queue.values[0]
                elif not block:
                    raise dist.QueueEmptyError(f"queue {key!r} is empty")
                elif deadline.expired:
                    raise dist.DistStoreError(
                        f"queue {key!r} had no value within {format_seconds(deadline.timeout)}"
                    )
                else:
                    time.sleep(min(_POLL_INTERVAL_S, deadline.remaining()))

    def queue_len(self, key: str) -> int:
        """Return the number of values in the queue ``key``."""
        with _errors():
            return len(self._queue(key)[1].values)

    # The names that torch's C++ calls.
    deleteKey = delete_key
    getNumKeys = num_keys

    def _seconds(self) -> float:
        return self.timeout.total_seconds()

    def _queue(self, key: str) -> tuple[bytes, _Queue]:
        raw = self._store.compare_set(_queue_key(key), _MISSING, _MISSING)
        if raw == _MISSING:
            return b"", _Queue()
        try:
            return raw, from_msgpack(raw, _Queue)
        except MalformedMessage as error:
            raise dist.DistStoreError(f"the queue {key!r} in the store cannot be read: {error}") from error

    def _swap(self, key: str, old: bytes, values: list[bytes], deadline: Deadline) -> bool:
        new = msgspec.msgpack.encode(_Queue(values))
        if self._store.compare_set(_queue_key(key), old, new) == new:
            return True
        if deadline.expired:
            within = format_seconds(deadline.timeout)
            raise dist.DistStoreError(f"queue {key!r} was continuously changed by other clients for {within}")
        return False


def _queue_key(key: str) -> str:
    return f"shoal.queue/{key}"


@contextmanager
def _errors() -> Iterator[None]:
    """Convert errors of shoal's stores to the errors of torch's stores."""
    try:
        yield
    except UsageError:
        raise
    except ShoalError as error:
        raise dist.DistStoreError(str(error)) from error
