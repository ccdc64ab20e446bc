"""The cost model's formulas agree with its simulation, and with common sense."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks.model import calibrate, report
from benchmarks.model.algorithms import (
    ALGORITHMS,
    Algorithm,
    Direct,
    Everything,
    Hierarchical,
    Round,
    best,
    log2,
    shoal,
)
from benchmarks.model.parameters import EXAMPLES, Parameters
from benchmarks.model.simulate import simulate
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from shoal import _core

ROOT = Path(__file__).resolve().parent.parent.parent

machines = st.builds(
    Parameters,
    latency=st.floats(1e-7, 1e-3),
    overhead=st.floats(1e-8, 1e-4),
    gap=st.floats(1e-12, 1e-8),
    gamma=st.floats(0, 1e-9),
)
worlds = st.sampled_from([2, 4, 8, 16, 32])
sizes = st.sampled_from([0, 8, 1000, 2**20, 2**28])
algorithms = st.sampled_from([*ALGORITHMS, Hierarchical(4)])


def _port(algorithm: Algorithm, machine: Parameters) -> Parameters:
    """What the schedule of one rank sees of the machine."""
    return machine.shared_by(algorithm.locals_) if isinstance(algorithm, Hierarchical) else machine


@given(algorithms, worlds, sizes, machines)
@settings(deadline=None, max_examples=150)
def test_the_simulation_takes_as_long_as_the_formula_says(
    algorithm: Algorithm, ranks: int, nbytes: int, machine: Parameters
) -> None:
    played = simulate(algorithm, ranks, nbytes, _port(algorithm, machine))
    assert played == pytest.approx(algorithm.time(ranks, nbytes, machine), rel=1e-9)


@given(st.sampled_from(ALGORITHMS), worlds, sizes)
@settings(deadline=None)
def test_the_schedule_sends_what_the_formula_counts(algorithm: Algorithm, ranks: int, nbytes: int) -> None:
    sends = [
        [size for each in algorithm.rounds(rank, ranks, nbytes) for _, size in each.sends]
        for rank in range(ranks)
    ]
    messages, moved = algorithm.sent(ranks, nbytes)
    assert max(map(len, sends)) == messages
    assert max(map(sum, sends)) == pytest.approx(moved)


@given(algorithms, worlds, sizes, machines)
def test_more_bytes_more_hosts_or_a_slower_network_never_take_less(
    algorithm: Algorithm, ranks: int, nbytes: int, machine: Parameters
) -> None:
    time = algorithm.time(ranks, nbytes, machine)
    almost = time * (1 - 1e-9)
    assert algorithm.time(ranks, 2 * nbytes + 8, machine) >= almost
    assert algorithm.time(2 * ranks, nbytes, machine) >= almost
    for name in ("latency", "overhead", "gap", "gamma"):
        worse = replace(machine, **{name: 2 * getattr(machine, name)})
        assert algorithm.time(ranks, nbytes, worse) >= almost


@given(st.sampled_from(ALGORITHMS), worlds, sizes, machines)
def test_nobody_beats_the_bound_of_the_bytes(
    algorithm: Algorithm, ranks: int, nbytes: int, machine: Parameters
) -> None:
    """Each rank must send and receive what the others need of it (Patarasuk and Yuan, 2009)."""
    least = 2 * (ranks - 1) / ranks * nbytes * machine.gap if not isinstance(algorithm, Everything) else 0
    assert algorithm.time(ranks, nbytes, machine) >= least * (1 - 1e-9)


def test_latency_is_what_steps_count() -> None:
    only_latency = Parameters(1.0, 0.0, 0.0, 0.0)
    for algorithm in (*ALGORITHMS, Hierarchical(2)):
        assert algorithm.time(16, 1000, only_latency) == algorithm.steps(16)


def test_a_group_of_one_costs_nothing() -> None:
    for algorithm in ALGORITHMS:
        assert algorithm.time(1, 1000, EXAMPLES["25 GbE, TCP"]) == 0


def test_other_numbers_than_powers_of_two_are_refused() -> None:
    with pytest.raises(ValueError, match="powers of two only"):
        log2(12)


def test_a_schedule_that_waits_for_nobody_is_found() -> None:
    class Deaf(Direct):
        def rounds(self, rank: int, ranks: int, nbytes: float) -> list[Round]:
            return [Round([], [(rank + 1) % ranks])]

    with pytest.raises(RuntimeError, match="stands still"):
        simulate(Deaf(), 4, 8, EXAMPLES["25 GbE, TCP"])


def test_the_model_knows_where_the_core_changes_its_algorithm() -> None:
    limit = _core.at_once_limit(8)
    assert [shoal(nbytes, 4).name for nbytes in (limit, limit + 1)] == ["everyone", "direct"]
    assert [shoal(nbytes, 1024).name for nbytes in (8, 2**20)] == ["doubling", "halving"]


@given(st.sampled_from([2**k for k in range(1, 13)]), st.sampled_from(report.SIZES))
def test_the_choice_is_near_the_best_on_the_network_of_its_parameters(hosts: int, nbytes: int) -> None:
    for machine, factor in zip(EXAMPLES.values(), (1.34, 2.2), strict=True):
        least = best(hosts, nbytes, machine).time(hosts, nbytes, machine)
        assert shoal(nbytes, hosts).time(hosts, nbytes, machine) <= factor * least


def test_many_hosts_want_few_messages() -> None:
    machine = EXAMPLES["25 GbE, TCP"]
    assert best(8, 8, machine).name == "everyone"
    assert best(4096, 8, machine).name == "doubling"
    assert best(4096, 2**20, machine).name == "halving"


def test_the_page_shows_what_the_tool_writes() -> None:
    page = (ROOT / "docs" / "algorithms.md").read_text()
    assert report.rewritten(page) == page, "run python -m benchmarks.model --write"
    assert report.markdown() in page


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    report.draw(tmp_path / "model.png")
    assert (tmp_path / "model.png").stat().st_size > 0


def _record(path: Path, machine: Parameters, transport: str = "tcp") -> Path:
    results = {
        ranks: {
            f"{name}: time": calibrate.Point(ranks, nbytes, 0.0, 2).predicted(machine)
            for name, nbytes in calibrate.OPERATIONS.items()
        }
        for ranks in (2, 4, 8, 16)
    }
    path.write_text(json.dumps({"transport": transport, "machine": {"cores": 2}, "results": results}))
    return path


def test_a_fit_finds_the_parameters_that_made_the_points(tmp_path: Path) -> None:
    machine = Parameters(30e-6, 8e-6, 0.4e-9, 0.05e-9)
    points = calibrate.read(_record(tmp_path / "scaling.json", machine))
    found = calibrate.fit([point for point in points if point.ranks <= 8], machine.gamma)
    for name in ("latency", "overhead", "gap"):
        assert getattr(found, name) == pytest.approx(getattr(machine, name), rel=1e-6)
    text = io.StringIO()
    report.show_fit(points, found, 8, Console(file=text, width=120))
    assert text.getvalue().count("predicted") == 3
    assert "+0%" in text.getvalue() or "-0%" in text.getvalue()


def test_a_fit_gives_no_negative_time() -> None:
    points = [
        calibrate.Point(2, 8, 1e-6, 2),
        calibrate.Point(2, 2**20, 1e-3, 2),
        calibrate.Point(8, 8, 9e-5, 2),
    ]
    found = calibrate.fit(points, 0.0)
    assert min(found.latency, found.overhead, found.gap) >= 0


def test_points_that_were_not_measured_over_tcp_are_refused(tmp_path: Path) -> None:
    path = _record(tmp_path / "scaling.json", EXAMPLES["25 GbE, TCP"], transport="auto")
    with pytest.raises(ValueError, match="set SHOAL_TRANSPORT=tcp"):
        calibrate.read(path)


def _hosts_record(path: Path, machine: Parameters, megabits: float | None, **changes: object) -> Path:
    gap = 8e-6 / megabits if megabits else None
    algorithms = {each.name: each for each in ALGORITHMS}
    results = {
        f"{hosts}x1": {
            nbytes: {
                name: {
                    "seconds": [
                        calibrate.Point(hosts, nbytes, 0.0, 2, algorithms[name], gap).predicted(machine)
                    ]
                }
                for name in ("direct", "doubling", "halving", "ring")
            }
            for nbytes in (256 << 10, 1 << 20, 4 << 20)
        }
        for hosts in (4, 8, 16)
    }
    record = {"operation": "all_reduce", "megabits": megabits, "cores": 2, "results": results, **changes}
    path.write_text(json.dumps(record))
    return path


@pytest.mark.parametrize("megabits", [None, 100.0])
def test_a_fit_to_simulated_hosts_uses_the_rate_of_their_links(
    tmp_path: Path, megabits: float | None
) -> None:
    machine = Parameters(30e-6, 8e-6, 8e-8 if megabits else 0.4e-9, 0.05e-9)
    points = calibrate.read(_hosts_record(tmp_path / "hosts.json", machine, megabits))
    assert len(points) == 36
    found = calibrate.fit([point for point in points if point.ranks <= 8], machine.gamma)
    for name in ("latency", "overhead", "gap"):
        assert getattr(found, name) == pytest.approx(getattr(machine, name), rel=1e-4)
    for point in points:
        assert point.predicted(found) == pytest.approx(point.seconds, rel=1e-4)


def test_measurements_that_the_model_does_not_have_are_refused(tmp_path: Path) -> None:
    machine = EXAMPLES["25 GbE, TCP"]
    with pytest.raises(ValueError, match="measured reduce; the model has all_reduce only"):
        calibrate.read(_hosts_record(tmp_path / "hosts.json", machine, None, operation="reduce"))
    with pytest.raises(ValueError, match="3 hosts of 1; the model has powers of two"):
        calibrate.read(_hosts_record(tmp_path / "hosts.json", machine, None, results={"3x1": {}}))
    with pytest.raises(ValueError, match="4 hosts of 2"):
        calibrate.read(_hosts_record(tmp_path / "hosts.json", machine, None, results={"4x2": {}}))
