"""The stores of torch.distributed behind our interface."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch.distributed as dist

from shoal.store import Store, adopt
from shoal.store.torch_adapter import MAX_TORCH_KEY, MAX_TORCH_VALUE
from tests.support.torch_stores import TIMEOUT, PythonStore, connect, serve

from .conformance import StoreConformance


@pytest.fixture(scope="module")
def server() -> dist.TCPStore:
    return serve()


@contextmanager
def torch_store(kind: str, server: dist.TCPStore, tmp_path: Path) -> Iterator[dist.Store]:
    """A torch store: "tcp/prefix" is one with prefixes over a TCPStore."""
    kind, _, prefix = kind.partition("/")
    if kind == "tcp":
        below = connect(server)
        for key in below.list_keys():
            below.delete_key(key)
    elif kind == "file":
        below = dist.FileStore(str(tmp_path / "store"), 1)
    else:
        below = dist.HashStore() if kind == "hash" else PythonStore()
    below.set_timeout(TIMEOUT)
    if not prefix:
        yield below
        return
    for key in ("other", f"{prefix}er/key", f"{prefix}/deeperer/key"):
        below.set(key, "not ours")
    yield dist.PrefixStore("deeper", dist.PrefixStore(prefix, below))


class Adopted(StoreConformance):
    """What an adopted store promises."""

    largest_value = MAX_TORCH_VALUE
    longest_key = MAX_TORCH_KEY
    one_step = False
    kind: str

    # A view with a prefix calls the store below it, so that alone is for `make stress`.
    @pytest.fixture(params=[pytest.param("", marks=pytest.mark.stress), "/prefix"])
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
