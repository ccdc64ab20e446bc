"""The benchmark of optimisers' memory: it measures both kinds, on a small model here."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
from torch import nn

import shoal
from shoal.testing import run_threads

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "zero_memory.py"


def test_it_measures_state_memory_and_time(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.spec_from_file_location("zero_memory", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "zero_memory", script)  # dataclasses look there
    spec.loader.exec_module(script)
    assert sum(parameter.numel() for parameter in script.transformer().parameters()) == 19_962_880
    monkeypatch.setattr(script, "transformer", lambda: nn.ModuleList(nn.Linear(64, 64) for _ in range(4)))

    def state_and_steps(group: shoal.ProcessGroup, kind: str) -> tuple[int, dict[str, int]]:
        measured = script.measure(group, "SGD", kind)
        return measured.state, {name: len(seconds) for name, seconds in measured.seconds.items()}

    whole = 4 * 4 * (64 * 64 + 64)
    steps = {"alone": script.STEPS, "distributed": script.STEPS}
    assert run_threads(state_and_steps, 2, "alone") == [(whole, steps)] * 2
    assert run_threads(state_and_steps, 2, "distributed") == [(whole // 2, steps)] * 2
