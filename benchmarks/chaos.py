"""Deaths and standstills at random moments, many times: what `docs/failures.md` promises, put to the test.

    python benchmarks/chaos.py
    python benchmarks/chaos.py --times 10
    python benchmarks/chaos.py --only "two deaths" --seed 1234 --times 0.01

Each row of the table is a program that runs on four processes, and what is done to some of them.  A trial is
bad if a rank to which nothing was done does not come to its end, if ranks end with different results, or if
anything is left behind.  The results go to `benchmarks/results/chaos.json` and into the table of
`docs/failures.md`, the trials to `out/chaos.jsonl`; a bad one is played again with its seed.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import shlex
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import shoal
from shoal import elastic
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
        count: of trials, in CI.
        how: further arguments of :func:`shoal.testing.chaos.trials`.
    """

    name: str
    count: int
    program: Any
    how: dict[str, Any]


# -- the programs -----------------------------------------------------------------------------------------


def collectives(group: shoal.ProcessGroup, operations: int = 1200, resident: int = 0) -> tuple[int, int]:
    """All-reduce, each operation with its right result, in as many groups as that needs.

    Returns:
        Epoch and size of the last group, which all that live agree on.
    """
    held = torch.ones(resident * 2**18)
    done = 0
    sizes = (1, 1_000, 50_000, 400_000)
    while done < operations:
        memory = {n: group.empty(n) for n in sizes}
        try:
            while done < operations:
                n = random.Random(done).choice(sizes)  # the same on all ranks
                x = memory[n].fill_(group.rank + 1.0) if done % 2 else torch.full((n,), group.rank + 1.0)
                group.all_reduce(x).wait()
                right = group.size * (group.size + 1) / 2
                if not bool((x == right).all()):
                    raise AssertionError(f"operation {done} gave a wrong result")
                done += 1
        except shoal.PeerLost:
            group = rebuilt(group, done)
            assert group.rebuilt is not None
            done = min(int(note) for note in group.rebuilt.notes.values())  # of who completed the fewest
    group = rebuilt(group, done)
    group.close()
    del held
    return group.epoch, group.size


def rebuilt(group: shoal.ProcessGroup, done: int) -> shoal.ProcessGroup:
    """The next group, with a note that says how far this rank is."""
    new = group.rebuild(note=str(done).encode())
    assert new is not None
    return new


def training(group: shoal.ProcessGroup, steps: int = 300) -> str:
    """Train a small model in a session; the digest of its parameters and optimiser."""
    torch.manual_seed(0)
    x = torch.randn(500, 16)
    y = x.sum(1, keepdim=True)
    net = nn.Sequential(nn.Linear(16, 256), nn.Tanh(), nn.Linear(256, 1))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    state = elastic.State(model=net, optimizer=optimizer, samples=elastic.Samples(len(x), batch=40, seed=1))
    with elastic.Session(state, group=group) as session:
        model = session.parallel(net)
        chaos.ready(group)
        for step in session.steps(until=steps):
            with step:
                loss = nn.functional.mse_loss(model(x[step.indices]), y[step.indices])
                (loss * step.weight).backward()
                step.commit()
                optimizer.step()
                optimizer.zero_grad()
    if not bool(torch.isfinite(net[0].weight).all()):
        raise AssertionError("training diverged")
    return state.digest().hex()


#: in training: not while the model is wrapped, which no rank may miss
LATER = {"within": 1.0, "ready": True}
ROWS = (
    Row("a death in collectives", 150, collectives, {"within": 0.4}),
    Row("the same with 2 GB on each rank", 15, collectives, {"within": 0.4, "args": (1200, 2000)}),
    Row("two deaths, close together", 40, collectives, {"most": 2, "within": 0.3, "apart": 0.03}),
    Row("up to three deaths", 40, collectives, {"most": 3, "within": 0.3, "apart": 0.1}),
    Row("a standstill in collectives", 40, collectives, {"kinds": ("stop",), "within": 0.4}),
    Row("a death in training", 40, training, LATER),
    Row("deaths and standstills in training", 40, training, {"kinds": ("kill", "stop"), "most": 2, **LATER}),
)


# -- all of them ------------------------------------------------------------------------------------------


def summed_up(row: Row, trials: Sequence[chaos.Trial]) -> dict[str, Any]:
    """One row of the table, and of the file of results."""
    harmed = [harm for trial in trials for harm in trial.harms if harm.rank in trial.lost]
    return {
        "name": row.name,
        "ranks": RANKS,
        "trials": len(trials),
        "bad": sum(bool(trial.bad) for trial in trials),
        "killed": sum(harm.kind == "kill" for harm in harmed),
        "stopped": sum(harm.kind == "stop" for harm in harmed),
        "seconds": {
            "median": round(statistics.median(trial.seconds for trial in trials), 3),
            "max": round(max(trial.seconds for trial in trials), 3),
        },
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The table of the page."""
    lines = ["| trial | trials | killed | stopped | bad | median s | longest s |"]
    lines.append("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for row in rows:
        seconds = row["seconds"]
        lines.append(
            f"| {row['name']} | {row['trials']} | {row['killed']} | {row['stopped']} | {row['bad']} "
            f"| {seconds['median']:.2f} | {seconds['max']:.2f} |"
        )
    return "\n".join(lines) + "\n"


def write_page(rows: Sequence[dict[str, Any]]) -> None:
    """Put the table into the page."""
    page = PAGE.read_text()
    head, _, rest = page.partition(MARKS[0])
    _, _, tail = rest.partition(MARKS[1])
    PAGE.write_text(f"{head}{MARKS[0]}{table(rows)}{MARKS[1]}{tail}")


def main() -> int:
    """Play what the command line asks for; 1 if a trial was bad."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--times", type=float, default=1.0, help="so many times the trials of CI")
    parser.add_argument("--seed", type=int, default=0, help="of the first trial of each row")
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="rows whose names contain it; writes no results"
    )
    given = parser.parse_args()
    preload("torch._dynamo")  # which each rank with an optimiser would import
    RECORD.parent.mkdir(exist_ok=True)
    rows, bad = [], 0
    for row in ROWS:
        if given.only not in row.name:
            continue
        how = dict(row.how)
        arguments = how.pop("args", ())
        count = max(1, math.ceil(row.count * given.times))
        trials = chaos.trials(
            row.program, RANKS, *arguments, count=count, seed=given.seed, record=RECORD, timeout=120.0, **how
        )
        rows.append(summed_up(row, trials))
        print(f"{row.name}: {rows[-1]['trials']} trials, {rows[-1]['bad']} bad, "
              f"longest {rows[-1]['seconds']['max']:.2f} s", flush=True)  # fmt: skip
        for trial in trials:
            if trial.bad:
                bad += 1
                print(
                    f"  seed {trial.seed}, {[asdict(harm) for harm in trial.harms]}:\n{trial.bad}", flush=True
                )
    if not given.only:
        RESULTS.parent.mkdir(exist_ok=True)
        command = shlex.join(["python", "benchmarks/chaos.py", *sys.argv[1:]])
        RESULTS.write_text(json.dumps({"command": command, "rows": rows}, indent=1) + "\n")
        write_page(rows)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
