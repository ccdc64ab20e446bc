"""Measure the cost of calls: shoal.rpc and torch.distributed.rpc, in turns on one machine.

    python benchmarks/rpc.py --rounds 3 --out rpc.json --picture rpc.png
    python benchmarks/rpc.py --ray envs/ray/bin/python --monarch envs/monarch/bin/python

In each round every library has a turn with two new processes, one of which calls functions of the other: an
empty one and one that returns a tensor of 20 x 20, call after call; many calls at once, from one thread and
from four; and one that takes 64 MB. ``shoal tcp`` and ``torch tcp`` do not use what only processes of one
host have. ``floor`` sends the same bytes through bare sockets and memory (see rpc_floor.py). The actor
libraries Ray and Monarch run in separate environments (with torch), only if those are given.

Prints the figures, the ratios of shoal's medians to torch's, and the ratios to the bars; --out writes them as
JSON, --picture plots them. Run it on an otherwise idle machine; figures are not comparable between machines.
"""

from __future__ import annotations

import json
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.rpc as torch_rpc
import torch.multiprocessing as mp
from contest import Bar, Figures, actors, conclude, in_turns, medians_of, options, turn_of
from rpc_figures import LARGE, SMALL, Library, Work, measure
from rpc_floor import floor

import shoal

#: row of shoal -> row of torch that it is divided by
AGAINST = {"shoal": "torch", "shoal tcp": "torch tcp"}

_NO_OP, _ECHO, _LARGE = "no-op [us, p50]", "echo 20x20 [us, p50]", "64 MB [ms]"
#: 64 MB must move at 0.8 of the speed of a raw loop (TCP) or of a memcpy (one host)
BARS = (
    Bar("shoal", _NO_OP, 100),
    Bar("shoal", _NO_OP, 0.5, of=("torch", _NO_OP)),
    Bar("shoal", _ECHO, 0.5, of=("torch", _ECHO)),
    Bar("shoal", "1 caller [calls/s]", least=20_000),
    Bar("shoal", "4 callers [calls/s]", least=25_000),
    Bar("shoal", _LARGE, 1 / 0.8, of=("floor", "64 MB to shared memory, warm [ms]")),
    Bar("shoal tcp", _NO_OP, 150),
    Bar("shoal tcp", _NO_OP, 0.5, of=("torch tcp", _NO_OP)),
    Bar("shoal tcp", _ECHO, 0.5, of=("torch tcp", _ECHO)),
    Bar("shoal tcp", _LARGE, 1 / 0.8, of=("floor", "64 MB over tcp, warm [ms]")),
    Bar("shoal tcp", _LARGE, 1 / 0.8, of=("floor", "64 MB over tcp, fresh [ms]")),
)


def nothing() -> None:
    """The empty function."""


def echo(x: torch.Tensor) -> torch.Tensor:
    return x


def elements(x: torch.Tensor) -> int:
    return x.numel()


def main() -> int:
    texts = {
        "calls": "calls one after another",
        "pipelined": "calls at once, all together",
        "window": "pending calls at a time, for pipelined calls",
        "large": "calls with 64 MB",
    }
    given, work = options(__doc__, Work(), texts)
    contenders: dict[str, Callable[[int], Figures]] = {
        name: lambda _, name=name: between_processes(name, work) for name in OVER
    }
    for name, python in actors(given).items():
        contenders[name] = lambda _, name=name, python=python: turn_of("rpc_actors.py", name, python, work)
    rounds = in_turns(given.rounds, contenders)
    ratios = to_torch(medians_of(rounds))
    for name, figures in ratios.items():
        print(
            f"{name} / {AGAINST[name]}:",
            *(f"{what} {value:.2f}" for what, value in figures.items()),
            sep="  ",
        )
    conclude(given, work, rounds, BARS, {"ratios to torch": ratios})
    return 0


def to_torch(medians: Mapping[str, Figures]) -> dict[str, Figures]:
    return {
        name: {what: value / medians[other][what] for what, value in medians[name].items()}
        for name, other in AGAINST.items()
        if name in medians and other in medians
    }


# -- between two processes ----------------------------------------------------------------------


def between_processes(name: str, work: Work) -> Figures:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "figures.json"
        mp.spawn(rank, args=(name, folder, work, str(out)), nprocs=2)  # type: ignore[no-untyped-call]
        figures: Figures = json.loads(out.read_text())
        return figures


def rank(number: int, name: str, folder: str, work: Work, out: str) -> None:
    """Main function of the two processes; the first one calls."""
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
    warnings.simplefilter("ignore", UserWarning)  # torch's warnings about its own code
    options = torch_rpc.TensorPipeRpcBackendOptions(init_method=f"file://{folder}/store", **how)
    torch_rpc.init_rpc(f"w{number}", rank=number, world_size=2, rpc_backend_options=options)
    if number == 0:
        write(lambda fn, *args: torch_rpc.rpc_async("w1", fn, args=args).wait, work, out)
    torch_rpc.shutdown()  # type: ignore[no-untyped-call]


def over_torch_tcp(number: int, folder: str, work: Work, out: str) -> None:
    over_torch(number, folder, work, out, _transports=["uv"], _channels=["basic"])


def write(begin: Callable[..., Callable[[], Any]], work: Work, out: str) -> None:
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


if __name__ == "__main__":
    sys.exit(main())
