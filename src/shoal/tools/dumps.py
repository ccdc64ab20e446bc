"""``shoal dumps``: the last operations of each rank and the pending calls of each worker, from dump files.

It does not import torch, to start quickly.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path

import click
from rich import box
from rich.console import Console
from rich.table import Table

from ..common.formatting import counted, printable, ranks_named
from . import call_dumps, torch_dumps
from .call_dumps import CallDump, place_of
from .dump_files import Dump, GroupDumps, read
from .findings import Finding, fail

#: width for files and pipes, where no line is folded
_WIDE = 1000


@click.command(short_help="Show the last operations of each rank, from the files of SHOAL_DUMP_DIR.")
@click.argument(
    "paths", metavar="FILE_OR_DIRECTORY...", nargs=-1, required=True, type=click.Path(path_type=Path)
)
@click.option(
    "--torch", "torch_directory", metavar="DIR", type=click.Path(path_type=Path),
    help="Also write the operations of groups as files of torch's flight recorder, which `torchfrtrace DIR` "
    "analyses, into this new or empty directory.",
)  # fmt: skip
def dumps(paths: tuple[Path, ...], torch_directory: Path | None) -> int:
    """Show the last operations of each group's ranks and which ranks are behind or wrote no file, and for RPC
    workers the calls that they wait for and serve, with cycles of workers that wait for one another.

    The files are written to SHOAL_DUMP_DIR by every rank when a group fails and by a worker when a call times
    out, and by `group.dump()` and `agent.dump()`. Of several files of a rank or worker, the latest counts.
    """
    groups, workers = sort(map(read, files(paths)))
    converted = _convert(groups, torch_directory) if torch_directory is not None else ""
    console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = _WIDE
    for (job, group, ranks), members in groups.items():
        console.print(f"group {group!r} of {counted(len(ranks), 'rank')}, job {job!r}")
        console.print(_table(members))
        _print_facts(console, findings(members, len(ranks)))
    for job, of_job in workers.items():
        console.print(f"{counted(len(of_job), 'worker')}, job {job!r}")
        console.print(call_dumps.table(of_job))
        _print_facts(console, call_dumps.findings(of_job))
    if converted:
        console.print(converted)
    return 0


def _print_facts(console: Console, found: Iterable[Finding]) -> None:
    for finding in found:
        console.print(printable(" ".join(finding.fact.split())))
    console.print()


#: job -> worker -> its latest dump
Workers = dict[str, dict[str, CallDump]]


def sort(found: Iterable[Dump | CallDump]) -> tuple[GroupDumps, Workers]:
    """Sort dumps by group or job, and keep the latest of each rank and worker."""
    groups: GroupDumps = {}
    workers: Workers = {}
    for dump in found:
        if isinstance(dump, CallDump):
            of_job = workers.setdefault(dump.job, {})
            if dump.worker not in of_job or of_job[dump.worker].time < dump.time:
                of_job[dump.worker] = dump
            continue
        members = groups.setdefault((dump.job, dump.group, tuple(dump.ranks)), {})
        if dump.rank not in members or members[dump.rank].time < dump.time:
            members[dump.rank] = dump
    return groups, workers


def _convert(found: GroupDumps, directory: Path) -> str:
    """Write files for torch's analyser, and return how to run it."""
    if not found:
        raise click.ClickException(
            "--torch: no dump of a group was given; torch's format has no calls of RPC"
        )
    if len(jobs := sorted({job for job, _, _ in found})) > 1:
        raise click.ClickException(
            f"--torch: the dumps are of several jobs: {', '.join(map(repr, jobs))}; give only the "
            "files of one, which begin with shoal-JOB-"
        )
    try:
        written = torch_dumps.write(found, directory)
    except OSError as error:
        raise click.ClickException(f"--torch {directory}: {error.strerror or error}") from None
    is_complete = all(len(members) == len(ranks) for (_, _, ranks), members in found.items())
    option = "" if is_complete else "--allow-incomplete-ranks "
    return f"wrote {counted(len(written), 'file')}: run torchfrtrace {option}{shlex.quote(str(directory))}"


def findings(members: dict[int, Dump], size: int) -> list[Finding]:
    """Describe problems of a group that only show when its ranks' dumps are combined."""
    found = []
    failed = [dump for dump in members.values() if dump.error is not None]
    if failed:
        first = min(failed, key=lambda dump: dump.time)
        assert first.error is not None
        found.append(fail(
            f"rank {first.rank} wrote first: {first.error.type}: {first.error.message}",
            f"docs/errors.md explains {first.error.type}; if it names ranks, look at these first",
        ))  # fmt: skip
    if absent := [rank for rank in range(size) if rank not in members]:
        found.append(fail(
            f"no file of {ranks_named(absent)}: dead, stopped, or in a call that holds the interpreter lock",
            "look at their output and exit codes; if their processes run, `py-spy dump --pid PID`",
        ))  # fmt: skip
    if differing := _first_difference(members.values()):
        found.append(fail(differing, "make all ranks call the same operations of a group in the same order"))
    most = max(dump.highest for dump in members.values())
    if behind := [rank for rank, dump in members.items() if dump.highest < most]:
        places = {rank: place_of(members[rank].stacks) for rank in behind}
        shown = "; ".join(f"rank {rank} in {place}" for rank, place in places.items() if place)
        found.append(fail(
            f"behind: {ranks_named(behind)}; operation {most} has been called elsewhere",
            "find out why they did not call it" + (f", from where they were: {shown}" if shown else ""),
        ))  # fmt: skip
    return found


def _first_difference(members: Iterable[Dump]) -> str:
    """Describe the first number under which ranks called different operations; "" if there is none."""
    called: dict[int, dict[str, list[int]]] = {}
    for dump in members:
        for entry in dump.entries:
            if entry.number >= 0:
                called.setdefault(entry.number, {}).setdefault(entry.kind, []).append(dump.rank)
    for number, kinds in sorted(called.items()):
        if len(kinds) > 1:
            who = "; ".join(f"{kind} on {ranks_named(ranks)}" for kind, ranks in kinds.items())
            return f"operation {number} is not the same everywhere: {who}"
    return ""


def files(paths: Sequence[Path]) -> list[Path]:
    """Return the files in ``paths`` and, for directories, the dumps in them."""
    found: list[Path] = []
    for path in paths:
        if not path.is_dir():
            found.append(path)
        elif inside := sorted(path.glob("shoal-*.json")):
            found += inside
        else:
            raise click.ClickException(f"{path}: no dump found in this directory")
    return found


def _table(members: dict[int, Dump]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("rank", justify="right")
    for heading in ("group", "last completed", "not completed", "for s", "main thread"):
        table.add_column(heading, justify="right" if heading == "for s" else "left", overflow="fold")
    for rank, dump in sorted(members.items()):
        entry = dump.unfinished
        age = f"{(dump.now - entry.submitted) / 1e9:.1f}" if entry else ""
        cells = rank, dump.state, dump.completed or "", entry or "", age, place_of(dump.stacks)
        table.add_row(*(printable(str(cell)) for cell in cells))
    return table
