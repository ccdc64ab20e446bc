"""The conformance tests for backends that are slow in tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pytest

from shoal.testing import RankPool
from shoal.testing.conformance import BackendConformance


class SlowConformance(BackendConformance):
    """The tests of all operations on two and four ranks are long tests."""

    @pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
    @pytest.mark.parametrize(
        "size", [1, 3, *(pytest.param(size, marks=pytest.mark.stress) for size in (2, 4))]
    )
    def test_every_collective_dtype_and_reduction_agrees_with_the_reference(self, size: int) -> None:
        super().test_every_collective_dtype_and_reduction_agrees_with_the_reference(size)


class DeviceConformance(SlowConformance):
    """A backend of the pretended device.

    Attributes:
        pool: processes that have made the device; smaller groups use the first ones.
    """

    devices = ("pretend", "cpu")
    pool: ClassVar[RankPool]

    # The pretended device keeps its streams, which are threads, and a list of tensors that streams use.
    test_no_thread_is_left_behind = None  # type: ignore[assignment]
    test_a_tensor_is_released_after_the_wait = None  # type: ignore[assignment]

    def run(self, fn: Callable[..., Any], size: int, *args: Any, **options: Any) -> list[Any]:
        return self.pool.run(fn, *args, size=size, **self.with_defaults(options))
