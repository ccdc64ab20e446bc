"""All-reduce of fp32 tensors, called from Python: shoal beside torch's Gloo and MPI.

    make bench                      # 2 ranks
    make bench ARGS="-n 4"

All contenders are started at once, but one at a time is given work: size by size they take turns, in
an order that rotates from round to round, so that a noisy machine is noisy for all.  A sample is the
mean of some 20 ms of back-to-back operations on the slowest rank; the table shows the median of the
samples and half their interquartile range.  Each contender's result is compared with the exact one first.
Writes out/all_reduce-n2.json, a picture beside it, and the table in README.md.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

import report
from contenders import CONTENDERS, Absent, Running

SIZES = (8, 16 * 2**10, 2**20, 25 * 2**20, 64 * 2**20)
SAMPLE_SECONDS = 0.02


@dataclass
class Entry:
    """One variant of one contender; ``samples`` are seconds by size in bytes."""

    running: Running
    name: str
    variant: str
    repeat: int = 1
    samples: dict[int, list[float]] = field(default_factory=dict)

    def calibrate(self, nbytes: int) -> None:
        """Check the result, warm up, and choose how many operations make a sample."""
        self.repeat = 1
        for _ in range(3):
            seconds = self.running.measure(self.variant, nbytes, self.repeat)
            self.repeat = max(1, min(5000, round(SAMPLE_SECONDS / seconds)))

    def sample(self, nbytes: int) -> None:
        """One sample more."""
        seconds = self.running.measure(self.variant, nbytes, self.repeat)
        self.samples.setdefault(nbytes, []).append(seconds)


def start(names: Iterable[str], ranks: int, console: Console) -> tuple[list[Entry], dict[str, str]]:
    """Start the contenders.  Gives their entries, and why others are absent."""
    entries: list[Entry] = []
    absent: dict[str, str] = {}
    for contender in CONTENDERS:
        if contender.name not in names:
            continue
        try:
            running = Running(contender, ranks)
        except Absent as reason:
            absent[contender.name] = str(reason)
            console.print(f"{contender.name} is absent: {reason}", style="yellow", markup=False)
        else:
            entries += [Entry(running, name, variant) for name, variant in contender.variants]
    return entries, absent


def race(entries: Sequence[Entry], rounds: int, console: Console) -> dict[str, str]:
    """Measure every size in turns.  Gives why those fell out that did."""
    lost: dict[str, str] = {}
    racing = list(entries)
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("", total=len(SIZES) * (rounds + 1))
        for nbytes in SIZES:
            progress.update(task, description=report.size_name(nbytes))
            for turn in range(-1, rounds):  # turn -1 is the calibration
                shift = max(turn, 0) % max(len(racing), 1)
                for entry in racing[shift:] + racing[:shift]:
                    if entry.running.contender.name in lost:
                        continue
                    try:
                        (entry.calibrate if turn < 0 else entry.sample)(nbytes)
                    except Absent as reason:
                        lost[entry.running.contender.name] = f"at {report.size_name(nbytes)}: {reason}"
                racing = [entry for entry in racing if entry.running.contender.name not in lost]
                progress.advance(task)
    for name, reason in lost.items():
        console.print(f"{name} fell out {reason}", style="yellow", markup=False)
    return lost


def main() -> int:
    names = [contender.name for contender in CONTENDERS]
    parser = argparse.ArgumentParser(description="All-reduce of fp32: shoal beside Gloo and MPI.")
    parser.add_argument("-n", "--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=21, help="samples of each contender and size")
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="leave the others out")
    parser.add_argument("--out", type=Path, help="folder for JSON and picture; README.md stays as it is")
    arguments = parser.parse_args()
    console = Console()
    entries, absent = start(arguments.only, arguments.ranks, console)
    try:
        absent |= race(entries, arguments.rounds, console)
    finally:
        for running in {id(entry.running): entry.running for entry in entries}.values():
            running.stop(kill=running.contender.name in absent)
    versions = {entry.name: entry.running.version for entry in entries}
    samples = {entry.name: entry.samples for entry in entries}
    result = report.Result(arguments.ranks, arguments.rounds, versions, samples, absent)
    report.show(result, console)
    readme = arguments.out is None and arguments.only == names
    report.save(result, arguments.out or report.ROOT / "out", readme=readme, console=console)
    return int(any(name.startswith("shoal") for name in absent))


if __name__ == "__main__":
    sys.exit(main())
