"""The plot of a benchmark: a panel for each figure, with a bar for each library."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

#: number of panels per row
ROW = 5


def draw(medians: Mapping[str, Mapping[str, float]], path: Path) -> None:
    """Write the plot; a panel has bars for the libraries with that figure."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = [what for what in medians["shoal"] if "p10" not in what and "p99" not in what]
    columns = min(len(shown), ROW)
    rows = math.ceil(len(shown) / columns)
    figure, grid = pyplot.subplots(
        rows, columns, figsize=(2.8 * columns, 3 * rows), layout="constrained", squeeze=False
    )
    for axes in grid.flat[len(shown) :]:
        axes.remove()
    for axes, what in zip(grid.flat, shown, strict=False):
        bars = {name: figures[what] for name, figures in medians.items() if what in figures}
        colours = ["#1f77b4" if name.startswith("shoal") else "#7f7f7f" for name in bars]
        drawn = axes.bar(range(len(bars)), list(bars.values()), color=colours)
        axes.bar_label(drawn, fmt=lambda value: f"{float(f'{value:.3g}'):,g}", fontsize=7)
        axes.set_xticks(range(len(bars)), list(bars), fontsize=8, rotation=40, ha="right")
        axes.set_title(what, fontsize=9)
        axes.grid(axis="y", alpha=0.3)
    figure.savefig(path, dpi=100)
    pyplot.close(figure)
