"""Data-parallel training on a device, whose results are not there when they are returned."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.programs import run_program


@pytest.mark.parametrize("backend", ["device", "fake-nccl"])
def test_training_on_a_device_equals_training_on_the_cpu_and_its_steps_do_not_wait(
    backend: str, tmp_path: Path
) -> None:
    outputs = run_program(Path(__file__).with_name("on_device.py"), 2, backend, folder=tmp_path)
    assert all("equal on the device and on the CPU" in output for output in outputs), outputs
