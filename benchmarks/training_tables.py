"""Tables and plot of ``training.py``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from training_figures import ALONE, Estimate, Race, median
from training_models import TASKS

from shoal.tools.bench.result import description

LABELS = {
    ALONE: "alone", "gloo": "Gloo", "gloo-copying": "Gloo, copying", "torch-shoal": "torch's DDP on shoal",
    "fsdp-shoal": "FSDP2 on shoal", "fsdp-gloo": "FSDP2 on Gloo",
    "hooks": "empty hooks", "shoal-single": "shoal, a group of one rank each",
}  # fmt: skip
PEER = "gloo"
HEADINGS = ("", "step ms", "overhead ms", "x alone", "x Gloo's overhead", "CPU overhead ms", "us/parameter")
COLOURS = {"gloo": "#1f77b4", "gloo-copying": "#9ecae1"}


def label(name: str) -> str:
    kind, _, cap = name.partition("@")
    return f"{LABELS.get(kind, kind)}, {cap} MiB" if cap else LABELS.get(kind, kind)


def title(race: Race) -> str:
    ranks = "1 rank" if race.ranks == 1 else f"{race.ranks} ranks"
    return f"{TASKS[race.task].title}, {ranks}"


def interval(estimate: Estimate | None, digits: int = 3) -> str:
    if estimate is None:
        return "-"
    value, low, high = (f"{number:.{digits}g}" for number in (estimate.value, estimate.low, estimate.high))
    return f"{value} ({low} to {high})"


def rows(race: Race) -> list[list[str]]:
    table = [[label(ALONE), f"{median(race.wall[ALONE]).value * 1e3:.3g}", *[""] * (len(HEADINGS) - 2)]]
    for name in race.names():
        table.append(
            [
                label(name),
                f"{median(race.wall[name]).value * 1e3:.3g}",
                interval(race.overhead(name) * 1e3),
                interval(race.times_alone(name)),
                interval(race.against(name, PEER)) if name != PEER else "",
                interval(race.cpu_overhead(name) * 1e3),
                f"{race.cpu_overhead(name).value / race.parameters * 1e6:.3g}",
            ]
        )
    return table


def show(race: Race, console: Console) -> None:
    table = Table(title=f"{title(race)}: {race.rounds} rounds of {race.steps} steps", title_justify="left")
    for heading in HEADINGS:
        table.add_column(heading, justify="right" if heading else "left")
    for row in rows(race):
        table.add_row(*row)
    console.print(table)
    for what, found in part_rows(race):
        console.print(f"  {what}: {found}")


def part_rows(race: Race) -> list[tuple[str, str]]:
    """The ms that each part adds to a step with shoal; [] if the contenders that show it did not run."""
    found = [(what, interval(part * 1e3)) for what, part in race.parts()]
    if found:
        found.append(("of that, a rank waits for another", f"{race.waited['shoal'] * 1e3:.3g}"))
    return found


def markdown(races: Sequence[Race]) -> str:
    lines = [
        f"On {description()}.",
        "",
        "| model | " + " | ".join(("contender", *HEADINGS[1:])) + " |",
        "| --- | --- |" + " ---: |" * (len(HEADINGS) - 1),
    ]
    for race in races:
        for number, row in enumerate(rows(race)):
            lines.append("| " + " | ".join([title(race) if number == 0 else "", *row]) + " |")
    divided = [race for race in races if race.parts()]
    if divided:
        titles = [what for what, _ in part_rows(divided[0])]
        lines += ["", f"| ms of a step | {' | '.join(titles)} |", "| --- |" + " ---: |" * len(titles)]
        lines += [f"| {' | '.join([title(race), *(ms for _, ms in part_rows(race))])} |" for race in divided]
    return "\n".join(lines) + "\n"


def draw(races: Sequence[Race], path: Path) -> None:
    """Plot the overheads with their intervals: a row per number of ranks, a panel per model."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    sizes = sorted({race.ranks for race in races})
    tasks = list(dict.fromkeys(race.task for race in races))
    figure, grid = pyplot.subplots(
        len(sizes),
        len(tasks),
        figsize=(3.2 * len(tasks), 2.8 * len(sizes)),
        layout="constrained",
        squeeze=False,
    )
    for axes in grid.flat:
        axes.set_axis_off()
    for race in races:
        axes = grid[sizes.index(race.ranks)][tasks.index(race.task)]
        axes.set_axis_on()
        for place, name in enumerate(race.names()):
            found = race.overhead(name) * 1e3
            error = [[found.value - found.low], [found.high - found.value]]
            axes.bar(place, found.value, yerr=error, color=COLOURS.get(name, "#d62728"), capsize=4)
            axes.annotate(
                f"{found.value:.2g}", (place, max(found.high, 0)), (0, 2), textcoords="offset points",
                ha="center", fontsize=8,
            )  # fmt: skip
        axes.set_xticks(range(len(race.names())), [label(name) for name in race.names()], fontsize=8)
        axes.axhline(0, color="black", linewidth=0.6)
        axes.margins(y=0.15)
        axes.set_title(f"{title(race)}\nalone {median(race.wall[ALONE]).value * 1e3:.3g} ms", fontsize=9)
        axes.set_ylabel("overhead of a step, ms", fontsize=8)
        axes.grid(axis="y", alpha=0.3)
    figure.savefig(path, dpi=100)
    pyplot.close(figure)
