"""Measure the cost of operations in the master-worker mode, compared with local torch and other libraries.

    python benchmarks/controller.py --rounds 3 --out controller.json --picture controller.png
    python benchmarks/controller.py --ray envs/ray/bin/python --monarch envs/monarch/bin/python

In each round every library has a turn in new processes. controller_figures.py has a function for each row.
``local`` is torch in the same process, where a copy of 64 MB is one memcpy. ``ranks`` is a program of four
ranks without a master, for the collectives. Ray and Monarch do the same with actors, in separate environments
(with torch), only if those are given. In the last round a million operations, --soak, must leave nothing
behind.

Prints the figures, their medians and the ratios to their bars; --out writes them as JSON, --picture plots the
medians. Run it on an otherwise idle machine; figures are not comparable between machines.
"""

from __future__ import annotations

import dataclasses
import sys

from contest import Bar, Figures, actors, conclude, in_turns, options, turn_of
from controller_figures import ADD, ADD_TEAM, BACK_MS, BETWEEN_MS, DIGITS_MS, FETCH, LARGE_MS, REPLAY, Work

BARS = (
    Bar("shoal", ADD, least=25_000),
    Bar("shoal", ADD_TEAM, least=15_000),
    Bar("shoal", REPLAY, least=100_000),
    Bar("shoal", f"{FETCH} [us, p50]", 80),
    Bar("shoal", LARGE_MS, 1 / 0.8, of=("local", LARGE_MS)),
    Bar("shoal", BACK_MS, 1.5, of=("local", BACK_MS)),
    Bar("shoal", BETWEEN_MS, 1.5, of=("local", BETWEEN_MS)),
    Bar("shoal", DIGITS_MS, 1.3, of=("ranks", DIGITS_MS)),
)
SCRIPT = "controller_turns.py"


def main() -> int:
    texts = {
        "operations": "operations of 20 x 20",
        "fetches": "numbers to fetch",
        "steps": "training steps",
        "large": "copies of 64 MB, and averages of 20 MB",
        "soak": "operations after which memory may not have grown, 0: none",
    }
    given, work = options(__doc__, Work(), texts)
    pythons = {"shoal": sys.executable, "local": sys.executable, "ranks": sys.executable, **actors(given)}

    def turn(name: str, number: int) -> Figures:
        last = number == given.rounds - 1  # the soak runs once
        return turn_of(SCRIPT, name, pythons[name], work if last else dataclasses.replace(work, soak=0))

    rounds = in_turns(given.rounds, {name: lambda number, name=name: turn(name, number) for name in pythons})
    conclude(given, work, rounds, BARS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
