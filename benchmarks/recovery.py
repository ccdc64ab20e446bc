"""Measure recovery after a death: from SIGKILL to the first all-reduce of the rebuilt group.

    python benchmarks/recovery.py
    python benchmarks/recovery.py --trials 1000 --ranks 2 4 --resident 0
    python benchmarks/recovery.py --json recovery.json

Ranks are processes that all-reduce in a loop. At a random moment one kills itself; the others raise PeerLost,
rebuild the group and all-reduce in it. ``detected`` is the time from the kill to PeerLost, ``gone on`` the
time to the end of that all-reduce, both on the slowest rank. Each rank allocates ``--resident`` MB, which the
kernel frees before it closes the sockets of the dead process.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

import shoal
from shoal.testing import processes

#: maximum seconds of a trial
PATIENCE = 120.0
#: maximum seconds before the kill
BEFORE = 0.02
_KILLED = "killed at"


@dataclass(frozen=True)
class Case:
    """Times for groups of one size, in milliseconds; `bad` counts failed recoveries and wrong sums."""

    ranks: int
    resident: int
    trials: int
    bad: int
    detected: dict[str, float]
    gone_on: dict[str, float]


def survive(group: shoal.ProcessGroup, seed: int, resident: int) -> tuple[float, float]:
    """All-reduce until a rank is killed, and once in the rebuilt group; return seconds since the kill."""
    held = torch.ones(resident * 2**18)
    choose = random.Random(seed)
    victim, delay = choose.randrange(group.size), choose.uniform(0.0, BEFORE)
    store = group.store
    x = group.empty(choose.choice((1, 1_000, 300_000)))
    try:
        group.barrier().wait()
        if group.rank == victim:
            threading.Timer(delay, kill, (store,)).start()
        while True:
            x.fill_(1.0)
            group.all_reduce(x).wait()
    except shoal.PeerLost:
        detected = time.monotonic()
    new = group.rebuild()
    assert new is not None
    y = torch.ones(1_000)
    new.all_reduce(y).wait()
    gone_on = time.monotonic()
    assert bool((y == group.size - 1).all()), "a wrong sum"
    killed = float(store.get(_KILLED))
    new.close()
    del held
    return detected - killed, gone_on - killed


def kill(store: shoal.Store) -> None:
    store.set(_KILLED, repr(time.monotonic()).encode())
    os.kill(os.getpid(), signal.SIGKILL)


def measure(ranks: int, resident: int, trials: int) -> Case:
    """Let a rank die in ``trials`` groups, one after another."""
    detected, gone_on, bad = [], [], 0
    for seed in range(trials):
        with processes(survive, ranks, seed, resident, timeout=PATIENCE) as running:
            outcomes = running.join()
        survivors = [each for each in outcomes if each.ok]
        if len(survivors) != ranks - 1:
            bad += 1
            print("\n".join(each.describe() for each in outcomes if not each.ok))
            continue
        detected.append(max(each.value[0] for each in survivors))
        gone_on.append(max(each.value[1] for each in survivors))
    return Case(ranks, resident, trials, bad, summed_up(detected), summed_up(gone_on))


def summed_up(seconds: Sequence[float]) -> dict[str, float]:
    if not seconds:
        return {}
    ordered = sorted(each * 1e3 for each in seconds)
    at = {"p50": 0.5, "p99": 0.99, "max": 1.0}
    return {name: ordered[max(0, math.ceil(part * len(ordered)) - 1)] for name, part in at.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--trials", type=int, default=100, help="number of trials of each case")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="sizes of groups")
    parser.add_argument("--resident", type=int, nargs="+", default=[0, 2000], help="MB allocated by a rank")
    parser.add_argument("--json", type=Path, metavar="FILE", help="JSON file for the results")
    given = parser.parse_args()
    cases = []
    table = Table(title="milliseconds after SIGKILL")
    measures = [f"{what} {which}" for what in ("detected", "gone on") for which in ("p50", "p99", "max")]
    for heading in ("ranks", "MB each", "trials", "bad", *measures):
        table.add_column(heading, justify="right")
    for ranks in given.ranks:
        for resident in given.resident:
            # A tenth of the trials with memory, because filling it takes the most time.
            case = measure(ranks, resident, given.trials if resident < 100 else math.ceil(given.trials / 10))
            cases.append(asdict(case))
            figures = [f"{value:.1f}" for value in (*case.detected.values(), *case.gone_on.values())]
            table.add_row(str(ranks), str(resident), str(case.trials), str(case.bad), *figures)
    Console().print(table)
    if given.json:
        given.json.write_text(json.dumps({"milliseconds": cases}, indent=1) + "\n")


if __name__ == "__main__":
    main()
