"""The ``shoal bench`` command."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from ..signals import cleaning_up
from . import micro
from .case import (
    ITEMSIZE,
    OPERATIONS,
    QUICK_ROUNDS,
    RANKS,
    ROUNDS,
    Case,
    Size,
    default_cases,
    estimated_seconds,
)
from .contenders import BY_NAME, checkout, selected
from .race import Race
from .result import BenchResult, Setting
from .table import show

Read = Callable[[click.Context, click.Parameter, Any], Any]


def _list(read: Callable[[str], object]) -> Read:
    """A callback for a comma-separated option; `read` parses a word and may raise ValueError."""

    def callback(context: click.Context, parameter: click.Parameter, value: str | None) -> Any:
        if value is None:
            return None
        try:
            return tuple(read(word.strip()) for word in value.split(","))
        except ValueError as error:
            raise click.BadParameter(str(error)) from error

    return callback


def _one_of(words: Sequence[str]) -> Read:
    def read(word: str) -> str:
        if word not in words:
            raise ValueError(f"{word!r} is not one of {', '.join(words)}")
        return word

    return _list(read)


def _ranks(word: str) -> int:
    if not word.isdigit() or not 2 <= int(word) <= 256:
        raise ValueError(f"{word!r} is not a number of ranks from 2 to 256")
    return int(word)


@click.group(
    invoke_without_command=True,
    short_help="Measure collectives and compare with Gloo, MPI and the hardware limits.",
)
@click.option("--ranks", callback=_list(_ranks), metavar="N,...", help="Numbers of ranks.  [default: 2,4]")
@click.option(
    "--operations",
    callback=_one_of(OPERATIONS),
    metavar="NAME,...",
    help=f"Operations, from {', '.join(OPERATIONS)}.  [default: all]",
)
@click.option("--dtypes", callback=_one_of(tuple(ITEMSIZE)), metavar="NAME,...", help="fp32, bf16 or both.")
@click.option(
    "--sizes",
    callback=_list(Size.parse),
    metavar="SIZE,...",
    help="Bytes of the largest buffer of a rank: 8, 64K, 1M+4 or 1M@1 (offset by one element).",
)
@click.option(
    "--contenders",
    callback=_one_of(tuple(BY_NAME)),
    metavar="NAME,...",
    help=f"Contenders, from {', '.join(BY_NAME)}.  [default: all]",
)
@click.option("--rounds", type=click.IntRange(min=1), help="Number of samples per cell.  [default: 11]")
@click.option("--quick", is_flag=True, help="Two ranks, fp32, few sizes and rounds: one or two minutes.")
@click.option("--out", type=click.Path(path_type=Path), default=Path("out"), show_default=True)
@click.option(
    "--readme",
    is_flag=True,
    help="In a checkout of shoal: update the tables and the picture of docs/benchmark.md.",
)
@click.pass_context
def bench(
    context: click.Context,
    ranks: tuple[int, ...] | None,
    operations: tuple[str, ...] | None,
    dtypes: tuple[str, ...] | None,
    sizes: tuple[Size, ...] | None,
    contenders: tuple[str, ...] | None,
    rounds: int | None,
    quick: bool,
    out: Path,
    readme: bool,
) -> int:
    """Time collectives of shoal, torch.distributed with Gloo, and MPI, called from Python.

    All contenders run at once and take turns, size by size; the others sleep meanwhile. Results are checked.
    "floor" is the hardware limit: bare loops over shared memory. Writes bench.json and pictures to --out.
    docs/benchmark.md describes what is timed.

    Requires `pip install shoal[bench]`; without matplotlib no pictures are drawn. MPICH, Open MPI and mpi4py
    are not included: the command installs their wheels with pip into separate environments (build/bench in a
    checkout, else ~/.cache/shoal/bench).
    """
    if not find_spec("numpy"):
        raise click.ClickException("shoal bench needs numpy: pip install 'shoal[bench]'")
    context.with_resource(cleaning_up())
    names = context.obj = contenders or tuple(BY_NAME)
    if context.invoked_subcommand:
        return 0
    root = checkout()
    if readme and root is None:
        raise click.UsageError("--readme needs a checkout of shoal as the working directory")
    pictures = find_spec("matplotlib") is not None
    if not pictures:
        lacks = "matplotlib is not installed: pip install 'shoal[bench]'"
        if readme:
            raise click.ClickException(f"--readme draws a picture, and {lacks}")
        click.echo(f"shoal bench draws no pictures, because {lacks}", err=True)
    # Files and pipes have no width; this one fits six sizes.
    console = Console() if sys.stdout.isatty() else Console(width=132)
    dtypes = dtypes or (("fp32",) if quick else tuple(ITEMSIZE))
    cases = default_cases(operations or OPERATIONS, dtypes, sizes or (), quick=quick)
    result = BenchResult(rounds or (QUICK_ROUNDS if quick else ROUNDS))
    _run(cases, ranks or ((2,) if quick else RANKS), names, result, console)
    show(result, console)
    _save(result, out, console, pictures=pictures)
    if readme and root is not None:
        from .plot import update_page

        update_page(result, root)
    return int(any(name.startswith("shoal") for name, *_ in result.unavailable))


def _run(
    cases: Sequence[Case], ranks: Sequence[int], names: Sequence[str], result: BenchResult, console: Console
) -> None:
    variants = [variant for name in names for variant in BY_NAME[name].variants]

    def guess(case: Case, size: int) -> float:
        return estimated_seconds(case, size, sum(v.takes(case) for v in variants), result.rounds)

    total = sum(guess(case, size) for case in cases for size in ranks)
    console.print(f"{len(cases) * len(ranks)} cases, about {max(1, round(total / 60))} min")
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("starting", total=total)

        def say(text: str) -> None:
            progress.console.print(text, style="yellow", markup=False)

        for size in ranks:
            progress.update(task, description=f"{size} ranks")
            with Race(selected(names, size), size, result, say) as race:
                for case in cases:
                    progress.update(task, description=f"{size} ranks: {case}")
                    race.measure(case, result.rounds)
                    progress.advance(task, guess(case, size))
                if not result.futex:
                    race.futex(result.rounds)


def _save(result: BenchResult, out: Path, console: Console, *, pictures: bool) -> None:
    out.mkdir(parents=True, exist_ok=True)
    result.save(out / "bench.json")
    if not pictures:
        console.print(f"wrote bench.json to {out}")
        return
    from .plot import draw

    drawn: list[Setting] = [setting for setting in result.cells if setting.operation != "barrier"]
    for setting in drawn:
        draw(result, [setting], out / f"{setting.stem}.png")
    console.print(f"wrote bench.json and {len(drawn)} pictures to {out}")


for command in micro.COMMANDS:
    bench.add_command(command)
