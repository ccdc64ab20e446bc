"""Makes the third-party backend findable, as an installed package would be: by its entry point."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

THIRD_PARTY = Path(__file__).parent / "thirdparty"


@pytest.fixture(scope="package", autouse=True)
def third_party_package() -> Iterator[None]:
    sys.path.append(str(THIRD_PARTY))
    yield
    sys.path.remove(str(THIRD_PARTY))
