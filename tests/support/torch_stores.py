"""Stores of torch.distributed for tests."""

from __future__ import annotations

import datetime
import threading

import torch.distributed as dist

TIMEOUT = datetime.timedelta(seconds=30)


class PythonStore(dist.Store):
    """As little as a store written in Python can get by with."""

    def __init__(self) -> None:
        super().__init__()
        self._values: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def set(self, key: str, value: str | bytes) -> None:
        self._values[key] = value.encode() if isinstance(value, str) else value

    def get(self, key: str) -> bytes:
        return self._values[key]

    def add(self, key: str, value: int) -> int:
        with self._lock:
            total = int(self._values.get(key, b"0")) + value
            self._values[key] = b"%d" % total
            return total

    def check(self, keys: list[str]) -> bool:
        return all(key in self._values for key in keys)

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        with self._lock:
            current = self._values.get(key)
            if current == expected or (current is None and not expected):
                self._values[key] = current = desired
            return expected if current is None else current

    def delete_key(self, key: str) -> bool:
        return self._values.pop(key, None) is not None

    deleteKey = delete_key  # what torch's C++ looks for


def serve() -> dist.TCPStore:
    """A server, as its own first client.  To make one takes torch up to five seconds."""
    return dist.TCPStore("127.0.0.1", 0, 1, True, TIMEOUT, wait_for_workers=False)


def connect(server: dist.TCPStore) -> dist.TCPStore:
    """Another client of the server."""
    return dist.TCPStore("127.0.0.1", server.port, None, False, TIMEOUT)
