"""Compare the algorithms between hosts with each other and with Gloo, on simulated hosts of this machine.

    make hosts                                              # 4, 8 and 16 hosts of one rank
    make hosts ARGS="--hosts 8 --ranks 2 --megabits 1000"
    make hosts ARGS="--operation reduce_scatter --delay 100"

Each host is a network namespace; what a host sends can be limited to a rate (tc tbf) and delayed (tc netem,
where the kernel has it). All contenders run in the same processes, one after another in every round. A time
is that of the slowest rank; a ratio is the median over the rounds of a contender's time, divided by that of
``direct`` in the same round, so a number below 1 is faster. In parentheses: the same ratio of the CPU times
of all ranks together; of ``direct`` the CPU time in nanoseconds for each byte that the ranks have to send at
least. With more ranks than cores, all times are CPU time of the whole machine, and the network's own latency
hardly counts.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from shoal import ProcessGroup
from shoal.testing import Network
from shoal.testing.network import why_unavailable
from shoal.testing.processes import run_processes

ROOT = Path(__file__).resolve().parent.parent
ALGORITHMS = ("direct", "doubling", "halving", "ring", "auto")
GLOO = "gloo"
SIZES = (8, 4 << 10, 32 << 10, 256 << 10, 1 << 20)
#: seconds for all rounds of one number of hosts
_PATIENCE_S = 1200.0

#: a contender's operation on prepared tensors
_Work = Callable[[], Any]
#: by size and contender: for each round, the seconds of the slowest rank, and the CPU seconds of all together
_Times = dict[int, dict[str, dict[str, list[float]]]]


def measure(group: ProcessGroup, operation: str, sizes: list[int], rounds: int, with_gloo: bool) -> _Times:
    """Measure with all ranks; the same result on each."""
    torch.set_num_threads(1)
    groups: dict[str, Any] = {name: group.split(0, algorithm=name) for name in ALGORITHMS}
    if with_gloo:
        groups[GLOO] = _gloo(group)
    found: _Times = {}
    for size in sizes:
        works = {name: _work(each, operation, size, group.size) for name, each in groups.items()}
        repeat = 3
        for work in works.values():
            began = time.perf_counter()
            for _ in range(repeat):
                work()
            took = torch.tensor([(time.perf_counter() - began) / repeat])
            group.all_reduce(took, "max").wait()
        repeat = max(1, min(50, int(0.05 / max(took.item(), 1e-6))))
        times: dict[str, dict[str, list[float]]] = {name: {"seconds": [], "cpu": []} for name in works}
        for number in range(rounds):
            order = list(works)
            for name in order[number % len(order) :] + order[: number % len(order)]:
                group.barrier().wait()
                began, cpu_began = time.perf_counter(), time.process_time()
                for _ in range(repeat):
                    works[name]()
                spent = torch.tensor([(time.perf_counter() - began) / repeat], dtype=torch.float64)
                cpu = torch.tensor([(time.process_time() - cpu_began) / repeat], dtype=torch.float64)
                group.all_reduce(spent, "max").wait()
                group.all_reduce(cpu).wait()
                times[name]["seconds"].append(spent.item())
                times[name]["cpu"].append(cpu.item())
        found[size] = times
    if with_gloo:
        dist.destroy_process_group()
    return found


def _gloo(group: ProcessGroup) -> Any:
    """Make a group of Gloo at the addresses of the simulated hosts."""
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    limit = timedelta(seconds=_PATIENCE_S)
    store = None
    if group.rank == 0:
        address = os.environ["BENCHMARK_ADDRESS"]
        store = dist.TCPStore(address, 0, group.size, is_master=True, timeout=limit, wait_for_workers=False)
        group.store.set("gloo", f"{address} {store.port}".encode())
    address, port = group.store.get("gloo").decode().split()
    store = store or dist.TCPStore(address, int(port), group.size, timeout=limit)
    dist.init_process_group("gloo", store=store, rank=group.rank, world_size=group.size, timeout=limit)
    return dist.group.WORLD


def _work(group: Any, operation: str, size: int, ranks: int) -> _Work:
    """Prepare an operation; ``size``: bytes of the tensor, or of all parts together."""
    count = size // 4
    part = max(count // ranks, 1)
    whole = torch.ones(part * ranks if operation in ("all_gather", "reduce_scatter") else count)
    small = torch.ones(part)
    if not isinstance(group, ProcessGroup):
        return {
            "all_reduce": lambda: dist.all_reduce(whole),
            "reduce": lambda: dist.reduce(whole, 0),
            "broadcast": lambda: dist.broadcast(whole, 0),
            "all_gather": lambda: dist.all_gather_into_tensor(whole, small),
            "reduce_scatter": lambda: dist.reduce_scatter_tensor(small, whole),
        }[operation]
    parts = list(whole.chunk(ranks))
    return {
        "all_reduce": lambda: group.all_reduce(whole).wait(),
        "reduce": lambda: group.reduce(whole, 0).wait(),
        "broadcast": lambda: group.broadcast(whole, 0).wait(),
        "all_gather": lambda: group.all_gather(parts, small).wait(),
        "reduce_scatter": lambda: group.reduce_scatter(small, parts).wait(),
    }[operation]


def run(hosts: int, ranks: int, arguments: argparse.Namespace) -> _Times:
    """Measure on ``hosts`` simulated hosts with ``ranks`` ranks each."""
    names = [f"h{number}" for number in range(hosts)]
    with Network(*names) as network:
        if arguments.megabits or arguments.delay:
            network.shape(megabits=arguments.megabits, delay_us=arguments.delay)
        places = [name for name in names for _ in range(ranks)]
        found: _Times = run_processes(
            measure, len(places), arguments.operation, arguments.sizes, arguments.rounds, arguments.gloo,
            hosts=places, network=network, timeout=_PATIENCE_S,
            env={"BENCHMARK_ADDRESS": network.address(names[0]), "OMP_NUM_THREADS": "1"},
        )[0]  # fmt: skip
    return found


def show(found: _Times, ranks: int, operation: str, title: str, console: Console) -> None:
    table = Table(
        "bytes", "direct", *(f"{name} / direct" for name in next(iter(found.values())) if name != "direct")
    )
    table.title = title
    for size, times in found.items():
        base = times["direct"]
        sent = max((2 if operation == "all_reduce" else 1) * (ranks - 1) * size, 1)
        first = (
            f"{statistics.median(base['seconds']) * 1e6:,.0f} us "
            f"({statistics.median(base['cpu']) * 1e9 / sent:,.2f} ns/B)"
        )
        cells = [
            f"{_ratio(each, base, 'seconds'):.2f} ({_ratio(each, base, 'cpu'):.2f})"
            for name, each in times.items()
            if name != "direct"
        ]
        table.add_row(f"{size:,}", first, *cells)
    console.print(table)


def _ratio(times: dict[str, list[float]], base: dict[str, list[float]], kind: str) -> float:
    return statistics.median(a / b for a, b in zip(times[kind], base[kind], strict=True))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hosts", type=int, nargs="+", default=[4, 8, 16])
    parser.add_argument("--ranks", type=int, default=1, help="ranks on each host")
    operations = ["all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter"]
    parser.add_argument("--operation", default="all_reduce", choices=operations)
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), help="bytes")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--megabits", type=float, help="rate of each host in Mbit/s")
    parser.add_argument("--delay", type=float, default=0.0, help="delay of each packet in us")
    parser.add_argument("--no-gloo", dest="gloo", action="store_false")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "hosts.json")
    arguments = parser.parse_args()
    if why := why_unavailable():
        print(why, file=sys.stderr)
        return 1
    console = Console()
    record: dict[str, Any] = {
        "operation": arguments.operation, "megabits": arguments.megabits, "delay_us": arguments.delay,
        "cores": os.cpu_count(), "results": {},
    }  # fmt: skip
    link = f"{arguments.megabits:g} Mbit/s" if arguments.megabits else "no limit"
    for hosts in arguments.hosts:
        found = run(hosts, arguments.ranks, arguments)
        title = (
            f"{arguments.operation}, {hosts} hosts of {arguments.ranks}, {link}, delay {arguments.delay:g} us"
        )
        show(found, hosts * arguments.ranks, arguments.operation, title, console)
        record["results"][f"{hosts}x{arguments.ranks}"] = found
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(record, indent=1) + "\n")
    console.print(f"wrote {arguments.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
