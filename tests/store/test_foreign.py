"""The stores of torch.distributed behind our interface."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch.distributed as dist

from shoal.store import Store, adopt
from shoal.store.foreign import MAX_FOREIGN_KEY, MAX_FOREIGN_VALUE

from .conformance import StoreConformance

_TIMEOUT = datetime.timedelta(seconds=30)


class PythonStore(dist.Store):
    """As little as a store written in Python can get by with."""

    def __init__(self) -> None:
        super().__init__()
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: str | bytes) -> None:
        self._values[key] = value.encode() if isinstance(value, str) else value

    def get(self, key: str) -> bytes:
        return self._values[key]

    def add(self, key: str, value: int) -> int:
        total = int(self._values.get(key, b"0")) + value
        self._values[key] = b"%d" % total
        return total

    def check(self, keys: list[str]) -> bool:
        return self._values.keys() >= {*keys}

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        current = self._values.get(key)
        if current == expected or (current is None and not expected):
            self._values[key] = current = desired
        return expected if current is None else current

    def delete_key(self, key: str) -> bool:
        return self._values.pop(key, None) is not None

    deleteKey = delete_key  # what torch's C++ looks for


@pytest.fixture(scope="module")
def server() -> dist.TCPStore:
    """One server for all tests: to make one takes torch up to five seconds."""
    return dist.TCPStore("127.0.0.1", 0, 1, True, _TIMEOUT, wait_for_workers=False)


@contextmanager
def torch_store(kind: str, server: dist.TCPStore, tmp_path: Path) -> Iterator[dist.Store]:
    """A torch store: "tcp/prefix" is one with prefixes over a TCPStore."""
    kind, _, prefix = kind.partition("/")
    if kind == "tcp":
        below = dist.TCPStore("127.0.0.1", server.port, 1, False, _TIMEOUT)
        for key in below.list_keys():
            below.delete_key(key)
    elif kind == "file":
        below = dist.FileStore(str(tmp_path / "store"), 1)
    else:
        below = dist.HashStore() if kind == "hash" else PythonStore()
    below.set_timeout(_TIMEOUT)
    if not prefix:
        yield below
        return
    for key in ("other", f"{prefix}er/key", f"{prefix}/deeperer/key"):
        below.set(key, "not ours")
    yield dist.PrefixStore("deeper", dist.PrefixStore(prefix, below))


class Adopted(StoreConformance):
    """What an adopted store promises."""

    largest_value = MAX_FOREIGN_VALUE
    longest_key = MAX_FOREIGN_KEY
    kind: str

    @pytest.fixture(params=["", "/prefix"])
    def store(self, request: pytest.FixtureRequest, server: dist.TCPStore, tmp_path: Path) -> Iterator[Store]:
        with torch_store(self.kind + request.param, server, tmp_path) as below, adopt(below) as store:
            yield store
            del below


class TestAdoptedTCPStore(Adopted):
    kind = "tcp"


class TestAdoptedFileStore(Adopted):
    kind = "file"


class TestAdoptedHashStore(Adopted):
    kind = "hash"


class TestAdoptedPythonStore(Adopted):
    kind = "python"
