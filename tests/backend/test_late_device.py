"""The conformance tests with an engine of a device whose futures are done when the data is there, like UCC's.

The ranks are processes, because a process that has the pretended device has it until it ends.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from shoal.testing import RankPool

from .conftest import THIRD_PARTY
from .slow_conformance import DeviceConformance


def make_device() -> None:
    sys.path.append(str(THIRD_PARTY))
    from tests.support import pretend_device
    from tests.support.late_engine import use_late_engine

    use_late_engine(pretend_device.make())


#: smaller groups use its first ranks
POOL = RankPool(4, prepare=make_device)


@pytest.fixture(scope="module", autouse=True)
def _pool_ends() -> Iterator[None]:
    yield
    POOL.close()


class TestLateDevice(DeviceConformance):
    backend = "late"
    completes = "late"
    pool = POOL
