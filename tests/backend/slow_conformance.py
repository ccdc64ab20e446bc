"""The conformance tests for backends that are slow in tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch

from shoal.testing import RankPool
from shoal.testing.conformance import BackendConformance
from shoal.testing.conformance.cases import all_cases, check_cases, run_cases

#: dtypes for what depends little on the dtype
FEW_DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64)


class SlowConformance(BackendConformance):
    """All operations on two and four ranks, and empty tensors of all dtypes, are long tests."""

    @pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
    @pytest.mark.parametrize(
        "size", [1, 3, *(pytest.param(size, marks=pytest.mark.stress) for size in (2, 4))]
    )
    def test_every_collective_dtype_and_reduction_agrees_with_the_reference(self, size: int) -> None:
        super().test_every_collective_dtype_and_reduction_agrees_with_the_reference(size)

    @pytest.mark.stress
    @pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
    def test_empty_tensors_pass_every_collective(self) -> None:
        super().test_empty_tensors_pass_every_collective()

    def test_empty_tensors_of_few_dtypes_pass_every_collective(self) -> None:
        for device in self.devices:
            self._check_few(0, device, 3)

    def _check_few(self, count: int, device: str, size: int) -> None:
        """Check all collectives and reductions with tensors of few dtypes."""
        found = all_cases(count, device, messages=self.messages)
        cases = [case for case in found if case.legal and case.dtype in FEW_DTYPES]
        check_cases(cases, self.run(run_cases, size, cases), self.rounding)


class DeviceConformance(SlowConformance):
    """A backend of the pretended device.

    Attributes:
        pool: processes that have made the device; smaller groups use the first ones.
    """

    devices = ("pretend", "cpu")
    pool: ClassVar[RankPool]

    @pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
    @pytest.mark.parametrize("size", [1, 3])
    def test_every_dtype_on_the_device_and_few_on_the_cpu_agree_with_the_reference(self, size: int) -> None:
        cases = all_cases(37, self.devices[0], messages=self.messages)
        check_cases(cases, self.run(run_cases, size, cases), self.rounding)
        self._check_few(37, "cpu", size)

    @pytest.mark.stress
    @pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
    @pytest.mark.parametrize("size", [1, 2, 3, 4])
    def test_every_collective_dtype_and_reduction_agrees_with_the_reference(self, size: int) -> None:
        super().test_every_collective_dtype_and_reduction_agrees_with_the_reference(size)

    # The pretended device keeps its streams, which are threads, and a list of tensors that streams use.
    test_no_thread_is_left_behind = None  # type: ignore[assignment]
    test_a_tensor_is_released_after_the_wait = None  # type: ignore[assignment]

    def run(self, fn: Callable[..., Any], size: int, *args: Any, **options: Any) -> list[Any]:
        return self.pool.run(fn, *args, size=size, **self.with_defaults(options))
