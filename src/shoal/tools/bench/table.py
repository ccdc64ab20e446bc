"""Tables of times and ratios, for the terminal and in Markdown."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from ...common.formatting import format_duration
from .case import REDUCTIONS, Size
from .contenders import FLOOR, MPI, OWN_VARIANTS, PEERS
from .result import BenchResult, Setting, description

#: width of the column of names, and of each other column
_NAME, _COLUMN = 33, 16


def size_name(size: Size) -> str:
    """``1 MB + 4 B @1``; powers of 1024."""
    text = str(size)
    whole, _, offset = text.partition("@")
    whole, _, rest = whole.partition("+")
    name = f"{whole[:-1]} {whole[-1]}B" if whole[-1] in "KMG" else f"{whole} B"
    return name + (f" + {rest} B" if rest else "") + (f" @{offset}" if offset else "")


def _rate(ratio: float | None) -> str:
    if ratio is None:
        return "-"
    return f"{ratio:.0f} x" if ratio >= 10 else f"{ratio:.2g} x"


def rows(result: BenchResult, setting: Setting, sizes: Sequence[Size]) -> list[list[str]]:
    """The times of each variant, then the speedups of shoal's variants over the others and the floor."""

    def cell(name: str, size: Size) -> str:
        found = result.find(setting, size, name)
        return f"{format_duration(found.median)} ±{100 * found.spread:.0f}%" if found else "-"

    names = result.names(setting)
    table = [[name, *(cell(name, size) for size in sizes)] for name in names]
    for name in (name for name in OWN_VARIANTS if name in names):
        for label, others in (("Gloo", ["Gloo"]), ("best MPI", MPI), ("floor", [FLOOR])):
            ratios = [_rate(result.ratio(setting, size, name, others)) for size in sizes]
            if any(ratio != "-" for ratio in ratios):
                table.append([f"{name} : {label}", *ratios])
    return table


def errors(result: BenchResult, setting: Setting) -> str:
    """The largest relative error of each contender, for reductions in bf16; else empty."""
    if setting.dtype != "bf16" or setting.operation not in REDUCTIONS:
        return ""
    largest = {
        name: max(cell.error for by_name in result.cells[setting].values() if (cell := by_name.get(name)))
        for name in result.names(setting)
        if name in (*OWN_VARIANTS, *PEERS)
        and any(result.find(setting, size, name) for size in result.sizes(setting))
    }
    return "largest relative error: " + ", ".join(f"{name} {error:.3%}" for name, error in largest.items())


def show(result: BenchResult, console: Console) -> None:
    """Print all tables, split to the width of the terminal."""
    columns = max(1, (console.width - _NAME) // _COLUMN)
    for setting in result.cells:
        sizes = result.sizes(setting)
        for at in range(0, len(sizes), columns):
            piece = sizes[at : at + columns]
            body = [row for row in rows(result, setting, piece) if any(cell != "-" for cell in row[1:])]
            table = Table(title=str(setting) if at == 0 else None, title_justify="left")
            table.add_column("", no_wrap=True)
            for size in piece:
                table.add_column(size_name(size), justify="right", no_wrap=True)
            times = [row for row in body if " : " not in row[0]]
            for row in body:
                table.add_row(*row, end_section=row is times[-1])
            console.print(table)
        if text := errors(result, setting):
            console.print(text)
    for line in facts(result):
        console.print(line, markup=False)


def facts(result: BenchResult) -> list[str]:
    """The figures measured once: memory bandwidth and wake-up latency."""
    found = []
    for setting in result.cells:
        speeds = {
            size: size.nbytes / cell.median / 1e9
            for size in result.sizes(setting)
            if size.nbytes >= 2**20 and not size.offset and (cell := result.find(setting, size, "memcpy"))
        }
        if speeds:
            list_of = ", ".join(f"{size_name(size)} {speed:.3g} GB/s" for size, speed in speeds.items())
            found.append(f"memcpy in each of {setting.ranks} ranks at once: {list_of}")
    if result.futex:
        middle = sorted(result.futex)[len(result.futex) // 2]
        found.append(f"futex round trip between two processes: {format_duration(middle)}")
    return found


def markdown(result: BenchResult, setting: Setting, sizes: Sequence[Size]) -> str:
    """Return the table of one setting for docs/benchmark.md."""
    body = rows(result, setting, sizes)
    lines = [
        *textwrap.wrap(
            f"`{setting.operation}` of {setting.dtype}, {setting.ranks} ranks on {description()}: median of "
            f"{result.rounds} samples on the slowest rank, ± half the interquartile range. "
            "The lower rows say how many times as fast shoal is.",
            width=110,
        ),
        "",
        "| " + " | ".join(["", *(size_name(size) for size in sizes)]) + " |",
        "| --- |" + " ---: |" * len(sizes),
        *("| " + " | ".join(row) + " |" for row in body),
    ]
    reasons = {
        name: reason
        for name, ranks, case, reason in result.unavailable
        if ranks == setting.ranks and not case
    }
    for name, reason in reasons.items():
        lines += ["", f"{name} is not available: {reason}"]
    return "\n".join(lines)
