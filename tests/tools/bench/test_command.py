"""The benchmark runs from end to end; what it measures on a busy machine is not looked at."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

import shoal
from shoal.launch.remote.ssh import PROGRAM

COMMAND = [sys.executable, "-c", PROGRAM, "bench"]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(shoal.__file__).parent.parent)}


def _bench(
    folder: Path, *options: str, environment: dict[str, str] = ENVIRONMENT
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, "--out", "out", *options],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("dtypes", "peers"),
    [(["fp32"], {}), pytest.param(["fp32", "bf16"], {"gloo": "Gloo"}, marks=pytest.mark.stress)],
    ids=["shoal", "shoal and Gloo"],
)
def test_a_quick_run_measures_every_operation_and_leaves_a_record(
    dtypes: list[str], peers: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "queue.py").write_text("raise SystemExit('a module of the working directory')\n")
    options = ["--quick", "--dtypes", ",".join(dtypes), "--sizes", "64K+4@1", "--rounds", "1"]
    contenders = ["shoal", *peers, "floor"]
    result = _bench(tmp_path, *options, "--contenders", ",".join(contenders))
    assert result.returncode == 0, result.stdout + result.stderr
    record = json.loads((tmp_path / "out" / "bench.json").read_text())
    assert record["absent"] == []
    assert set(record["versions"]) == set(contenders)
    names = ["shoal registered", "shoal", *peers.values(), "floor"]
    # Six operations in each dtype, and the barrier; memcpy and numpy's sum for fp32's all_reduce.
    assert len(record["cells"]) == len(names) * (6 * len(dtypes) + 1) + 2
    assert all(cell["samples"] for cell in record["cells"])
    assert record["futex_round_trip"]
    assert (tmp_path / "out" / "all_reduce-fp32-n2.png").exists()


@pytest.mark.stress
@pytest.mark.parametrize("name", ["async", "split", "late", "memory"])
def test_each_small_benchmark_shows_shoal_beside_gloo(name: str, tmp_path: Path) -> None:
    result = _bench(tmp_path, "--contenders", "shoal,gloo", name)
    assert result.returncode == 0, result.stdout + result.stderr
    assert set(json.loads((tmp_path / "out" / f"{name}.json").read_text())["answers"]) == {"shoal", "gloo"}


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--sizes", "1X"], "'1X' is not a size"),
        (["--ranks", "1"], "'1' is not a number of ranks"),
        (["--operations", "sum"], "'sum' is not one of all_reduce"),
        (["--readme"], "needs a checkout"),
    ],
)
def test_a_mistake_on_the_command_line_is_named(options: list[str], problem: str, tmp_path: Path) -> None:
    result = _bench(tmp_path, *options)
    assert result.returncode == 2
    assert problem in result.stderr


def _without(module: str, folder: Path) -> dict[str, str]:
    """An environment in which Python finds no ``module``."""
    (folder / "sitecustomize.py").write_text(f"import sys\n\nsys.modules[{module!r}] = None\n")
    return {**ENVIRONMENT, "PYTHONPATH": f"{folder}:{ENVIRONMENT['PYTHONPATH']}"}


FEW = (
    "--contenders",
    "floor",
    "--ranks",
    "2",
    "--operations",
    "all_reduce",
    "--dtypes",
    "fp32",
    "--sizes",
    "8",
)


def test_without_matplotlib_it_measures_and_leaves_the_record_alone(tmp_path: Path) -> None:
    result = _bench(tmp_path, *FEW, "--rounds", "1", environment=_without("matplotlib", tmp_path))
    assert result.returncode == 0, result.stdout + result.stderr
    assert "shoal bench draws no pictures, because matplotlib is not installed" in result.stderr
    assert "wrote bench.json to out" in result.stdout
    assert json.loads((tmp_path / "out" / "bench.json").read_text())["cells"]
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["bench.json"]


def test_without_numpy_it_says_so_before_it_measures(tmp_path: Path) -> None:
    result = _bench(tmp_path, *FEW, environment=_without("numpy", tmp_path))
    assert result.returncode == 2
    assert result.stderr == "shoal: shoal bench needs numpy: pip install 'shoal[bench]'\n"
    assert not (tmp_path / "out").exists()


# tests/tools/test_signals.py tries that both become exceptions.
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.stress)]
)
def test_a_signal_leaves_no_process_and_no_folder(number: signal.Signals, code: int, tmp_path: Path) -> None:
    process = subprocess.Popen(
        [*COMMAND, "--contenders", "shoal,floor", "--out", "out"],
        cwd=tmp_path, env={**ENVIRONMENT, "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    family: list[psutil.Process] = []
    deadline = time.monotonic() + 60
    # A launcher, its helpers, and the ranks of both.
    while len(family) < 6 and time.monotonic() < deadline:
        family = psutil.Process(process.pid).children(recursive=True)
        time.sleep(0.01)
    assert any(tmp_path.iterdir())
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode == code
    _, alive = psutil.wait_procs(family, timeout=30)
    assert not alive
    assert not list(tmp_path.iterdir())
