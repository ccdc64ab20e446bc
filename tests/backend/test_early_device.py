"""The conformance tests with an engine whose futures are done once the work is enqueued on a device.

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
    from tests.support.device_engine import use_device_engine

    use_device_engine(pretend_device.make())


#: smaller groups use its first ranks
POOL = RankPool(4, prepare=make_device)


@pytest.fixture(scope="module", autouse=True)
def _pool_ends() -> Iterator[None]:
    yield
    POOL.close()


class TestEarlyDevice(DeviceConformance):
    backend = "device"
    completes = "early"
    pool = POOL
