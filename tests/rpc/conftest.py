from __future__ import annotations

from collections.abc import Iterator

import pytest

from shoal.rpc import Agent
from shoal.testing import Agents
from shoal.testing.processes import preload
from tests.rpc import handlers

preload("tests.rpc.crew", "encodings.idna")  # a worker that is killed at once must not import for long


@pytest.fixture
def meeting() -> Iterator[Agents]:
    """A place where the test's agents meet."""
    handlers.noted.clear()
    with Agents() as meeting:
        yield meeting


@pytest.fixture
def a(meeting: Agents) -> Agent:
    return meeting.join("a", timeout=handlers.PATIENCE)
