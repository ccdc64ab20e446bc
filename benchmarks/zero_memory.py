"""Measure the memory of an optimizer's state on each rank, with and without distribution.

    python benchmarks/zero_memory.py
    python benchmarks/zero_memory.py --ranks 1 2 --optimizer SGD

Processes started by ``shoal run`` hold a transformer of 20 million parameters, with gradients. *state* is the
size of the optimizer's tensors. *RSS* is the growth of the process, including shared memory, from the
creation of the optimizer until after its second step; each kind of optimizer is measured in new processes.
Both are the maximum over the ranks. *step* is the median time of a step, with the two kinds taking turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import shoal
from shoal.tools.signals import cleaning_up

STEPS = 15
KINDS = ("alone", "distributed")


@dataclass(frozen=True)
class Measured:
    state: int  #: bytes
    rss: int  #: bytes
    seconds: dict[str, list[float]]  #: seconds of each step, by kind


def transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True)
    return nn.ModuleList(
        [nn.Embedding(2048, 512), nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)]
    )


def with_gradients(model: nn.Module) -> list[nn.Parameter]:
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1e-3)
    return list(model.parameters())


def make(
    group: shoal.ProcessGroup, name: str, kind: str, parameters: Sequence[nn.Parameter]
) -> torch.optim.Optimizer:
    optimizer_class = getattr(torch.optim, name)
    options = {"lr": 1e-3, **({"momentum": 0.9} if name == "SGD" else {})}
    if kind == "alone":
        optimizer: torch.optim.Optimizer = optimizer_class(parameters, **options)
        return optimizer
    return shoal.ZeroRedundancyOptimizer(parameters, optimizer_class, group=group, **options)


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    tensors = [value for state in optimizer.state.values() for value in state.values()]
    return sum(tensor.nbytes for tensor in tensors if isinstance(tensor, torch.Tensor))


def measure(group: shoal.ProcessGroup, name: str, kind: str) -> Measured:
    """Measure one kind's memory on this rank, then the times of both kinds."""
    make(
        group, name, "alone", with_gradients(nn.Linear(1, 1))
    ).step()  # torch imports many modules in its first step
    parameters = with_gradients(transformer())
    process = psutil.Process()
    before = process.memory_info().rss
    optimizer = make(group, name, kind, parameters)
    for _ in range(2):
        optimizer.step()
    rss = process.memory_info().rss - before
    (other,) = set(KINDS) - {kind}
    both = {kind: optimizer, other: make(group, name, other, with_gradients(transformer()))}
    both[other].step()
    seconds: dict[str, list[float]] = {one: [] for one in KINDS}
    for _ in range(STEPS):
        for one in KINDS:
            group.barrier().wait()
            start = time.perf_counter()
            both[one].step()
            group.barrier().wait()
            seconds[one].append(time.perf_counter() - start)
    return Measured(state_bytes(optimizer), rss, seconds)


def rank(name: str, kind: str, to: Path) -> None:
    """Main function of each process; rank 0 writes the results of all to a file."""
    torch.set_num_threads(1)
    with shoal.init() as group:
        everything = group.gather_object(asdict(measure(group, name, kind)), root=0).wait()
        if everything is not None:
            to.write_text(json.dumps(everything))


def run(ranks: int, name: str, kind: str) -> list[Measured]:
    with tempfile.TemporaryDirectory() as folder:
        to = Path(folder) / "results.json"
        command = [sys.executable, "-m", "shoal", "run", "-n", str(ranks), __file__]
        command += ["--optimizer", name, "--rank-of", kind, "--write", str(to)]
        subprocess.run(command, check=True, timeout=600)
        return [Measured(**result) for result in json.loads(to.read_text())]


def main() -> None:
    parser = argparse.ArgumentParser(description="Memory of an optimizer's state on each rank.")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--optimizer", default="Adam", help="a name in torch.optim")
    parser.add_argument("--rank-of", choices=KINDS, help=argparse.SUPPRESS)
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_of is not None:
        rank(options.optimizer, options.rank_of, options.write)
        return

    table = Table(title=f"torch's {options.optimizer} on every rank, and distributed")
    for column in ("ranks", "optimiser", "state MB", "RSS MB", "step ms"):
        table.add_column(column, justify="left" if column == "optimiser" else "right")
    for ranks in options.ranks:
        results = {kind: run(ranks, options.optimizer, kind) for kind in KINDS}
        for kind in KINDS:
            steps = [s for found in results.values() for one in found for s in one.seconds[kind]]
            table.add_row(
                str(ranks),
                kind,
                f"{max(one.state for one in results[kind]) / 1e6:.1f}",
                f"{max(one.rss for one in results[kind]) / 1e6:.1f}",
                f"{1e3 * statistics.median(steps):.1f}",
            )
    count = sum(parameter.numel() for parameter in transformer().parameters())
    table.caption = f"{count:,} parameters in single precision, {4 * count / 1e6:.1f} MB"
    Console(width=80).print(table)


if __name__ == "__main__":
    with cleaning_up():
        main()
