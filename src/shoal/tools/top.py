"""``shoal top``: a live table of the ranks that run on this machine, and of the others of their jobs.

It does not import torch, to start quickly.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence

import click
import msgspec
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from ..common.formatting import counted, printable
from ..rank_sampler import HELD_UP, RankRow, Sampler
from .options import FiniteRange
from .rank_table import by_job, culprits

#: seconds between the two samples of ``--once``
_ONCE_INTERVAL_S = 0.3
#: seconds of waiting from which a rank is named as the cause
_NAMED_FROM_S = 0.5
#: shares from which a number is drawn in yellow and in red
_NOTICEABLE, _HIGH = 0.1, 0.5
#: the part of the name of a split group that only makes it unique
_UNIQUE_PART = re.compile(r"(?<=split:)[0-9a-f]+:")
_NONE = "no rank of shoal runs on this machine that you may see"
#: width for files and pipes, where no line is folded
_WIDE = 1000


@click.command(short_help="Show live what each rank does and whom it waits for.")
@click.option("--job", metavar="NAME", default="", help="Show only jobs whose name begins with NAME.")
@click.option(
    "--interval",
    metavar="SECONDS",
    type=FiniteRange(min=0.1, max=3600.0),
    default=2.0,
    show_default=True,
    help="Seconds between two updates.",
)
@click.option(
    "--once", is_flag=True, help="Print one table and exit; this is the default if stdout is no terminal."
)
@click.option("--json", "as_json", is_flag=True, help="With --once: print a JSON object instead of a table.")
def top(job: str, interval: float, once: bool, as_json: bool) -> int:
    """Show what each rank on this machine does: its state, its pending operation, the rank that it waits for,
    rates, latencies and memory. Ranks of the same jobs on other hosts are shown too, with what their
    heartbeats report.

    The programs need not cooperate, and may hang or be stopped. With --once the exit code is 1 if no rank
    runs. Press Ctrl-C to end.
    """
    if as_json and not once:
        raise click.UsageError("--json needs --once")
    console = Console(highlight=False, markup=False, emoji=False)
    sampler = Sampler(job)
    if once or not console.is_terminal:
        sampler.rows()
        time.sleep(_ONCE_INTERVAL_S)
        rows = sampler.rows()
        if as_json:
            click.echo(_to_json(rows))
        else:
            if not console.is_terminal:
                console.width = _WIDE
            console.print(_screen(rows))
        return 0 if rows else 1
    sampler.rows()
    try:
        time.sleep(_ONCE_INTERVAL_S)
        with Live(_screen(sampler.rows()), console=console, screen=True, auto_refresh=False) as live:
            while True:
                time.sleep(interval)
                live.update(_screen(sampler.rows(), console.height), refresh=True)
    except KeyboardInterrupt:
        return 0


def _to_json(rows: Sequence[RankRow]) -> str:
    causes = [
        {"job": job, "rank": each.rank, "waiting": [row.rank for row in each.waiting], "text": str(each)}
        for job, of_job in by_job(rows)
        for each in culprits(of_job, _NAMED_FROM_S)
    ]
    return msgspec.json.encode({"schema": "shoal.top/1", "ranks": rows, "causes": causes}).decode()


def _screen(rows: Sequence[RankRow], height: int = 0) -> Group | Text:
    """The tables of all jobs; ``height`` is that of the terminal, 0: no limit."""
    if not rows:
        return Text(_NONE)
    parts: list[Text] = []
    for job, of_job in by_job(rows):
        parts.append(_heading(job, of_job))
        shown = of_job
        if height and len(rows) + 6 > height:
            # Rows that need attention come first, as the rest may not fit.
            shown = sorted(
                of_job, key=lambda row: (row.state not in HELD_UP, -round(row.awaited, 1), row.rank)
            )
        parts.append(_table(shown))
        parts += [Text(printable(str(each)), style="bold") for each in culprits(of_job, _NAMED_FROM_S)]
        parts.append(Text(""))
    return Group(*parts)


def _heading(job: str, rows: Sequence[RankRow]) -> Text:
    here = sum(not row.remote for row in rows)
    size = max(row.size for row in rows)
    rate = sum(row.bytes_per_s for row in rows)
    where = "" if here == size else f", {here} of them on this host"
    return Text(f"job {printable(job)!r}: {counted(size, 'rank')}{where}; {_bytes(rate)}/s")


#: heading of each column, and whether it is on the left
_COLUMNS = {
    "rank": False, "pid": False, "state": True, "call": True, "for": False, "waits for": False, "op/s": False,
    "MB/s": False, "waiting": False, "awaited": False, "p50": False, "p99": False, "memory": False,
}  # fmt: skip


def _table(rows: Sequence[RankRow]) -> Text:
    """The table as one text: rich's tables take ten times as long for many rows."""
    cells = [_cells(row) for row in rows]
    columns = zip(_COLUMNS, *([text for text, _ in row] for row in cells), strict=True)
    widths = [max(map(len, column)) for column in columns]
    lefts = list(_COLUMNS.values())
    table = Text(no_wrap=True, overflow="ellipsis")
    for line in ([(heading, "bold") for heading in _COLUMNS], *cells):
        for (text, style), width, left in zip(line, widths, lefts, strict=True):
            table.append(f" {text:{'<' if left else '>'}{width}} ", style or None)
        table.append("\n")
    return table


def _cells(row: RankRow) -> list[tuple[str, str]]:
    """The text and the style of each column."""
    call = f"{row.call} #{row.number}" if row.number is not None else row.call
    if row.group not in ("", "world"):
        call = f"{_UNIQUE_PART.sub('', row.group.removeprefix('world/'))}: {call}"
    return [
        (str(row.rank), ""),
        (str(row.pid), ""),
        (row.state, "bold red" if row.state in HELD_UP else ""),
        (printable(call), ""),
        ("" if row.age_s is None else _seconds(row.age_s), ""),
        ("" if row.waits_for is None else str(row.waits_for), ""),
        (f"{row.operations_per_s:,.0f}", ""),
        (f"{row.bytes_per_s / 1e6:,.1f}", ""),
        _percent(row.waiting),
        _percent(row.awaited),
        ("" if row.p50_s is None else _seconds(row.p50_s), ""),
        ("" if row.p99_s is None else _seconds(row.p99_s), ""),
        (_bytes(row.shared_memory if row.memory is None else row.memory), ""),
    ]


def _percent(share: float) -> tuple[str, str]:
    style = "red" if share >= _HIGH else "yellow" if share >= _NOTICEABLE else ""
    return f"{100 * share:.0f} %", style


def _seconds(seconds: float) -> str:
    """A time with two or three digits, such as ``840 us``."""
    for unit, factor in (("us", 1e6), ("ms", 1e3)):
        if seconds * factor < 1000:
            return f"{seconds * factor:.{1 if seconds * factor < 10 else 0}f} {unit}"
    return f"{seconds:.1f} s"


def _bytes(count: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
