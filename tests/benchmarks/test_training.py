"""The benchmark of a training step runs from end to end, and its figures are what the samples say."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from tests.support.quick_launcher import QuickLauncher

ROOT = Path(__file__).resolve().parent.parent.parent
CONTENDERS = ["alone", "shoal", "shoal@0.001", "gloo", "gloo-copying"]


@pytest.fixture(autouse=True)
def _scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The modules of benchmarks/, which are scripts and in no package, can be imported."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


@pytest.fixture
def figures() -> ModuleType:
    import training_figures  # type: ignore[import-not-found]

    return training_figures


@pytest.fixture
def benchmark(launcher: QuickLauncher, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """``benchmarks/training.py`` with a small model; its ranks have torch already."""
    import training  # type: ignore[import-not-found]

    def ranks(command: Sequence[str], **_: object) -> subprocess.CompletedProcess[str]:
        assert command[1:5] == ["-m", "shoal", "run", "-n"]
        code, out, err = launcher.run(int(command[5]), *command[6:])
        return subprocess.CompletedProcess(command, code, out + err)

    def run(*options: str) -> None:
        monkeypatch.setattr(training.subprocess, "run", ranks)
        monkeypatch.setattr("sys.argv", ["training.py", "--models", "tiny", "--ranks", "2", *options])
        assert training.main() == 0

    return run


def test_it_races_every_contender_and_leaves_a_record(benchmark: Callable[..., None], tmp_path: Path) -> None:
    benchmark("--seconds", "0.1", "--contenders", *CONTENDERS, "--out", str(tmp_path))
    (race,) = json.loads((tmp_path / "training.json").read_text())["races"]
    assert (race["task"], race["ranks"], race["parameters"]) == ("tiny", 2, 6)
    for kind in ("wall", "cpu"):
        assert list(race[kind]) == CONTENDERS
        assert all(len(values) >= 5 and min(values) > 0 for values in race[kind].values())
    table = (tmp_path / "training.md").read_text().splitlines()
    assert [line.split("|")[2].strip() for line in table if line.startswith("|")][2:] == [
        "alone", "shoal", "shoal, 0.001 MiB", "Gloo", "Gloo, copying",
    ]  # fmt: skip
    assert (tmp_path / "training.png").stat().st_size > 0


def test_the_parts_of_the_overhead_are_shown(benchmark: Callable[..., None], tmp_path: Path) -> None:
    benchmark("--parts", "--contenders", "alone", "shoal", "--seconds", "0.1", "--out", str(tmp_path))
    (race,) = json.loads((tmp_path / "training.json").read_text())["races"]
    assert list(race["wall"]) == ["alone", "shoal", "hooks", "shoal-single"]
    # A rank that works alone waits for nobody; of two ranks one is late in some step.
    assert race["waited"]["shoal-single"] == 0 < race["waited"]["shoal"]
    *_, parts = (tmp_path / "training.md").read_text().splitlines()
    assert len(parts.split("|")) == 2 + 5  # the model, three parts, and the waiting


def test_the_timeline_of_a_step_is_drawn(benchmark: Callable[..., None], tmp_path: Path) -> None:
    picture = tmp_path / "timeline.png"
    benchmark("--timeline", str(picture))
    assert picture.stat().st_size > 0


def test_a_step_lasts_from_the_first_start_to_the_last_end(figures: ModuleType) -> None:
    def notes(*turns: list[tuple[int, int, int]]) -> dict[str, object]:
        waited = {"alone": 0.0, "shoal": 1e-3}
        return {"steps": {"alone": turns, "shoal": turns}, "parameters": 4, "waited": waited}

    one = notes([(100, 300, 150), (1000, 1300, 250)])
    two = notes([(110, 400, 50), (990, 1250, 150)])
    race = figures.race("tiny", [one, two])
    assert race.wall["alone"].tolist() == pytest.approx([(300 + 310) / 2 * 1e-9])
    assert race.cpu["alone"].tolist() == pytest.approx([(100 + 200) / 2 * 1e-9])
    assert (race.ranks, race.steps, race.rounds) == (2, 2, 1)
    assert race.waited == {"alone": 0.0, "shoal": 1e-3}


def test_the_interval_of_a_median_covers_the_true_one_nineteen_times_in_twenty(figures: ModuleType) -> None:
    drawn = np.random.default_rng(1)
    covered = sum(
        estimate.low <= 2.0 <= estimate.high
        for estimate in (figures.median(drawn.normal(2.0, 1.0, size=25)) for _ in range(100))
    )
    assert 90 <= covered <= 100


def test_what_both_suffer_in_a_round_cancels_out(figures: ModuleType) -> None:
    drawn = np.random.default_rng(2)
    alone = 0.06 + drawn.exponential(0.03, size=40)  # a noisy machine
    wall = {
        "alone": alone,
        "shoal": alone + drawn.normal(1e-3, 1e-4, size=40),
        "gloo": alone + drawn.normal(5e-3, 5e-4, size=40),
    }
    race = figures.Race("tiny", 2, 6, 1, wall, wall)
    assert race.overhead("shoal").value == pytest.approx(1e-3, rel=0.1)
    share = race.against("shoal", "gloo")
    assert share.low < 0.2 < share.high
    assert share.high - share.low < 0.05
    assert race.times_alone("gloo").low > 1


def test_no_share_is_given_of_an_overhead_that_may_be_none(figures: ModuleType) -> None:
    drawn = np.random.default_rng(3)
    alone = drawn.normal(1.0, 0.1, size=30)
    other = alone + drawn.normal(0.0, 0.1, size=30)
    race = figures.Race("tiny", 2, 6, 1, {"alone": alone, "shoal": alone + 1, "gloo": other}, {})
    assert race.against("shoal", "gloo") is None
