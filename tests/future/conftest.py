"""Every test here ends in time and leaves no callback running."""

from __future__ import annotations

import faulthandler
from collections.abc import Iterator

import pytest

from shoal.future import pool


@pytest.fixture(autouse=True)
def deadline() -> Iterator[None]:
    faulthandler.dump_traceback_later(300, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()
    assert pool.shutdown(10), "a callback was still running at the end of the test"
