"""What a run of a benchmark leaves behind: a table on the terminal, JSON, a picture, README's table."""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Result:
    """One run.  ``samples``: seconds by name and size in bytes; ``absent``: why, by contender."""

    ranks: int
    rounds: int
    versions: Mapping[str, str]
    samples: Mapping[str, Mapping[int, Sequence[float]]]
    absent: Mapping[str, str]

    @property
    def sizes(self) -> list[int]:
        return sorted({size for by_size in self.samples.values() for size in by_size})

    def median(self, name: str, size: int) -> float | None:
        """Median seconds, or None where ``name`` was not measured."""
        values = self.samples.get(name, {}).get(size)
        return statistics.median(values) if values else None

    def spread(self, name: str, size: int) -> float:
        """Half the interquartile range, in seconds."""
        values = self.samples[name][size]
        if len(values) < 2:
            return 0.0
        low, _, high = statistics.quantiles(values, n=4)
        return (high - low) / 2

    def ratio(self, name: str, peers: Sequence[str], size: int) -> float | None:
        """How many times as fast ``name`` is as the fastest of ``peers``."""
        own = self.median(name, size)
        others = [value for peer in peers if (value := self.median(peer, size)) is not None]
        return min(others) / own if own and others else None


def size_name(nbytes: int) -> str:
    """``26214400`` -> ``25 MB`` (powers of 1024)."""
    for unit, factor in (("MB", 2**20), ("KB", 2**10)):
        if nbytes >= factor:
            return f"{nbytes / factor:g} {unit}"
    return f"{nbytes} B"


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} us"


def _rows(result: Result) -> tuple[list[str], list[list[str]]]:
    """Head and rows of the table: the times of each contender, then how many times as fast shoal is."""

    def cell(name: str, size: int) -> str:
        median = result.median(name, size)
        return f"{_time(median)} ±{100 * result.spread(name, size) / median:.0f}%" if median else "absent"

    def times_as_fast(name: str, peers: Sequence[str], size: int) -> str:
        ratio = result.ratio(name, peers, size)
        if not ratio:
            return "-"
        return f"{ratio:.0f} x" if ratio >= 10 else f"{ratio:.2g} x"

    rows = [[name, *(cell(name, size) for size in result.sizes)] for name in result.samples]
    for name in (name for name in result.samples if name.startswith("shoal")):
        for label, peers in (("Gloo", ["Gloo"]), ("best MPI", ["MPICH", "Open MPI"])):
            ratios = [times_as_fast(name, peers, size) for size in result.sizes]
            if any(ratio != "-" for ratio in ratios):
                rows.append([f"{name} : {label}", *ratios])
    return ["", *(size_name(size) for size in result.sizes)], rows


def show(result: Result, console: Console) -> None:
    """Print the table."""
    head, rows = _rows(result)
    table = Table(title=f"all-reduce of fp32, {result.ranks} ranks, median of {result.rounds}")
    for column in head:
        table.add_column(column, justify="right" if column else "left", no_wrap=not column)
    for row in rows:
        table.add_row(*row, end_section=row[0] == list(result.samples)[-1])
    console.print(table)


def _machine() -> dict[str, str]:
    info = Path("/proc/cpuinfo")
    match = re.search(r"model name\s*: (.*)", info.read_text()) if info.exists() else None
    return {
        "processor": match[1] if match else platform.machine(),
        "cores": str(len(os.sched_getaffinity(0))),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }


def _draw(result: Result, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    for name in result.samples:
        points = [(size, median) for size in result.sizes if (median := result.median(name, size))]
        style = "o-" if name.startswith("shoal") else "s--"
        if points:
            axes.loglog(*zip(*points, strict=True), style, label=name)
    axes.set_xticks(result.sizes, [size_name(size) for size in result.sizes], rotation=30, fontsize=8)
    axes.minorticks_off()
    axes.set(
        xlabel="tensor",
        ylabel="seconds",
        title=f"all-reduce of fp32, {result.ranks} ranks, {_machine()['cores']} cores",
    )
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def markdown(result: Result) -> str:
    """README's table."""
    head, rows = _rows(result)
    machine = _machine()
    lines = [
        f"{result.ranks} ranks on {machine['cores']} cores ({machine['processor']}), "
        f"median of {result.rounds} samples on the slowest rank; the lower rows say how many times as fast "
        "shoal is.",
        "",
        "| " + " | ".join(head) + " |",
        "| --- |" + " ---: |" * (len(head) - 1),
        *("| " + " | ".join(row) + " |" for row in rows),
    ]
    for name, reason in result.absent.items():
        lines += ["", f"{name} is absent: {reason}"]
    return "\n".join(lines)


def replace_section(text: str, name: str, body: str) -> str:
    """``text`` with what stands between the markers of section ``name`` replaced by ``body``."""
    pattern = rf"(<!-- {re.escape(name)}: begin.*?-->\n).*?(<!-- {re.escape(name)}: end -->)"
    return re.sub(pattern, lambda match: f"{match[1]}{body}\n{match[2]}", text, flags=re.DOTALL)


def save(result: Result, out: Path, *, readme: bool, console: Console) -> None:
    """Write JSON and a picture to the folder ``out``, and on request the table into README.md."""
    out.mkdir(exist_ok=True)
    stem = f"all_reduce-n{result.ranks}"
    record = {"date": datetime.date.today().isoformat(), "machine": _machine(), **asdict(result)}
    (out / f"{stem}.json").write_text(json.dumps(record, indent=1) + "\n")
    _draw(result, out / f"{stem}.png")
    console.print(f"wrote {stem}.json and {stem}.png to {out}")
    if readme:
        page = ROOT / "README.md"
        page.write_text(replace_section(page.read_text(), stem, markdown(result)))
