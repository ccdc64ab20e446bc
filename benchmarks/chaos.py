"""Chaos tests of `docs/failures.md`: ranks die, stop, join and leave at random moments.

    python benchmarks/chaos.py
    python benchmarks/chaos.py --long --at-once 2   # 33 minutes
    python benchmarks/chaos.py --at-once 2          # faster, with less accurate times
    python benchmarks/chaos.py --only "two deaths" --seed 1234 --times 0.01

Each row of the table is a program on four processes, with faults for some of them. A trial is bad if an
unharmed rank does not return, if ranks return different results, or if resources leak. Results are written to
`benchmarks/results/chaos.json` and to the table of `docs/failures.md`, trials to `out/chaos.jsonl`. A bad
trial is repeated with its seed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import multiprocessing
import random
import shlex
import statistics
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from chaos_programs import collectives, training

from shoal.testing import chaos
from shoal.testing.processes import preload

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "chaos.json"
PAGE = ROOT / "docs" / "failures.md"
RECORD = ROOT / "out" / "chaos.jsonl"
RANKS = 4
MARKS = "<!-- chaos -->\n", "<!-- end of chaos -->\n"


@dataclass(frozen=True)
class Row:
    """One kind of trial.

    Attributes:
        count: number of trials in CI.
        long: number of trials with ``--long``.
        how: further arguments of :func:`shoal.testing.chaos.trials`; or, with a ``plan`` (maps a seed to its
            faults), of :func:`shoal.testing.chaos.play`.
    """

    name: str
    count: int
    long: int
    program: Any
    how: dict[str, Any]


def store_dies(seed: int) -> tuple[chaos.Harm, ...]:
    """The store dies; processes join before, meanwhile and later; sometimes a rank dies too, even rank 0."""
    choose = random.Random(seed)
    harms = [chaos.Harm(chaos.NO_RANK, "store", choose.uniform(0.0, 0.5))]
    harms += [chaos.Harm(RANKS + n, "join", choose.uniform(0.0, 1.8)) for n in range(choose.choice((1, 2)))]
    if choose.random() < 0.5:
        harms.append(chaos.Harm(choose.randrange(RANKS), "kill", choose.uniform(0.0, 1.6)))
    # Newcomers are numbered in the order of their starts.
    times = iter(sorted(harm.after for harm in harms if harm.kind == "join"))
    return tuple(replace(harm, after=next(times)) if harm.kind == "join" else harm for harm in harms)


COLLECTIVES = {"within": 0.2, "ready": True}
TWO_GB = {"args": (2000,), **COLLECTIVES}
#: faults during training only, not while the model is wrapped, when no rank may be lost
TRAINING = {"within": 0.3, "ready": True}
STANDSTILLS = {"kinds": ("kill", "stop"), "most": 2, "apart": 1.0, **TRAINING}
#: 9 s per trial
CHURN = {
    "kinds": ("kill", "stop", "join", "join", "leave"), "least": 6, "most": 10, "apart": 1.6, "within": 0.5,
    "ready": True, "args": (1300, 0.003),
}  # fmt: skip
MOVES = {
    "kinds": ("join", "leave"), "least": 2, "most": 4, "apart": 0.6, "within": 0.3,
    "ready": True, "args": (200, 0.005),
}  # fmt: skip
#: the store is down for 1 s, and empty afterwards
STORE = {"plan": store_dies, "ready": True, "args": (700, 0.004, 10.0), "join_within": 15.0}
ROWS = (
    Row("a death in collectives", 150, 1000, collectives, COLLECTIVES),
    Row("the same with 2 GB on each rank", 15, 100, collectives, TWO_GB),
    Row("two deaths, close together", 40, 200, collectives, {"most": 2, "apart": 0.03, **COLLECTIVES}),
    Row("up to three deaths", 40, 200, collectives, {"most": 3, "apart": 0.1, **COLLECTIVES}),
    Row("a standstill in collectives", 40, 200, collectives, {"kinds": ("stop",), **COLLECTIVES}),
    Row("a death in training", 40, 80, training, TRAINING),
    Row("deaths and standstills in training", 40, 80, training, STANDSTILLS),
    Row("ranks join and leave training", 25, 100, training, MOVES),
    Row("the store dies while processes join training", 15, 50, training, STORE),
    Row("deaths, standstills, joins and leaves in training", 10, 40, training, CHURN),
)


# -- all rows ---------------------------------------------------------------------------------------------


def summed_up(row: Row, trials: Sequence[chaos.Trial]) -> dict[str, Any]:
    """Compute one row of the table and of the results.

    The time from a kill counts only in trials without stopped ranks, because the agreement on a rebuild waits
    until a stopped rank is evicted.
    """
    harms = [(harm, trial) for trial in trials for harm in trial.harms]
    joined = [each for trial in trials for each in trial.joined_after if each is not None]
    times: dict[str, list[float]] = {"kill": [], "stop": []}
    for trial in trials:
        still = any(harm.kind == "stop" for harm in trial.harms)
        for harm, seconds in zip(trial.harms, trial.gone_on, strict=False):
            if seconds is not None and harm.kind in times and still == (harm.kind == "stop"):
                times[harm.kind].append(seconds)
    return {
        "name": row.name,
        "ranks": RANKS,
        "trials": len(trials),
        "bad": sum(bool(trial.bad) for trial in trials),
        "killed": sum(harm.kind == "kill" and harm.rank in trial.lost for harm, trial in harms),
        "stopped": sum(harm.kind == "stop" and harm.rank in trial.lost for harm, trial in harms),
        "left": sum(harm.kind == "leave" for harm, _ in harms),
        "joined": sum(len(trial.joined) for trial in trials),
        "joined_after_ms": figures(joined, 1e3) if joined else {},
        "gone_on_ms": {f"after a {kind}": figures(found, 1e3) for kind, found in times.items() if found},
        "seconds": figures([trial.seconds for trial in trials]),
    }


def figures(seconds: Sequence[float], unit: float = 1.0) -> dict[str, float]:
    """The count, median, 99th percentile and maximum."""
    ordered = sorted(seconds)
    at_99 = ordered[math.ceil(0.99 * len(ordered)) - 1]
    found = {"median": statistics.median(ordered), "p99": at_99, "max": ordered[-1]}
    return {"count": len(ordered), **{name: round(unit * each, 3) for name, each in found.items()}}


def table(rows: Sequence[dict[str, Any]]) -> str:
    heads = (
        "trials", "killed", "stopped", "left", "joined", "bad", "after a kill, ms", "after a stop, ms",
        "to join, ms",
    )  # fmt: skip
    lines = [f"| trial | {' | '.join(heads)} |", "| --- |" + " ---: |" * len(heads)]
    for row in rows:
        cells = [row[name] for name in ("name", "trials", "killed", "stopped", "left", "joined", "bad")]
        for kind in ("kill", "stop"):
            times = row["gone_on_ms"].get(f"after a {kind}")
            found = [f"{times[which]:.0f}" for which in ("median", "p99", "max")] if times else []
            cells.append(" / ".join(found))
        joined = row.get("joined_after_ms")
        cells.append(
            " / ".join(f"{joined[which]:.0f}" for which in ("median", "p99", "max")) if joined else ""
        )
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines) + "\n"


def write_page(rows: Sequence[dict[str, Any]]) -> None:
    page = PAGE.read_text()
    head, _, rest = page.partition(MARKS[0])
    _, _, tail = rest.partition(MARKS[1])
    PAGE.write_text(f"{head}{MARKS[0]}{table(rows)}{MARKS[1]}{tail}")


def play(place: int, count: int, seed: int) -> list[chaos.Trial]:
    """Run trials of the row at this index of the table."""
    row = ROWS[place]
    how = dict(row.how)
    arguments = how.pop("args", ())
    if (plan := how.pop("plan", None)) is not None:
        seeds = range(seed, seed + count)
        return [
            chaos.play(row.program, RANKS, *arguments, harms=plan(each), seed=each, timeout=120.0, **how)
            for each in seeds
        ]
    return chaos.trials(row.program, RANKS, *arguments, count=count, seed=seed, timeout=120.0, **how)


def prepare() -> None:
    """Preload the modules that ranks would import."""
    preload("torch._dynamo", "chaos_programs", "shoal.backend.native.channel")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--long", action="store_true", help="more trials: half an hour, two at a time")
    parser.add_argument("--times", type=float, default=1.0, help="factor for the number of trials")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first trial of each row")
    parser.add_argument("--at-once", type=int, default=1, metavar="N", help="number of concurrent trials")
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="run rows whose names contain TEXT; write no results"
    )
    given = parser.parse_args()
    RECORD.parent.mkdir(exist_ok=True)
    rows, bad = [], 0
    # In separate processes, because a trial checks its process for leaks.
    with ProcessPoolExecutor(
        given.at_once, mp_context=multiprocessing.get_context("spawn"), initializer=prepare
    ) as pool:
        for place, row in enumerate(ROWS):
            if given.only not in row.name:
                continue
            count, trials = max(1, math.ceil((row.long if given.long else row.count) * given.times)), []
            parts = [count * part // given.at_once for part in range(given.at_once + 1)]
            shares = [(last - first, given.seed + first) for first, last in itertools.pairwise(parts)]
            for found in pool.map(play, [place] * len(shares), *zip(*shares, strict=True)):
                trials += found
            with RECORD.open("a") as file:
                file.writelines(json.dumps({"row": row.name, **asdict(trial)}) + "\n" for trial in trials)
            rows.append(summed_up(row, trials))
            print(f"{row.name}: {rows[-1]['trials']} trials, {rows[-1]['bad']} bad, "
                  f"{rows[-1]['gone_on_ms']}, to join {rows[-1]['joined_after_ms']}", flush=True)  # fmt: skip
            for trial in trials:
                if trial.bad:
                    bad += 1
                    harms = [asdict(harm) for harm in trial.harms]
                    print(f"  seed {trial.seed}, {harms}:\n{trial.bad}", flush=True)
    if not given.only:
        RESULTS.parent.mkdir(exist_ok=True)
        command = shlex.join(["python", "benchmarks/chaos.py", *sys.argv[1:]])
        RESULTS.write_text(json.dumps({"command": command, "rows": rows}, indent=1) + "\n")
        write_page(rows)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
