"""What a benchmark run writes down."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """benchmarks/report.py, which is a script's neighbour and in no package."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.delitem(sys.modules, "report", raising=False)
    import report  # type: ignore[import-not-found]

    return report


def _result(report: ModuleType) -> object:
    samples = {
        "shoal registered": {8: [1e-6, 2e-6, 3e-6], 2**20: [1e-4] * 3},
        "Gloo": {8: [8e-6, 8e-6, 9e-6], 2**20: [2e-3] * 3},
        "MPICH": {8: [4e-6, 4e-6, 5e-6]},
        "Open MPI": {8: [5e-6, 5e-6, 5e-6]},
    }
    versions = dict.fromkeys(samples, "1")
    return report.Result(2, 3, versions, samples, {"MPICH": "at 1 MB: gone"})


def test_a_ratio_is_taken_against_the_fastest_peer_that_was_measured(report: ModuleType) -> None:
    result = _result(report)
    assert result.ratio("shoal registered", ["MPICH", "Open MPI"], 8) == pytest.approx(2.0)
    assert result.ratio("shoal registered", ["Gloo"], 2**20) == pytest.approx(20.0)
    assert result.ratio("shoal registered", ["MPICH", "Open MPI"], 2**20) is None


def test_who_is_absent_is_said_with_the_reason(report: ModuleType) -> None:
    table = report.markdown(_result(report))
    assert "MPICH is absent: at 1 MB: gone" in table
    assert "| Open MPI | 5 us ±0% | absent |" in table
    assert "| shoal registered : Gloo | 4 x | 20 x |" in table
    assert "| shoal registered : best MPI | 2 x | - |" in table


def test_only_the_section_between_the_markers_is_rewritten(report: ModuleType) -> None:
    other = "<!-- b: begin -->\nold\n<!-- b: end -->\n"
    page = f"before\n<!-- a: begin, by make -->\nold\ntext\n<!-- a: end -->\nafter\n{other}"
    once = report.replace_section(page, "a", "new")
    assert once == page.replace("old\ntext", "new")
    assert report.replace_section(once, "a", "new") == once


def test_readme_has_a_place_for_both_tables(report: ModuleType) -> None:
    page = (ROOT / "README.md").read_text()
    for name in ("all_reduce-n2", "all_reduce-n4"):
        assert "marker" in report.replace_section(page, name, "marker")
