"""The ranks that the tests of this folder share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .pool import Pool


@pytest.fixture(scope="package")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """Four ranks with a default group."""
    with Pool(4, tmp_path_factory.mktemp("distributed")) as pool:
        yield pool
