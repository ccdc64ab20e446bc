"""Measure how the cost of a group grows with its number of ranks, on one machine.

    make scaling                            # 2, 4, 8, 16, 32 and 64 ranks
    make scaling ARGS="--ranks 2 4 8"
    SHOAL_TRANSPORT=tcp make scaling ARGS="--ranks 2 4 8 16 --out out/tcp"

The ranks are forked from a process that has imported torch and shoal, which saves 1.4 s per rank and is
allowed before ``shoal.init``. Forked ranks share the imported modules, so their memory is measured once, in
the parent, and added to the memory that each rank uses beyond an idle forked child.

A *growth* is the exponent p of cost ~ ranks^p between two sizes, for the cost of ONE rank. With fewer cores
than ranks, the time of an operation is the CPU time of all ranks, so its growth is computed from the time
divided by the ranks per core. Costs that grow faster than linearly (p > 1.1) are marked, and the script then
exits with status 1. Writes out/scaling.json and out/scaling.png.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import multiprocessing
import os
import platform
import socket
import statistics
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table
from scaling_rank import OPERATIONS, Rank

ROOT = Path(__file__).resolve().parent.parent
PATIENCE = 300.0  # seconds for all ranks to answer an order
LINEAR = 1.1  # larger exponents count as faster than linear, to allow for noise

#: kind of quantity -> (unit in the table, factor); all per rank
UNITS = {"seconds": ("ms", 1e3), "cpu": ("ms", 1e3), "bytes": ("MB", 1e-6), "count": ("", 1.0)}
FOOTPRINT = {
    "memory (USS)": "bytes",
    "memory (PSS)": "bytes",
    "shared memory, by the rank": "bytes",
    "page tables": "bytes",
    "file descriptors": "count",
    "threads": "count",
}


def rows_of_interest() -> dict[str, str]:
    rows = {}
    for name in ("init", "split", "close of the split", "close", *OPERATIONS):
        rows[f"{name}: time"] = "seconds"
        rows[f"{name}: CPU"] = "cpu"
    return rows | FOOTPRINT | {f"{name}, after use": unit for name, unit in FOOTPRINT.items()}


class World:
    """Forked ranks that wait for orders."""

    def __init__(self, size: int) -> None:
        context = multiprocessing.get_context("fork")
        self.size = size
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            self._pipes.append(ours)
            process = context.Process(target=Rank.serve, args=(rank, size, theirs, self._pipes), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)

    def ask(self, order: str, *arguments: Any) -> list[Any]:
        """Let all ranks execute ``order`` concurrently; return the answers in rank order."""
        for pipe in self._pipes:
            pipe.send((order, arguments))
        answers = []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(PATIENCE):
                raise RuntimeError(f"rank {rank} of {self.size} did not answer {order!r} in {PATIENCE:g} s")
            try:
                well, answer = pipe.recv()
            except EOFError:
                raise RuntimeError(f"rank {rank} of {self.size} ended during {order!r}") from None
            if not well:
                raise RuntimeError(f"rank {rank} of {self.size} failed in {order!r}:\n{answer}")
            answers.append(answer)
        return answers

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(20)
            if process.is_alive():
                process.kill()
                process.join()


def measure(size: int, imported: int, rounds: int, seconds: float) -> dict[str, float]:
    """Measure all quantities for one number of ranks.

    Args:
        size: number of ranks.
        imported: bytes that importing shoal takes beyond torch.
        rounds: samples of each operation and split; the median is used.
        seconds: target duration of a sample.
    """
    found: dict[str, float] = {}

    def take(name: str, answers: Sequence[tuple[float, float]], repeat: int = 1) -> tuple[float, float]:
        """Record the slowest rank's time and the mean CPU time of the ranks."""
        time = max(wall for wall, _ in answers) / repeat
        cpu = statistics.fmean(cpu for _, cpu in answers) / repeat
        found[f"{name}: time"], found[f"{name}: CPU"] = time, cpu
        return time, cpu

    def medians(name: str, samples: Sequence[tuple[float, float]]) -> None:
        found[f"{name}: time"] = statistics.median(time for time, _ in samples)
        found[f"{name}: CPU"] = statistics.median(cpu for _, cpu in samples)

    def footprint(suffix: str) -> None:
        for name in FOOTPRINT:
            values = [
                now[name] - before[name] for now, before in zip(world.ask("footprint"), idle, strict=True)
            ]
            found[name + suffix] = statistics.fmean(values) + (imported if name == "memory (USS)" else 0)

    world = World(size)
    try:
        idle = world.ask("footprint")
        with socket.socket() as probe:  # rank 0 serves the store at this port
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        take("init", world.ask("init", f"tcp://127.0.0.1:{port}"))
        footprint("")
        splits = [(take("", world.ask("split")), take("", world.ask("close_split"))) for _ in range(rounds)]
        medians("split", [made for made, _ in splits])
        medians("close of the split", [closed for _, closed in splits])
        for name in OPERATIONS:
            repeat = 1
            for _ in range(2):
                time, _ = take("", world.ask("operate", name, repeat), repeat)
                repeat = max(1, min(2000, round(seconds / time)))
            medians(name, [take("", world.ask("operate", name, repeat), repeat) for _ in range(rounds)])
        footprint(", after use")
        take("close", world.ask("close"))
    finally:
        world.close()
    return {name: found[name] for name in rows_of_interest()}


def growth(results: Mapping[int, Mapping[str, float]], name: str, cores: int) -> float | None:
    """Return the exponent of a rank's ``name`` over the upper half of the sizes, or None if unknown."""
    sizes = [size for size in results if size >= 8] if max(results) >= 16 else list(results)
    if len(sizes) < 2:
        return None
    ends = []
    for size in (min(sizes), max(sizes)):
        value = results[size][name]
        if name.endswith(": time"):
            value /= max(1.0, size / cores)  # the ranks that share a core take turns
        ends.append(value)
    if min(ends) <= 0:
        return None
    return math.log(ends[1] / ends[0]) / math.log(max(sizes) / min(sizes))


def show(results: Mapping[int, Mapping[str, float]], cores: int, console: Console) -> list[str]:
    """Print the table; return the quantities that grow faster than linearly."""
    table = Table(title=f"cost of one rank by number of ranks, on {cores} cores")
    table.add_column("")
    for size in results:
        table.add_column(str(size), justify="right")
    table.add_column("growth", justify="right")
    steep = []
    for name, kind in rows_of_interest().items():
        unit, factor = UNITS[kind]
        power = growth(results, name, cores)
        too_steep = power is not None and power > LINEAR
        if too_steep:
            steep.append(name)
        table.add_row(
            f"{name} [{unit}]".replace(" []", "").replace("[", r"\["),
            *(f"{results[size][name] * factor:.3g}" for size in results),
            "-" if power is None else f"{power:.2f}" + (" !" if too_steep else ""),
            style="red" if too_steep else None,
        )
    console.print(table)
    return steep


def draw(results: Mapping[int, Mapping[str, float]], path: Path) -> None:
    """Plot times, CPU times and footprint by ranks, log-log."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(15, 4.8), layout="constrained")
    rows = rows_of_interest()
    panels = (
        ("time", "seconds", [name for name in rows if rows[name] == "seconds"]),
        ("processor time of a rank", "seconds", [name for name in rows if rows[name] == "cpu"]),
        ("footprint of an idle rank", "bytes, or number", list(FOOTPRINT)),
    )
    for axis, (title, label, names) in zip(axes, panels, strict=True):
        for name in names:
            points = [(size, result[name]) for size, result in results.items() if result[name] > 0]
            if points:
                axis.loglog(*zip(*points, strict=True), "o-", label=name.split(": ")[0])
        axis.set_xticks(list(results), [str(size) for size in results])
        axis.minorticks_off()
        axis.set(xlabel="ranks", ylabel=label, title=title)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def main() -> int:
    parser = argparse.ArgumentParser(description="How the cost of a group grows with its ranks.")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8, 16, 32, 64])
    parser.add_argument("--rounds", type=int, default=5, help="samples of each operation")
    parser.add_argument("--sample", type=float, default=0.2, help="target duration of a sample in seconds")
    parser.add_argument("--out", type=Path, default=ROOT / "out", help="folder for JSON and picture")
    arguments = parser.parse_args()
    console = Console()
    pictures = find_spec("matplotlib") is not None
    if not pictures:
        console.print("matplotlib is not installed: no picture will be drawn", style="yellow")
    imported = Rank.imports()
    cores = len(os.sched_getaffinity(0))
    results = {}
    for size in sorted(arguments.ranks):
        with console.status(f"{size} ranks"):
            results[size] = measure(size, imported, arguments.rounds, arguments.sample)
    steep = show(results, cores, console)
    for name in steep:
        console.print(f"grows faster than linearly: {name}", style="red")
    arguments.out.mkdir(parents=True, exist_ok=True)
    record = {
        "date": datetime.date.today().isoformat(),
        "machine": {
            "cores": cores,
            "memory": psutil.virtual_memory().total,
            "system": f"{platform.system()} {platform.release()}",
            "python": platform.python_version(),
        },
        "transport": os.environ.get("SHOAL_TRANSPORT", "auto"),
        "imports": imported,
        "results": results,
        "growth": {name: growth(results, name, cores) for name in rows_of_interest()},
    }
    (arguments.out / "scaling.json").write_text(json.dumps(record, indent=1) + "\n")
    console.print(f"wrote scaling.json to {arguments.out}")
    if pictures:
        draw(results, arguments.out / "scaling.png")
        console.print(f"wrote scaling.png to {arguments.out}")
    return int(bool(steep))


if __name__ == "__main__":
    sys.exit(main())
