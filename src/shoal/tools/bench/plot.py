"""Plots of a setting, and the tables and the plot of docs/benchmark.md."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from .case import Size
from .contenders import FLOOR, OWN_VARIANTS
from .result import BenchResult, Setting, machine
from .table import markdown, size_name

_COLOURS = {
    "shoal registered": "#d62728", "shoal": "#ff7f0e", "shoal tcp": "#bcbd22",
    "shoal hierarchical": "#e377c2", "shoal in torch": "#8c564b", "shoal over MPI": "#17becf",
    "shoal over MPI, its reductions": "#9edae5",
    "Gloo": "#1f77b4", "MPICH": "#2ca02c", "Open MPI": "#9467bd",
    FLOOR: "#222222", "floor, numpy": "#888888", "memcpy": "#bbbbbb",
}  # fmt: skip
_LATENCY_TO = 256 * 2**10


def draw(result: BenchResult, settings: Sequence[Setting], path: Path) -> None:
    """Write a PNG with a row of two plots for each setting."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, grid = pyplot.subplots(
        len(settings), 2, figsize=(10, 4 * len(settings)), layout="constrained", squeeze=False
    )
    for (latency, bandwidth), setting in zip(grid, settings, strict=True):
        # Unaligned and odd sizes are in the table only.
        sizes = [size for size in result.sizes(setting) if str(size).isalnum() and size.nbytes]
        small = [size for size in sizes if size.nbytes <= _LATENCY_TO]
        for name in result.names(setting):
            marker = "o" if name in OWN_VARIANTS else "s"
            line = "-" if name in OWN_VARIANTS else "--" if name == FLOOR else ":"
            for axes, shown, of_time in ((latency, small, True), (bandwidth, sizes, False)):
                points = [
                    (size.nbytes, cell.median * 1e6 if of_time else size.nbytes / cell.median / 1e9)
                    for size in shown
                    if (cell := result.find(setting, size, name))
                ]
                if points:
                    axes.loglog(
                        *zip(*points, strict=True), line, label=name, color=_COLOURS[name], marker=marker,
                        markersize=4.0,
                    )  # fmt: skip
        for axes, shown, unit in ((latency, small, "us"), (bandwidth, sizes, "GB/s")):
            places = [size.nbytes for size in shown]
            axes.set_xticks(places, [size_name(size) for size in shown], rotation=45, fontsize=8)
            axes.minorticks_off()
            axes.set_ylabel(unit)
            axes.grid(alpha=0.3)
        latency.set_title(f"{setting}: time", fontsize=10)
        bandwidth.set_title(f"bytes of a rank's tensor per second ({machine()['cores']} cores)", fontsize=10)
        bandwidth.legend(fontsize=8)
    figure.savefig(path, dpi=80)
    pyplot.close(figure)


SIZES = [Size.parse(text) for text in ("8", "16K", "1M", "25M", "64M", "256M")]
SETTINGS = [Setting("all_reduce", "fp32", ranks) for ranks in (2, 4)]
PAGE = "docs/benchmark.md"
PICTURE = "docs/all_reduce.png"


def update_page(result: BenchResult, root: Path) -> None:
    """Write the measured tables into the page, and the picture if all settings were measured."""
    page = root / PAGE
    text = page.read_text()
    measured = [setting for setting in SETTINGS if setting in result.cells]
    for setting in measured:
        sizes = [size for size in SIZES if size in result.cells[setting]]
        text = replace_section(text, setting.stem, markdown(result, setting, sizes))
    if measured == SETTINGS:
        draw(result, SETTINGS, root / PICTURE)
        text = replace_section(
            text, "all_reduce-picture", "![all_reduce: time and bandwidth](all_reduce.png)"
        )
    page.write_text(text)


def replace_section(text: str, name: str, body: str) -> str:
    """Replace the text between the markers of section ``name``."""
    pattern = rf"(<!-- {re.escape(name)}: begin.*?-->\n).*?(<!-- {re.escape(name)}: end -->)"
    return re.sub(pattern, lambda match: f"{match[1]}{body}\n{match[2]}", text, flags=re.DOTALL)
