"""Tensors on a device for which a group of torch.distributed has no backend."""

from __future__ import annotations

from pathlib import Path

from tests.support.programs import run_program


def test_tensors_on_a_device_without_a_backend_are_refused_before_anything_is_sent(tmp_path: Path) -> None:
    outputs = run_program(Path(__file__).with_name("on_pretend.py"), 2, folder=tmp_path)
    assert all("refused" in output for output in outputs), outputs
