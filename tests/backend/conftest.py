"""Makes the third-party backend findable, as an installed package would be: by its entry point.

And marks the tests of the conformance kit that are races, which knows nothing of our marks.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

THIRD_PARTY = Path(__file__).parent / "thirdparty"

RACES = (
    "test_operations_in_callbacks_match_in_any_order",
    "test_an_abort_in_another_thread_ends_the_waits_of_all_ranks",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.name in RACES:
            item.add_marker(pytest.mark.concurrency)


@pytest.fixture(scope="package", autouse=True)
def third_party_package() -> Iterator[None]:
    sys.path.append(str(THIRD_PARTY))
    yield
    sys.path.remove(str(THIRD_PARTY))
