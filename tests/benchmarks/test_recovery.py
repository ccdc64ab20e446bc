"""The benchmark of recoveries: each survivor of a kill is timed."""

from __future__ import annotations

from types import ModuleType

import pytest

from .scripts import benchmark_script


@pytest.fixture
def recovery(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return benchmark_script("recovery", monkeypatch)


def test_deaths_are_timed_from_the_kill_to_the_first_all_reduce(recovery: ModuleType) -> None:
    case = recovery.measure(3, 1, 2)
    assert (case.ranks, case.resident, case.trials, case.bad) == (3, 1, 2, 0)
    assert 0 < case.detected["p50"] <= case.detected["p99"] == case.detected["max"]
    assert case.detected["max"] < case.gone_on["max"]


def test_percentiles_are_of_what_was_measured(recovery: ModuleType) -> None:
    assert recovery.summed_up([k / 1e3 for k in range(1, 101)]) == {"p50": 50.0, "p99": 99.0, "max": 100.0}
    assert recovery.summed_up([0.003]) == {"p50": 3.0, "p99": 3.0, "max": 3.0}
    assert recovery.summed_up([]) == {}
