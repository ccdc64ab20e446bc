"""Fixtures of this folder; no test of it may leave a socket or a thread behind."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from tests.leaks import nothing_left_behind

_numbers = itertools.count()


@pytest.fixture
def job() -> str:
    """The name of a job that nobody else has."""
    return f"job {next(_numbers)}"


@pytest.fixture(autouse=True)
def _leaks() -> Iterator[None]:
    with nothing_left_behind():
        yield
