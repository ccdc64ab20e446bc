"""Measure what lanes (``concurrency=k``) bring: several all-reduces that are submitted together.

    make lanes                                         # 2 ranks on one host, then on 2 simulated hosts
    make lanes ARGS="--ranks 4 --sizes 4096 --delay 200"

Each rank submits ``--operations`` all-reduces, then waits for all of them. A time is that of the slowest
rank; a ratio is the median over the rounds of the time with k lanes, divided by that with one lane in the
same round, so a number below 1 is faster. In parentheses: the same ratio of the time from the submission of
a small all-reduce behind a large one (64 times the size) to its completion.

A simulated host is a network namespace of this machine, with one rank; ``--delay`` needs the kernel's netem,
``--megabits`` limits what a host sends.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from shoal import ProcessGroup
from shoal.testing import Network
from shoal.testing.network import why_unavailable
from shoal.testing.processes import run_processes

ROOT = Path(__file__).resolve().parent.parent
SIZES = (8, 4 << 10, 64 << 10, 1 << 20)
BEHIND = 64  # size of the operation in front of a small one, relative to it
_PATIENCE_S = 600.0

#: by size and number of lanes: in each round, the seconds of a batch, and of a small operation behind a large
_Times = dict[int, dict[int, dict[str, list[float]]]]


def measure(group: ProcessGroup, lanes: list[int], sizes: list[int], operations: int, rounds: int) -> _Times:
    """Measure with all ranks; the same result on each."""
    torch.set_num_threads(1)
    groups = {count: group.split(0, concurrency=count) for count in lanes}
    found: _Times = {}
    for size in sizes:
        times = found[size] = {count: {"batch": [], "behind": []} for count in lanes}
        for number in range(-2, rounds):  # two rounds to warm up
            for place in range(len(lanes)):
                count = lanes[(number + place) % len(lanes)]
                batch = _batch(group, groups[count], size, operations)
                behind = _behind(group, groups[count], size)
                if number >= 0:
                    times[count]["batch"].append(batch)
                    times[count]["behind"].append(behind)
    for each in groups.values():
        each.close()
    return found


def _batch(meet: ProcessGroup, group: ProcessGroup, size: int, operations: int) -> float:
    tensors = [group.empty(max(size // 4, 1)).fill_(1) for _ in range(operations)]
    meet.barrier().wait()
    began = time.perf_counter()
    for future in [group.all_reduce(tensor) for tensor in tensors]:
        future.wait()
    return _slowest(meet, time.perf_counter() - began)


def _behind(meet: ProcessGroup, group: ProcessGroup, size: int) -> float:
    large, small = group.empty(BEHIND * max(size // 4, 1)).fill_(1), group.empty(max(size // 4, 1)).fill_(1)
    meet.barrier().wait()
    first = group.all_reduce(large)
    began = time.perf_counter()
    group.all_reduce(small).wait()
    took = time.perf_counter() - began
    first.wait()
    return _slowest(meet, took)


def _slowest(group: ProcessGroup, seconds: float) -> float:
    shared = torch.tensor([seconds], dtype=torch.float64)
    group.all_reduce(shared, "max").wait()
    return shared.item()


def show(found: _Times, title: str, console: Console) -> None:
    lanes = list(next(iter(found.values())))
    base, *others = lanes
    table = Table("bytes", f"{base} lane", *(f"{count} lanes" for count in others), title=title)
    for size, times in found.items():
        batch, behind = (statistics.median(times[base][kind]) * 1e6 for kind in ("batch", "behind"))
        cells = [
            f"{_ratio(times, count, base, 'batch'):.2f} ({_ratio(times, count, base, 'behind'):.2f})"
            for count in others
        ]
        table.add_row(f"{size:,}", f"{batch:,.0f} us ({behind:,.0f} us)", *cells)
    console.print(table)


def _ratio(times: dict[int, dict[str, list[float]]], count: int, base: int, kind: str) -> float:
    return statistics.median(a / b for a, b in zip(times[count][kind], times[base][kind], strict=True))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--lanes", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), help="bytes")
    parser.add_argument("--operations", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--megabits", type=float, help="rate of each host in Mbit/s")
    parser.add_argument("--delay", type=float, default=0.0, help="delay of each packet in us")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "lanes.json")
    arguments = parser.parse_args()
    console = Console()
    record: dict[str, Any] = {"operations": arguments.operations, "cores": os.cpu_count(), "results": {}}
    work = arguments.lanes, arguments.sizes, arguments.operations, arguments.rounds
    count = arguments.ranks

    def run(where: str, **options: Any) -> None:
        found = run_processes(
            measure, count, *work, timeout=_PATIENCE_S, env={"OMP_NUM_THREADS": "1"}, **options
        )[0]
        title = f"{arguments.operations} all-reduces, {count} {where}"
        show(found, title, console)
        record["results"][title] = found

    run("ranks on one host")
    if why := why_unavailable():
        console.print(f"not between hosts: {why}")
    else:
        names = [f"h{number}" for number in range(count)]
        with Network(*names) as network:
            if arguments.megabits or arguments.delay:
                network.shape(megabits=arguments.megabits, delay_us=arguments.delay)
            link = f"{arguments.megabits:g} Mbit/s" if arguments.megabits else "no limit"
            run(f"hosts, {link}, delay {arguments.delay:g} us", hosts=names, network=network)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(record, indent=1) + "\n")
    console.print(f"wrote {arguments.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
