"""What a call costs: shoal.rpc beside torch.distributed.rpc, in turns, between two processes of this machine.

    python benchmarks/rpc.py --rounds 3 --out rpc.json

In each round each of the two starts two fresh processes, one of which calls a function of the other that does
nothing: call after call (the median time of one), and many at once (how many come back in a second).  Its
results and the ratios of their medians go to standard output and, with --out, as JSON into a file.  Figures
of one machine say little about another; run it where nothing else runs.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.rpc as torch_rpc
import torch.multiprocessing as mp

import shoal

LIBRARIES = ("shoal", "torch")


def nothing() -> None:
    """The function that is called."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3, help="how often each library's turn comes (3)")
    parser.add_argument("--calls", type=int, default=2000, help="calls one after another (2000)")
    parser.add_argument("--pipelined", type=int, default=10000, help="calls at once, all together (10000)")
    parser.add_argument("--window", type=int, default=500, help="of these, pending at a time (500)")
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    options = parser.parse_args()
    rounds: dict[str, list[dict[str, float]]] = {library: [] for library in LIBRARIES}
    for _ in range(options.rounds):
        for library in LIBRARIES:
            rounds[library].append(one_round(library, options))
            print(f"{library:5}", *(f"{name} {value:.1f}" for name, value in rounds[library][-1].items()))
    medians, ratios = summary(rounds)
    print("shoal / torch", *(f"{name} {value:.2f}" for name, value in ratios.items()))
    if options.out is not None:
        settings = {
            "versions": {"shoal": shoal.__version__, "torch": torch.__version__},
            "python": platform.python_version(),
            "cores": len(os.sched_getaffinity(0)),
            "calls": options.calls,
            "pipelined": options.pipelined,
            "window": options.window,
        }
        result = {"settings": settings, "rounds": rounds, "medians": medians, "shoal / torch": ratios}
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


def summary(
    rounds: dict[str, list[dict[str, float]]],
) -> tuple[dict[str, dict[str, float]], dict[str, float]]:
    """The medians of each library's rounds, and shoal's divided by torch's."""
    medians = {
        library: {name: statistics.median(each[name] for each in figures) for name in figures[0]}
        for library, figures in rounds.items()
    }
    return medians, {name: value / medians["torch"][name] for name, value in medians["shoal"].items()}


def one_round(library: str, options: argparse.Namespace) -> dict[str, float]:
    """The figures of one library between two processes."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "figures.json"
        place = f"file://{folder}/store" if library == "shoal" else f"tcp://127.0.0.1:{free_port()}"
        work = (options.calls, options.pipelined, options.window)
        mp.spawn(rank, args=(library, place, work, str(out)), nprocs=2)  # type: ignore[no-untyped-call]
        figures: dict[str, float] = json.loads(out.read_text())
        return figures


def rank(number: int, library: str, place: str, work: tuple[int, int, int], out: str) -> None:
    """Be one of the two processes; the first one calls."""
    torch.set_num_threads(1)
    (over_shoal if library == "shoal" else over_torch)(number, place, work, out)


def over_shoal(number: int, place: str, work: tuple[int, int, int], out: str) -> None:
    with shoal.rpc.join(f"w{number}", url=place) as agent:
        if number == 0:
            peer = agent.peer("w1")
            measure(lambda: peer.call(nothing), *work, out)
        agent.barrier(["w0", "w1"])


def over_torch(number: int, place: str, work: tuple[int, int, int], out: str) -> None:
    warnings.simplefilter("ignore", UserWarning)  # of torch about itself
    torch_rpc.init_rpc(
        f"w{number}",
        rank=number,
        world_size=2,
        rpc_backend_options=torch_rpc.TensorPipeRpcBackendOptions(init_method=place),
    )
    if number == 0:
        measure(lambda: torch_rpc.rpc_async("w1", nothing), *work, out)
    torch_rpc.shutdown()  # type: ignore[no-untyped-call]


def measure(call: Callable[[], Any], calls: int, pipelined: int, window: int, out: str) -> None:
    """Time one call after another, then many at once."""
    for _ in range(200):
        call().wait()
    times = []
    for _ in range(calls):
        begin = time.perf_counter()
        call().wait()
        times.append(time.perf_counter() - begin)
    begin = time.perf_counter()
    pending = [call() for _ in range(window)]
    for index in range(pipelined - window):
        pending[index % window].wait()
        pending[index % window] = call()
    for future in pending:
        future.wait()
    seconds = time.perf_counter() - begin
    figures = {
        "one call [us, p50]": statistics.median(times) * 1e6,
        "one call [us, p95]": statistics.quantiles(times, n=20)[-1] * 1e6,
        "at once [calls/s]": pipelined / seconds,
    }
    Path(out).write_text(json.dumps(figures))


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


if __name__ == "__main__":
    sys.exit(main())
