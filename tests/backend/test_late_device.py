"""The conformance tests with an engine of a device whose futures are done when the data is there, like UCC's.

The ranks are processes, because a process that has the pretended device has it until it ends.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from shoal.testing import RankPool
from shoal.testing.conformance import BackendConformance

from .conftest import THIRD_PARTY


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


class TestLateDevice(BackendConformance):
    backend = "late"
    devices = ("pretend", "cpu")
    completes = "late"

    # The pretended device keeps its streams, which are threads, and a list of tensors that streams use.
    test_no_thread_is_left_behind = None  # type: ignore[assignment]
    test_a_tensor_is_released_after_the_wait = None  # type: ignore[assignment]

    # The pretended device is slow.
    @pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
    @pytest.mark.parametrize(
        "size", [1, 3, *(pytest.param(size, marks=pytest.mark.stress) for size in (2, 4))]
    )
    def test_every_collective_dtype_and_reduction_agrees_with_the_reference(self, size: int) -> None:
        super().test_every_collective_dtype_and_reduction_agrees_with_the_reference(size)

    def run(self, fn: Callable[..., Any], size: int, *args: Any, **options: Any) -> list[Any]:
        return POOL.run(fn, *args, size=size, **self.with_defaults(options))
