"""A view of a store in which every key has a prefix, so that the keys of several users do not collide."""

from __future__ import annotations

from typing import TypeVar, cast

from ..net import Deadline
from .backing import RequestExecutor
from .base import Store, checked_key
from .requests import ListKeys, StoreRequest
from .torch_adapter import adopt

T = TypeVar("T")


class PrefixStore(Store):
    """A view of the keys ``prefix/...`` of another store.

    It has no connection of its own: :meth:`close` closes the underlying store, so if several views share a
    store, close only that store. Errors name full keys, including the prefix.

    Args:
        prefix: start of every key, without the slash.
        store: the underlying store, of shoal or of ``torch.distributed`` (see :func:`adopt`).
    """

    _backing: _View

    def __init__(self, prefix: str, store: object) -> None:
        below = adopt(store)
        super().__init__(_View(checked_key(prefix) + "/", below), below.timeout)

    @property
    def prefix(self) -> str:
        """Start of every key, without the slash."""
        return self._backing.start[:-1]

    @property
    def store(self) -> Store:
        """The underlying store."""
        return self._backing.below


class _View(RequestExecutor):
    def __init__(self, start: str, below: Store) -> None:
        super().__init__()
        self.start = start
        self.below = below
        self.host = below.host
        self.longest_value = below._backing.longest_value
        if below._backing.longest_key is not None:
            self.longest_key = below._backing.longest_key - len(start.encode())

    def execute(self, request: StoreRequest[T], deadline: Deadline) -> T:
        result = self.below._execute(request.under(self.start), deadline)
        if isinstance(request, ListKeys):
            return cast(T, [key[len(self.start) :] for key in result])  # type: ignore[attr-defined]
        return result

    def clone(self, timeout: float) -> _View:
        return _View(self.start, self.below.clone(timeout))

    def clone_accepting_new_data(self, timeout: float) -> _View:
        return _View(self.start, self.below.clone(timeout, accept_new_data=True))

    def close(self) -> None:
        self.below.close()

    def __str__(self) -> str:
        return f"PrefixStore {self.start[:-1]!r}"
