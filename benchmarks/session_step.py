"""Measure the cost that a session of `shoal.elastic` adds to a step without failures.

    python benchmarks/session_step.py
    python benchmarks/session_step.py --steps 100 --width 256 --out out/session_step.json

Two ranks train two models of one shape in turns, in one loop: one with DistributedDataParallel alone, the
other in a session. Their order alternates, because each starts with the caches that the other has left. A
step is forward, backward, update and zeroing the gradients; in the session also everything between two steps,
and the commit. The ratio is that of medians; its interval is from 2,000 resamplings of pairs of steps.
"""

from __future__ import annotations

import argparse
import json
import random
import shlex
import statistics
import sys
import time
from pathlib import Path

import torch
from torch import nn

import shoal
from shoal import elastic
from shoal.testing import processes

ROOT = Path(__file__).resolve().parents[1]
WARM = 20  # uncounted steps: creation of Adam's state, reordering of buckets, first commit
BATCH = 64


def network(width: int) -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(6):
        layers += [nn.Linear(width, width), nn.Tanh()]
    return nn.Sequential(*layers)


def turns(group: shoal.ProcessGroup, width: int, steps: int) -> list[tuple[float, float]]:
    """Train both models; return the seconds of each step without and with the session."""
    torch.set_num_threads(1)
    data = torch.randn(4096, width)
    order = torch.randperm(len(data))
    apart = group.split(0)
    assert apart is not None
    plain = shoal.DistributedDataParallel(network(width), group=apart)
    plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-4)
    net = network(width)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
    samples = elastic.Samples(len(data), batch=BATCH, seed=0)
    state = elastic.State(model=net, optimizer=optimizer, samples=samples)

    def step_without(number: int) -> float:
        began = time.perf_counter()
        first = number * BATCH // 2 % len(order)
        plain(data[order[first : first + BATCH // 2]]).square().mean().backward()
        plain_optimizer.step()
        plain_optimizer.zero_grad()
        return time.perf_counter() - began

    taken: list[tuple[float, float]] = []
    with elastic.Session(state, group=group) as session:
        model = session.parallel(net)
        ended = time.perf_counter()
        for step in session.steps(until=WARM + steps):
            between = time.perf_counter() - ended
            without = step_without(step.number) if step.number % 2 else 0.0
            began = time.perf_counter()
            with step:
                (model(data[step.indices]).square().mean() * step.weight).backward()
                step.commit()
                optimizer.step()
                optimizer.zero_grad()
            within = between + time.perf_counter() - began
            taken.append((without or step_without(step.number), within))
            ended = time.perf_counter()
    apart.close()
    return taken[WARM:]


def interval(pairs: list[tuple[float, float]], times: int = 2000) -> tuple[float, float]:
    """Return the 95 % confidence interval of the ratio of medians."""
    choose = random.Random(0)
    ratios = []
    for _ in range(times):
        drawn = choose.choices(pairs, k=len(pairs))
        ratios.append(ratio(drawn))
    ratios.sort()
    return ratios[int(0.025 * times)], ratios[int(0.975 * times)]


def ratio(pairs: list[tuple[float, float]]) -> float:
    return statistics.median(b for _, b in pairs) / statistics.median(a for a, _ in pairs)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, default=600, help="counted steps of each kind")
    parser.add_argument("--width", type=int, nargs="+", default=[256, 512, 1024], help="widths of the layers")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "benchmarks" / "results" / "session_step.json", help="the record"
    )
    given = parser.parse_args()
    rows = []
    for width in given.width:
        with processes(turns, 2, width, given.steps, timeout=1200) as ranks:
            pairs = ranks.join()[0].value
        low, high = interval(pairs)
        plain = 1e3 * statistics.median(a for a, _ in pairs)
        rows.append(
            {
                "width": width,
                "steps": len(pairs),
                "plain_ms": round(plain, 3),
                "ratio": round(ratio(pairs), 4),
                "interval": [round(low, 4), round(high, 4)],
            }
        )
        print(f"6 x {width}: {plain:.2f} ms without a session, {rows[-1]['ratio']:.3f} times as long with "
              f"one (95 %: {low:.3f} to {high:.3f})", flush=True)  # fmt: skip
    given.out.parent.mkdir(parents=True, exist_ok=True)
    command = shlex.join(["python", "benchmarks/session_step.py", *sys.argv[1:]])
    given.out.write_text(json.dumps({"command": command, "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
