"""Fixtures of all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shoal.backend.registry import register_backend, unregister_backend
from tests.support.store_backend import StoreBackend


@pytest.fixture
def store_backend() -> Iterator[str]:
    """The name of a backend that needs no native module; it knows all_reduce, all_gather and barrier."""
    register_backend("store", StoreBackend)
    yield "store"
    unregister_backend("store")
