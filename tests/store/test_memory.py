"""The store in memory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shoal.store import MemoryStore, Store

from .conformance import StoreConformance


class TestMemoryStore(StoreConformance):
    @pytest.fixture
    def store(self) -> Iterator[Store]:
        with MemoryStore(30) as store:
            yield store
