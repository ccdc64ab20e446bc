"""Train the language model of bytes_lm.py while its ranks are killed and replaced.

    $ python examples/elastic_lm.py
    ...
    [2] step 50 of 400: killing myself
    shoal: rank 2 failed: killed by SIGKILL, after 19.1 s (process 11043); ranks 0, 1 go on; a new process ...
    ...
    the curves differ by 2.1e-05 at most: out/elastic_lm.png

It trains twice with three ranks: once undisturbed, and once while ranks kill themselves and `shoal run
--respawn` starts new processes, which join and receive the state. Then it plots both loss curves and the
number of ranks in each step. The curves should be equal, because each step takes the same windows of text,
whatever the number of ranks. It takes 4 minutes of CPU time.

One of the two runs alone:

    $ shoal run -n 3 --min 1 --respawn examples/elastic_lm.py --deaths 6
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from bytes_lm import Network, Settings, Text, positive, read_library, windows
from torch import nn
from torch.nn.functional import cross_entropy

from shoal import elastic

SETTINGS = Settings(steps=400, batch=12, lr=1e-3)


def is_due(done: int, steps: int, deaths: int, sizes: list[int]) -> bool:
    """Whether a rank must die after ``done`` steps; ``sizes`` has the number of ranks in each step."""
    before = sum(later < earlier for earlier, later in pairwise(sizes))
    return before < deaths and done >= steps * (before + 1) // (deaths + 2)


def train(options: argparse.Namespace, settings: Settings) -> None:
    torch.set_num_threads(1)
    text = Text.of(*read_library())
    network = Network(settings)
    optimizer = torch.optim.AdamW(network.parameters(), lr=settings.lr, betas=(0.9, 0.95))
    warmup = max(1, settings.steps // 20)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / warmup, 1.0))
    samples = elastic.Samples(
        len(text.train) - settings.context - 1, batch=settings.batch, seed=settings.seed
    )
    state = elastic.State(
        model=network, optimizer=optimizer, schedule=schedule, samples=samples, losses=[], sizes=[]
    )
    with elastic.Session(state) as session:
        model = session.parallel(network, broadcast_buffers=False)
        for step in session.steps(until=settings.steps):
            whole, rank = session.group.size == options.ranks, session.group.rank
            is_victim = whole and rank == step.number % options.ranks
            if is_victim and is_due(step.number, settings.steps, options.deaths, state.sizes):
                print(f"step {step.number} of {settings.steps}: killing myself", flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
            with step:
                inputs, targets = windows(text.train, step.indices, settings.context)
                logits = model(inputs)
                loss = cross_entropy(logits.flatten(0, 1), targets.flatten()) * step.weight
                loss.backward()
                total = session.group.all_reduce(loss.detach().clone()).wait() / session.group.size
                step.commit()
                nn.utils.clip_grad_norm_(network.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
                state.losses.append(total.item())
                state.sizes.append(session.group.size)
        if session.group.rank == 0:
            options.record.parent.mkdir(parents=True, exist_ok=True)
            options.record.write_text(
                json.dumps({"losses": state.losses, "sizes": state.sizes, "digest": state.digest().hex()})
            )
            print(f"loss {state.losses[-1]:.4f} after {state.steps} steps: {options.record}", flush=True)


def compare(options: argparse.Namespace) -> None:
    records: dict[str, dict[str, Any]] = {}
    for name, deaths in (("undisturbed", 0), ("disturbed", options.deaths)):
        record = options.out / f"elastic_lm_{name}.json"
        record.unlink(missing_ok=True)
        command = [sys.executable, "-m", "shoal", "run", "-n", str(options.ranks), "--min", "1", "--respawn"]
        command += [sys.executable, __file__, "--steps", str(options.steps), "--deaths", str(deaths)]
        command += ["--ranks", str(options.ranks), "--record", str(record)]
        subprocess.run(command, check=True)
        records[name] = json.loads(record.read_text())
    calm, hard = records["undisturbed"], records["disturbed"]
    apart = max(abs(one - other) for one, other in zip(calm["losses"], hard["losses"], strict=True))
    said = f"the curves differ by {apart:.1e} at most"
    if find_spec("matplotlib") is None:
        print(f"{said}; no picture: matplotlib is not installed")
    else:
        picture = options.out / "elastic_lm.png"
        draw(calm, hard, picture)
        print(f"{said}: {picture}")


def draw(calm: dict[str, Any], hard: dict[str, Any], path: Path) -> None:
    """Plot the losses of both runs, and the number of ranks of the run with deaths."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(
        2, 1, figsize=(7, 5), sharex=True, height_ratios=(3, 1), layout="constrained"
    )
    above.plot(calm["losses"], color="tab:grey", linewidth=4, alpha=0.5, label="undisturbed")
    above.plot(hard["losses"], color="tab:red", linewidth=1, label="ranks killed and replaced")
    above.set(ylabel="loss of a step (nats a byte)")
    above.grid(alpha=0.3)
    above.legend()
    below.step(range(len(hard["sizes"])), hard["sizes"], where="mid", color="tab:red")
    below.set(xlabel="step", ylabel="ranks", yticks=range(max(hard["sizes"]) + 1))
    below.grid(alpha=0.3)
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Train a language model while its ranks are killed and replaced.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--steps", type=positive(int), default=SETTINGS.steps, help="steps of the optimizer")
    parser.add_argument("--deaths", type=int, default=6, help="number of ranks that kill themselves")
    parser.add_argument("--ranks", type=positive(int), default=3, help="number of ranks of each run")
    parser.add_argument("--out", type=Path, default=Path("out"), help="directory of records and picture")
    parser.add_argument("--record", type=Path, default=Path("out/elastic_lm.json"), help="record of one run")
    options = parser.parse_args()
    if "SHOAL_STORE" in os.environ:
        train(options, Settings(**{**vars(SETTINGS), "steps": options.steps}))
    else:
        compare(options)


if __name__ == "__main__":
    main()
