"""Measure the cost that DDP adds to a training step, for shoal and for torch's DDP over Gloo.

    make training                                        # four models on 1, 2 and 4 ranks, 14 minutes
    make training ARGS="--models mlp --ranks 2"
    make training ARGS="--models mlp --ranks 2 --contenders alone shoal@1 shoal@8 shoal@25"
    make training ARGS="--parts --ranks 2"               # where the time goes
    make training ARGS="--timeline out/timeline.png --contenders shoal@5"    # a plot of one step

A step is ``zero_grad()``, forward and backward, on one thread per rank. The contenders run in the same
processes and take turns in a random order per round: ``alone`` (the model without DDP, on all ranks
concurrently), ``shoal``, ``gloo`` (torch's DDP over Gloo with ``gradient_as_bucket_view=True``) and
``gloo-copying`` (with torch's default, False). ``shoal@8`` has buckets of 8 MiB. Further contenders:
``torch-shoal`` is torch's DDP on the backend "shoal", with views; ``fsdp-shoal`` and ``fsdp-gloo`` are
torch's ``fully_shard`` of each linear layer and of the model; ``hooks`` is the model alone with an empty hook
on each parameter; ``shoal-single`` is shoal's DDP in which each rank has a group of its own.

Before each step all ranks meet in a barrier. A step lasts from the earliest rank's start to the latest rank's
end. Overhead is the difference from ``alone`` in the same round; the median over the rounds is shown with a
bootstrap 95 % confidence interval. See docs/performance.md. Writes training.json (all samples), training.md
and training.png to --out.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from training_figures import Race, race
from training_models import TASKS
from training_tables import draw, label, markdown, show
from training_timeline import draw as draw_timeline
from training_timeline import median_step

import shoal
from shoal.tools.bench.result import description, machine
from shoal.tools.signals import cleaning_up

ROOT = Path(__file__).resolve().parent.parent
#: Settings of glibc that keep freed memory in the process. Otherwise the gradients of a model alone may be
#: newly mapped in each step, which takes milliseconds.
KEEP_MEMORY = {"MALLOC_TRIM_THRESHOLD_": str(2**30), "MALLOC_MMAP_THRESHOLD_": str(2**25)}
PATIENCE = 300.0  # seconds that ranks get in addition to their measurements


def run(ranks: int, seconds: float, *options: str) -> list[Any]:
    """Run ``training_rank.py``; return the ranks' results, or raise ``RuntimeError`` with their output."""
    with tempfile.TemporaryDirectory(prefix="shoal-training-") as folder:
        result = Path(folder) / "result.json"
        script = str(Path(__file__).with_name("training_rank.py"))
        command = [sys.executable, "-m", "shoal", "run", "-n", str(ranks), script, "--result", str(result)]
        done = subprocess.run(
            [*command, "--seconds", str(seconds), *options], env=os.environ | KEEP_MEMORY,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=seconds * ranks + PATIENCE,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"the {ranks} ranks failed:\n{done.stdout}")
        answers: list[Any] = json.loads(result.read_text())
        return answers


def measure(task: str, ranks: int, contenders: Sequence[str], seconds: float, *options: str) -> Race:
    answers = run(ranks, seconds, "--task", task, "--contenders", *contenders, *options)
    return race(task, answers)


def save(races: Sequence[Race], out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    entry = {
        "date": datetime.date.today().isoformat(),
        "machine": machine(),
        "versions": {"shoal": shoal.__version__, "torch": torch.__version__},
        "races": [one.record() for one in races],
    }
    (out / "training.json").write_text(json.dumps(entry, indent=1) + "\n")
    (out / "training.md").write_text(markdown(races))


def main() -> int:
    parser = argparse.ArgumentParser(
        description="What a training step with DDP costs beyond computing alone."
    )
    models = [name for name in TASKS if name != "tiny"]
    parser.add_argument("--models", nargs="+", choices=TASKS, default=models)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--contenders", nargs="+", default=["alone", "shoal", "gloo", "gloo-copying"])
    parser.add_argument(
        "--parts", action="store_true", help="show what a step with shoal spends the time on; more contenders"
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="duration per model and number of ranks")
    parser.add_argument("--keep", action="store_true", help="zero_grad(set_to_none=False)")
    parser.add_argument("--timeline", type=Path, metavar="PNG", help="plot one step of the first model")
    parser.add_argument("--out", type=Path, default=ROOT / "out", help="output folder")
    arguments = parser.parse_args()
    if "alone" not in arguments.contenders:
        parser.error("--contenders must include 'alone', the reference for the overhead")
    if arguments.parts:
        arguments.contenders += [
            name for name in ("hooks", "shoal-single") if name not in arguments.contenders
        ]
    # Files and pipes have no width; this one fits a table.
    console = Console() if sys.stdout.isatty() else Console(width=132)
    options = ["--keep"] if arguments.keep else []
    if not (pictures := find_spec("matplotlib") is not None):
        if arguments.timeline:
            parser.error("--timeline draws a picture, and matplotlib is not installed")
        console.print("matplotlib is not installed: no picture will be drawn", style="yellow")
    if arguments.timeline:
        task, ranks = arguments.models[0], 2 if arguments.ranks == [1, 2, 4] else arguments.ranks[0]
        name = next((name for name in arguments.contenders if name.startswith("shoal")), "shoal")
        step = median_step(run(ranks, 0, "--task", task, "--timeline", "--contenders", name, *options))
        title = f"one step of {TASKS[task].title}: {label(name)}, {ranks} ranks on {description()}"
        draw_timeline(step, title, arguments.timeline)
        console.print(f"wrote {arguments.timeline}")
        return 0
    races = []
    for ranks in arguments.ranks:
        for task in arguments.models:
            with console.status(f"{TASKS[task].title}, {ranks} ranks"):
                races.append(measure(task, ranks, arguments.contenders, arguments.seconds, *options))
            show(races[-1], console)
            save(races, arguments.out)  # each time, to keep results if a later model fails
    console.print(f"wrote training.json and training.md to {arguments.out}")
    if pictures:
        draw(races, arguments.out / "training.png")
        console.print(f"wrote training.png to {arguments.out}")
    return 0


if __name__ == "__main__":
    with cleaning_up():
        sys.exit(main())
