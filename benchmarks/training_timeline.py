"""A timeline of a step of shoal's DDP: arrivals of gradients, and reductions of buckets.

Completion times of all-reduces are from the group's flight recorder, which records a completion when it is
first observed. So each future gets a callback, with which the completing thread observes it at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

import shoal

STEPS = 31


class Trained(Protocol):
    model: nn.Module

    def step(self) -> None: ...


def record(make: Callable[[], Trained], group: shoal.ProcessGroup) -> list[dict[str, Any]]:
    """Train some steps and record the times in each.

    Args:
        make: creates the contender; called after the recording of reductions has been set up.

    Returns:
        For each step, in ns of ``time.monotonic_ns`` (one clock for all processes of a machine): ``began``,
        ``forward`` (its end), ``ended``, ``gradients`` (when autograd had computed each), and ``reductions``
        (submitted, complete, bytes).
    """
    reduce = group.all_reduce
    submitted: list[int] = []
    gradients: list[int] = []
    forward: list[int] = []

    def watched(*arguments: Any, **options: Any) -> shoal.Future[torch.Tensor]:
        submitted.append(time.monotonic_ns())
        future = reduce(*arguments, **options)
        future.add_done_callback(lambda _: None)
        return future

    group.all_reduce = watched  # type: ignore[method-assign]
    try:
        one = make()
        for parameter in one.model.parameters():
            # Called before the gradient is accumulated, so before the reducer's hook.
            parameter.register_hook(lambda _: gradients.append(time.monotonic_ns()))
        one.model.register_forward_hook(lambda *_: forward.append(time.monotonic_ns()))
        steps = []
        for _ in range(STEPS):
            for notes in (submitted, gradients, forward):
                notes.clear()
            group.barrier().wait()
            began = time.monotonic_ns()
            one.step()
            ended = time.monotonic_ns()
            reductions = [
                (when, complete, nbytes)
                for when, (complete, nbytes) in zip(submitted, _completions(group, began), strict=True)
            ]
            steps.append(
                {
                    "began": began,
                    "forward": forward[0],
                    "ended": ended,
                    "gradients": list(gradients),
                    "reductions": reductions,
                }
            )
        return steps
    finally:
        del group.all_reduce


def _completions(group: shoal.ProcessGroup, since: int) -> list[tuple[int, int]]:
    """Return completion time and bytes of each all-reduce submitted after ``since``, in order."""
    assert group.recorder is not None
    return [
        (entry.ended, entry.count * getattr(torch, entry.dtype).itemsize)
        for entry in group.recorder.entries()
        if entry.kind == "all_reduce" and entry.submitted >= since
    ]


def median_step(ranks: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return the step with the median time (earliest start to latest end), for each rank."""
    steps = list(zip(*ranks, strict=True))[1:]  # buckets are rebuilt after the first step
    steps.sort(key=lambda step: max(one["ended"] for one in step) - min(one["began"] for one in step))
    return list(steps[len(steps) // 2])


def draw(ranks: Sequence[dict[str, Any]], title: str, path: Path) -> None:
    """Plot one step: for each rank its computation, and above it the reductions."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    origin = min(one["began"] for one in ranks)

    def bar(axes: Any, begin: int, end: int, place: float, height: float, colour: str) -> None:
        axes.broken_barh(
            [((begin - origin) * 1e-6, (end - begin) * 1e-6)], (place, height),
            facecolor=colour, edgecolor="black", linewidth=0.4,
        )  # fmt: skip

    figure, axes = pyplot.subplots(figsize=(10, 1.2 + 1.2 * len(ranks)), layout="constrained")
    for rank, one in enumerate(ranks):
        low = 2.6 * rank
        last = max(one["gradients"])
        bar(axes, one["began"], one["forward"], low, 0.9, "#1f77b4")
        bar(axes, one["forward"], last, low, 0.9, "#2ca02c")
        bar(axes, last, one["ended"], low, 0.9, "#dddddd")
        for when in one["gradients"]:
            axes.plot([(when - origin) * 1e-6] * 2, [low, low + 0.9], color="black", linewidth=0.8)
        for number, (submitted, complete, nbytes) in enumerate(one["reductions"]):
            # Two rows, because a bucket may be submitted before the previous one is complete.
            place = low + 0.95 + 0.4 * (number % 2)
            bar(axes, submitted, complete, place, 0.35, "#d62728")
            axes.annotate(
                f"{number}: {nbytes / 2**20:.2g} MiB", ((complete - origin) * 1e-6, place + 0.17), (2, 0),
                textcoords="offset points", fontsize=6, va="center",
            )  # fmt: skip
    axes.set_yticks(
        [2.6 * rank + 0.85 for rank in range(len(ranks))], [f"rank {i}" for i in range(len(ranks))]
    )
    axes.set_ylim(-0.2, 2.6 * len(ranks) - 0.3)
    axes.set_xlabel("ms")
    axes.set_title(title, fontsize=10)
    axes.grid(axis="x", alpha=0.3)
    colours = {
        "forward": "#1f77b4", "backward; lines: gradients": "#2ca02c",
        "rest of backward(): waiting": "#dddddd",
        "all-reduce of a bucket, submitted to complete": "#d62728",
    }  # fmt: skip
    axes.legend(
        handles=[Patch(facecolor=colour, label=label) for label, colour in colours.items()],
        ncols=4, fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.25 if len(ranks) < 3 else -0.15),
    )  # fmt: skip
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
