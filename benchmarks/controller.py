"""This benchmark measures what an operation of the master-worker mode costs, beside local torch and peers.

    python benchmarks/controller.py --rounds 3 --out controller.json --picture controller.png
    python benchmarks/controller.py --ray envs/ray/bin/python --monarch envs/monarch/bin/python

In each round every library has its turn in a process of its own: x + y of 20 x 20, issued one after another
and waited for at the end, on one node and on a place of four; a number fetched from an idle node; training
steps of a small network; and 64 MB brought to a node.  ``local`` is torch in the same process: its 64 MB are
one memcpy.  Ray and Monarch do the same by actors, in environments of their own, which need torch too, and
only if those are named.  Afterwards a million operations, --soak, must leave nothing behind.

The figures, their medians, and how many times each is as good as its bar go to standard output and, with
--out, as JSON into a file; --picture draws the medians.  Figures of one machine say little about another; run
it where nothing else runs.
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
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from controller_figures import ADD, ADD_TEAM, FETCH, LARGE_MS, REPLAY, Figures, Work
from panels import draw
from rpc_bars import Bar, against_bars

import shoal

PEERS = ("ray", "monarch")
BARS = (
    Bar("shoal", ADD, least=25_000),
    Bar("shoal", ADD_TEAM, least=15_000),
    Bar("shoal", REPLAY, least=100_000),
    Bar("shoal", f"{FETCH} [us, p50]", 100),
    Bar("shoal", LARGE_MS, 1 / 0.8, of=("local", LARGE_MS)),
)


def main() -> int:
    defaults = Work()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3, help="how often each library's turn comes (3)")
    for field, text in (
        ("operations", "operations of 20 x 20"),
        ("fetches", "numbers that are fetched"),
        ("steps", "training steps"),
        ("large", "copies of 64 MB"),
        ("soak", "operations after which nothing may have grown, 0: none"),
    ):
        default = getattr(defaults, field)
        parser.add_argument(f"--{field}", type=int, default=default, help=f"{text} ({default:,})")
    parser.add_argument("--ray", help="the Python of an environment that has Ray and torch")
    parser.add_argument("--monarch", help="the Python of an environment that has torchmonarch and torch")
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    parser.add_argument("--picture", type=Path, help="PNG file for a picture of the medians")
    options = parser.parse_args()
    work = Work(options.operations, options.fetches, options.steps, options.large, options.soak)
    pythons = {"shoal": sys.executable, "local": sys.executable}
    for name in PEERS:
        if python := getattr(options, name):
            pythons[name] = python
        else:
            print(f"{name}: left out, as --{name} names no environment that has it")
    rounds: dict[str, list[Figures]] = {name: [] for name in pythons}
    for number in range(options.rounds):
        for name, python in pythons.items():
            last = number == options.rounds - 1  # what a million operations leave is looked at once
            rounds[name].append(turn(name, python, work if last else dataclasses.replace(work, soak=0)))
            print(f"{name:8}", *(f"{what} {value:.4g}" for what, value in rounds[name][-1].items()), sep="  ")
    medians = medians_of(rounds)
    bars = against_bars(medians, BARS)
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
            "times as good as the bars": bars,
        }
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    if options.picture is not None:
        draw(medians, options.picture)
    return 0


def turn(name: str, python: str, work: Work) -> Figures:
    """One turn of one library."""
    script = Path(__file__).with_name("controller_turns.py")
    words = json.dumps(dataclasses.asdict(work))
    done = subprocess.run([python, str(script), name, words], stdout=subprocess.PIPE, text=True, check=True)
    figures: Figures = json.loads(done.stdout.splitlines()[-1])
    return figures


def medians_of(rounds: Mapping[str, Sequence[Figures]]) -> dict[str, Figures]:
    """The medians of each library's figures, over the rounds that have them."""
    return {
        name: {
            what: statistics.median(each[what] for each in figures if what in each) for what in figures[-1]
        }
        for name, figures in rounds.items()
    }


if __name__ == "__main__":
    sys.exit(main())
