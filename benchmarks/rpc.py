"""This benchmark measures what a call costs: shoal.rpc beside torch.distributed.rpc, in turns on one machine.

    python benchmarks/rpc.py --rounds 3 --out rpc.json --picture rpc.png
    python benchmarks/rpc.py --ray envs/ray/bin/python --monarch envs/monarch/bin/python

In each round every library has its turn between two fresh processes, one of which calls functions of the
other: one that does nothing and one that returns a tensor of 20 x 20, call after call; many calls at once, of
one thread and of four; and one that takes 64 MB.  ``shoal tcp`` and ``torch tcp`` are kept from what only
processes of one host have.  ``floor`` sends the same bytes through bare sockets and memory: rpc_floor.py says
how.  Ray and Monarch, actors both, run in environments of their own, which need torch too, and only if those
are named.

The figures, the ratios of shoal's medians to torch's, and how many times each is as good as its bar
(rpc_bars.py) go to standard output and, with --out, as JSON into a file; --picture draws the figures.
Figures of one machine say little about another; run it where nothing else runs.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.rpc as torch_rpc
import torch.multiprocessing as mp
from panels import draw
from rpc_bars import against_bars
from rpc_figures import LARGE, SMALL, Library, Work, measure
from rpc_floor import floor

import shoal

#: each of shoal's rows, and the row of torch that it is divided by
AGAINST = {"shoal": "torch", "shoal tcp": "torch tcp"}
ACTORS = ("ray", "monarch")

Figures = dict[str, float]


def nothing() -> None:
    """The function that is called."""


def echo(x: torch.Tensor) -> torch.Tensor:
    return x


def elements(x: torch.Tensor) -> int:
    return x.numel()


def main() -> int:
    defaults = Work()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3, help="how often each library's turn comes (3)")
    for field, text in (
        ("calls", "calls one after another"),
        ("pipelined", "calls at once, all together"),
        ("window", "of these, pending at a time"),
        ("large", "calls with 64 MB"),
    ):
        default = getattr(defaults, field)
        parser.add_argument(f"--{field}", type=int, default=default, help=f"{text} ({default})")
    parser.add_argument("--ray", help="the Python of an environment that has Ray and torch")
    parser.add_argument("--monarch", help="the Python of an environment that has torchmonarch and torch")
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    parser.add_argument("--picture", type=Path, help="PNG file for a picture of the medians")
    options = parser.parse_args()
    work = Work(options.calls, options.pipelined, options.window, options.large)
    contenders: dict[str, Callable[[], Figures]] = {
        name: lambda name=name: between_processes(name, work) for name in OVER
    }
    for name in ACTORS:
        if python := getattr(options, name):
            contenders[name] = lambda name=name, python=python: of_actors(name, python, work)
        else:
            print(f"{name}: left out, as --{name} names no environment that has it")
    rounds: dict[str, list[Figures]] = {name: [] for name in contenders}
    for _ in range(options.rounds):
        for name, take_turn in contenders.items():
            rounds[name].append(take_turn())
            print(
                f"{name:10}", *(f"{what} {value:.4g}" for what, value in rounds[name][-1].items()), sep="  "
            )
    medians, ratios = summary(rounds)
    for name, figures in ratios.items():
        print(
            f"{name} / {AGAINST[name]}:",
            *(f"{what} {value:.2f}" for what, value in figures.items()),
            sep="  ",
        )
    bars = against_bars(medians)
    for bar, ratio in bars.items():
        print(f"{bar}: {ratio:.2f} {'met' if ratio >= 1 else 'MISSED'}")
    if options.out is not None:
        settings = {
            "versions": {"shoal": shoal.__version__, "torch": torch.__version__},
            "python": platform.python_version(),
            "cores": len(os.sched_getaffinity(0)),
            **dataclasses.asdict(work),
        }
        result = {
            "settings": settings,
            "rounds": rounds,
            "medians": medians,
            "ratios to torch": ratios,
            "times as good as the bars": bars,
        }
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    if options.picture is not None:
        draw(medians, options.picture)
    return 0


def summary(rounds: Mapping[str, Sequence[Figures]]) -> tuple[dict[str, Figures], dict[str, Figures]]:
    """The medians of each library's rounds, and those of shoal divided by those of torch."""
    medians = {
        name: {what: statistics.median(each[what] for each in figures) for what in figures[0]}
        for name, figures in rounds.items()
    }
    ratios = {
        name: {what: value / medians[other][what] for what, value in medians[name].items()}
        for name, other in AGAINST.items()
        if name in medians and other in medians
    }
    return medians, ratios


# -- between two processes ----------------------------------------------------------------------


def between_processes(name: str, work: Work) -> Figures:
    """One turn of one library."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "figures.json"
        mp.spawn(rank, args=(name, folder, work, str(out)), nprocs=2)  # type: ignore[no-untyped-call]
        figures: Figures = json.loads(out.read_text())
        return figures


def rank(number: int, name: str, folder: str, work: Work, out: str) -> None:
    """Be one of the two processes; the first one calls."""
    torch.set_num_threads(1)
    OVER[name](number, folder, work, out)


def over_shoal(number: int, folder: str, work: Work, out: str, **join: Any) -> None:
    with shoal.rpc.join(f"w{number}", url=f"file://{folder}/store", **join) as agent:
        if number == 0:
            peer = agent.peer("w1")
            write(lambda fn, *args: peer.call(fn, *args).wait, work, out)
        agent.barrier(["w0", "w1"])


def over_shoal_tcp(number: int, folder: str, work: Work, out: str) -> None:
    over_shoal(number, folder, work, out, host_id=f"host {number}", secret="of this benchmark")


def over_torch(number: int, folder: str, work: Work, out: str, **how: Any) -> None:
    warnings.simplefilter("ignore", UserWarning)  # of torch about itself
    options = torch_rpc.TensorPipeRpcBackendOptions(init_method=f"file://{folder}/store", **how)
    torch_rpc.init_rpc(f"w{number}", rank=number, world_size=2, rpc_backend_options=options)
    if number == 0:
        write(lambda fn, *args: torch_rpc.rpc_async("w1", fn, args=args).wait, work, out)
    torch_rpc.shutdown()  # type: ignore[no-untyped-call]


def over_torch_tcp(number: int, folder: str, work: Work, out: str) -> None:
    over_torch(number, folder, work, out, _transports=["uv"], _channels=["basic"])


def write(begin: Callable[..., Callable[[], Any]], work: Work, out: str) -> None:
    """Measure and leave the figures in a file."""
    small, large = torch.randn(SMALL), torch.zeros(LARGE // 4)
    library = Library(lambda: begin(nothing), lambda: begin(echo, small), lambda: begin(elements, large))
    Path(out).write_text(json.dumps(measure(library, work)))


def bare_sockets(number: int, folder: str, work: Work, out: str) -> None:
    figures = floor(number, Path(folder), work)
    if number == 0:
        Path(out).write_text(json.dumps(figures))


OVER: dict[str, Callable[[int, str, Work, str], None]] = {
    "shoal": over_shoal,
    "torch": over_torch,
    "shoal tcp": over_shoal_tcp,
    "torch tcp": over_torch_tcp,
    "floor": bare_sockets,
}


# -- actors -------------------------------------------------------------------------------------


def of_actors(name: str, python: str, work: Work) -> Figures:
    """One turn of a library that has an environment of its own."""
    script = Path(__file__).with_name("rpc_actors.py")
    words = json.dumps(dataclasses.asdict(work))
    done = subprocess.run([python, str(script), name, words], stdout=subprocess.PIPE, text=True, check=True)
    figures: Figures = json.loads(done.stdout.splitlines()[-1])
    return figures


if __name__ == "__main__":
    sys.exit(main())
