"""This benchmark measures what an operation of the master-worker mode costs, beside local torch and peers.

    python benchmarks/controller.py --rounds 3 --out controller.json --picture controller.png
    python benchmarks/controller.py --ray envs/ray/bin/python --monarch envs/monarch/bin/python

In each round every library has its turn in processes of its own.  What is timed stands in
controller_figures.py, a function for each row.  ``local`` is torch in the same process: its copies of 64 MB
are one memcpy.  ``ranks`` is a program of four ranks without a master, for the collectives.  Ray and Monarch
do the same by actors, in environments of their own, which need torch too, and only if those are named.  In
the last round a million operations, --soak, must leave nothing behind.

The figures, their medians, and how many times each is as good as its bar go to standard output and, with
--out, as JSON into a file; --picture draws the medians.  Figures of one machine say little about another; run
it where nothing else runs.
"""

from __future__ import annotations

import dataclasses
import sys

from contest import Bar, Figures, actors, conclude, in_turns, options, turn_of
from controller_figures import ADD, ADD_TEAM, DIGITS_MS, FETCH, LARGE_MS, REPLAY, Work

BARS = (
    Bar("shoal", ADD, least=25_000),
    Bar("shoal", ADD_TEAM, least=15_000),
    Bar("shoal", REPLAY, least=100_000),
    Bar("shoal", f"{FETCH} [us, p50]", 100),
    Bar("shoal", LARGE_MS, 1 / 0.8, of=("local", LARGE_MS)),
    Bar("shoal", DIGITS_MS, 1.3, of=("ranks", DIGITS_MS)),
)
SCRIPT = "controller_turns.py"


def main() -> int:
    texts = {
        "operations": "operations of 20 x 20",
        "fetches": "numbers that are fetched",
        "steps": "training steps",
        "large": "copies of 64 MB, and averages of 20 MB",
        "soak": "operations after which nothing may have grown, 0: none",
    }
    given, work = options(__doc__, Work(), texts)
    pythons = {"shoal": sys.executable, "local": sys.executable, "ranks": sys.executable, **actors(given)}

    def turn(name: str, number: int) -> Figures:
        last = number == given.rounds - 1  # what a million operations leave is looked at once
        return turn_of(SCRIPT, name, pythons[name], work if last else dataclasses.replace(work, soak=0))

    rounds = in_turns(given.rounds, {name: lambda number, name=name: turn(name, number) for name in pythons})
    conclude(given, work, rounds, BARS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
