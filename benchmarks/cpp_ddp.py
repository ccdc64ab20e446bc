"""Measure what DDP adds to a training step of a C++ program, beside torch's Python DDP over Gloo.

    python benchmarks/cpp_ddp.py                 # 1 and 2 ranks, 3 minutes
    python benchmarks/cpp_ddp.py --seconds 60    # per number of ranks

The model has 200 linear layers of 64 (400 parameters).  The C++ program (cpp_ddp.cc) and the Python ranks
(training_rank.py) run alternately; in each, the contenders take turns:

- C++: ``alone`` (without DDP), ``copying`` (every gradient is copied once after backward), ``shoal``
- Python: ``alone``, ``shoal``, ``gloo`` (torch's DDP with views)

Overhead is the difference from ``alone`` of the same program and round, as median with a bootstrap 95 %
confidence interval.  On one rank nothing is sent, so what is left after copying is the cost of the hooks.
On a busy machine compare the CPU time.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table
from torch.utils.cpp_extension import include_paths, library_paths
from training import KEEP_MEMORY
from training_figures import Estimate, Race, race

FOLDER = Path(__file__).parent


def build(program: Path) -> None:
    """Compile cpp_ddp.cc against the installed shoal and torch."""

    def path_of(what: str) -> str:
        command = [sys.executable, "-m", "shoal", "config", what]
        return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()

    options = ["-std=c++17", "-O2", "-pthread", f"-I{path_of('--include-dir')}"]
    options += [word for path in include_paths() for word in ("-isystem", path)]
    libraries = [
        path_of("--library"),
        *(f"{word}{path}" for path in library_paths() for word in ("-L", "-Wl,-rpath,")),
    ]
    libraries += ["-ltorch", "-ltorch_cpu", "-lc10", "-ldl", "-lrt"]
    compiler = os.environ.get("CXX", "c++")
    subprocess.run([compiler, *options, FOLDER / "cpp_ddp.cc", "-o", program, *libraries], check=True)


def run(ranks: int, *command: str | Path) -> None:
    """Run a program on ``ranks`` ranks."""
    launcher = [sys.executable, "-m", "shoal", "run", "-n", str(ranks)]
    subprocess.run([*launcher, *map(str, command)], env=os.environ | KEEP_MEMORY, check=True)


def measure(program: Path, ranks: int, seconds: float, repeats: int) -> dict[str, Race]:
    """Return the measurements of both programs, from ``repeats`` runs of each."""
    found: dict[str, list[Race]] = {"C++": [], "Python": []}
    for _ in range(repeats):
        with tempfile.TemporaryDirectory(prefix="shoal-cpp-") as name:
            folder, result = Path(name), Path(name) / "python"
            run(ranks, program, str(seconds / repeats / 2), folder)
            answers = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]
            found["C++"].append(race("layers", answers))
            contenders = ["--contenders", "alone", "shoal", "gloo"]
            duration = ["--seconds", str(seconds / repeats / 2), "--result", str(result)]
            run(ranks, FOLDER / "training_rank.py", "--task", "layers", *contenders, *duration)
            found["Python"].append(race("layers", json.loads(result.read_text())))
    return {language: _combined(races) for language, races in found.items()}


def _combined(races: Sequence[Race]) -> Race:
    first = races[0]
    wall = {name: np.concatenate([one.wall[name] for one in races]) for name in first.wall}
    cpu = {name: np.concatenate([one.cpu[name] for one in races]) for name in first.cpu}
    return Race(first.task, first.ranks, first.parameters, first.steps, wall, cpu)


def _text(value: Estimate) -> str:
    low, high = sorted((value.low * 1e6, value.high * 1e6))
    return f"{value.value * 1e6:,.0f} ({low:,.0f} - {high:,.0f})"


def show(found: dict[str, Race], console: Console) -> None:
    """Print a table of one number of ranks, and the ratios of overheads."""
    cpp, python = found["C++"], found["Python"]
    table = Table(title=f"200 layers of 64, {cpp.ranks} ranks: added to a step, in microseconds")
    for column in ("", "time", "CPU time of a rank"):
        table.add_column(column, justify="right" if column else "left")
    for language, one in found.items():
        for name in one.names():
            table.add_row(f"{language} {name}", _text(one.overhead(name)), _text(one.cpu_overhead(name)))
    console.print(table)
    for kind, ours, copying, theirs in (
        ("time", cpp.overhead("shoal"), cpp.overhead("copying"), python.overhead("gloo")),
        ("CPU time", cpp.cpu_overhead("shoal"), cpp.cpu_overhead("copying"), python.cpu_overhead("gloo")),
    ):
        if cpp.ranks == 1:  # nothing is sent
            beyond = (ours.value - copying.value) * 1e6 / cpp.parameters
            console.print(f"{kind}: {beyond:.2f} us for each parameter beyond copying")
        console.print(f"{kind}: {ours.value / theirs.value:.2f} of what Gloo adds")


def main() -> None:
    parser = argparse.ArgumentParser(description="What DDP adds to a training step of a C++ program.")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--seconds", type=float, default=30.0, help="duration per number of ranks")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each program")
    arguments = parser.parse_args()
    console = Console() if sys.stdout.isatty() else Console(width=110)
    with tempfile.TemporaryDirectory(prefix="shoal-cpp-") as folder:
        program = Path(folder) / "cpp_ddp"
        build(program)
        for ranks in arguments.ranks:
            show(measure(program, ranks, arguments.seconds, arguments.repeats), console)


if __name__ == "__main__":
    main()
