"""What a benchmark run writes down."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shoal.tools.bench import plot, table
from shoal.tools.bench.case import Case, Size
from shoal.tools.bench.plot import draw
from shoal.tools.bench.result import BenchResult, Cell, Setting

ROOT = Path(__file__).resolve().parents[3]
SETTING = Setting("all_reduce", "fp32", 2)
SMALL, LARGE = Size(8), Size(2**20)


@pytest.fixture
def result() -> BenchResult:
    samples = {
        "shoal registered": {SMALL: [1e-6, 2e-6, 3e-6], LARGE: [1e-4] * 3},
        "Gloo": {SMALL: [8e-6, 8e-6, 9e-6], LARGE: [2e-3] * 3},
        "MPICH": {SMALL: [4e-6, 4e-6, 6e-6]},
        "Open MPI": {SMALL: [5e-6, 5e-6, 5e-6]},
        "floor": {LARGE: [8e-5] * 3},
        "memcpy": {LARGE: [1e-4] * 3},
    }
    made = BenchResult(3, futex=[9e-6, 8e-6, 7e-6], unavailable=[("openmpi", 2, "", "gone")])
    for size in (SMALL, LARGE):
        for name, by_size in samples.items():
            if size in by_size:
                made.cell(Case("all_reduce", "fp32", size), 2, name).samples += by_size[size]
    return made


def test_a_ratio_is_the_median_over_rounds_against_the_fastest_that_was_measured(result: BenchResult) -> None:
    assert result.ratio(SETTING, SMALL, "shoal registered", ["MPICH", "Open MPI"]) == pytest.approx(2.0)
    assert result.ratio(SETTING, LARGE, "shoal registered", ["Gloo"]) == pytest.approx(20.0)
    assert result.ratio(SETTING, LARGE, "shoal registered", ["floor"]) == pytest.approx(0.8)
    assert result.ratio(SETTING, LARGE, "shoal registered", ["MPICH", "Open MPI"]) is None


def test_the_spread_is_half_the_interquartile_range() -> None:
    assert Cell([1.0, 2.0, 3.0, 4.0, 5.0]).spread == pytest.approx(0.5)
    assert Cell([1.0]).spread == 0.0


def test_the_table_has_times_ratios_and_who_is_absent(result: BenchResult) -> None:
    text = table.markdown(result, SETTING, [SMALL, LARGE])
    assert "openmpi is not available: gone" in text
    assert "| Open MPI | 5 us ±0% | - |" in text
    assert "| shoal registered : Gloo | 4 x | 20 x |" in text
    assert "| shoal registered : best MPI | 2 x | - |" in text
    assert "| shoal registered : floor | - | 0.8 x |" in text
    assert table.facts(result) == [
        "memcpy in each of 2 ranks at once: 1 MB 10.5 GB/s",
        "futex round trip between two processes: 8 us",
    ]


@pytest.mark.parametrize(
    ("size", "name"), [("8", "8 B"), ("1M+4", "1 MB + 4 B"), ("64K@1", "64 KB @1"), ("1000", "1000 B")]
)
def test_sizes_are_named_in_powers_of_1024(size: str, name: str) -> None:
    assert table.size_name(Size.parse(size)) == name


def test_the_errors_of_rounded_sums_are_shown() -> None:
    made = BenchResult(1)
    for name, error in (("shoal", 0.001), ("Gloo", 0.004), ("MPICH", 0.0)):
        cell = made.cell(Case("all_reduce", "bf16", SMALL), 4, name)
        cell.error = error
        cell.samples += [1.0] if error else []
    text = table.errors(made, Setting("all_reduce", "bf16", 4))
    assert text == "largest relative error: shoal 0.100%, Gloo 0.400%"


def test_the_record_holds_every_sample_and_the_machine(result: BenchResult, tmp_path: Path) -> None:
    result.save(tmp_path / "bench.json")
    record = json.loads((tmp_path / "bench.json").read_text())
    assert {"processor", "cores", "memory", "system", "python"} == set(record["machine"])
    assert len(record["cells"]) == 8
    assert {"contender": "openmpi", "ranks": 2, "case": "", "reason": "gone"} in record["absent"]
    assert record["cells"][0]["samples"] == [1e-6, 2e-6, 3e-6]


def test_a_picture_is_drawn_where_some_were_not_measured(result: BenchResult, tmp_path: Path) -> None:
    draw(result, [SETTING], tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_only_the_section_between_the_markers_is_rewritten() -> None:
    other = "<!-- b: begin -->\nold\n<!-- b: end -->\n"
    page = f"before\n<!-- a: begin, by make -->\nold\ntext\n<!-- a: end -->\nafter\n{other}"
    once = plot.replace_section(page, "a", "new")
    assert once == page.replace("old\ntext", "new")
    assert plot.replace_section(once, "a", "new") == once


def test_the_page_on_benchmarks_has_a_place_for_both_tables_and_the_picture() -> None:
    page = (ROOT / plot.PAGE).read_text()
    for name in ("all_reduce-picture", *(setting.stem for setting in plot.SETTINGS)):
        assert "marker" in plot.replace_section(page, name, "marker")
