"""A store of one's own, over a dictionary: the least that one must write."""

from __future__ import annotations

import threading
from typing import ClassVar

from shoal import Store
from shoal.store import Backing


class Dictionary(Backing):
    """A dictionary that others of the same name share, and the one lock of all of them."""

    tables: ClassVar[dict[str, dict[str, bytes]]] = {}
    lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.values = self.tables.setdefault(name, {})

    def get_now(self, key: str) -> bytes | None:
        return self.values.get(key)

    def swap(self, key: str, held: bytes | None, value: bytes | None) -> bool:
        with self.lock:
            if self.values.get(key) != held:
                return False
            if value is None:
                self.values.pop(key, None)
            else:
                self.values[key] = value
            return True

    def list_keys(self, prefix: str) -> list[str]:
        with self.lock:
            return [key for key in self.values if key.startswith(prefix)]

    def clone(self, timeout: float) -> Dictionary:
        return Dictionary(self.name)


def dictionary_store(name: str, timeout: float | None) -> Store:
    """A store in the dictionary ``name``."""
    return Store(Dictionary(name), timeout)
