"""``shoal bench async | split | late | memory``: small benchmarks with one figure each."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click
from rich.console import Console
from rich.table import Table

from ...common.formatting import format_duration
from ..options import FiniteRange
from .contenders import selected
from .race import Answers, Race
from .result import BenchResult, machine

F = TypeVar("F", bound=Callable[..., Any])

_ROUNDS = 11
#: contenders with asynchronous operations and groups
_ASYNCHRONOUS = ("shoal", "shoal-tcp", "gloo")


def _ask(names: Sequence[str], ranks: int, rounds: int, name: str, **arguments: Any) -> dict[str, Answers]:
    """Run a benchmark on those of the contenders ``names`` that the command line selects, in turns."""
    contenders = selected([each for each in names if each in click.get_current_context().obj], ranks)
    with Race(contenders, ranks, BenchResult(rounds), lambda text: click.echo(text, err=True)) as race:
        return race.micro(rounds, name, **arguments)


def _slowest(answers: Answers, key: str) -> float:
    return float(statistics.median(max(answer[key] for answer in round_) for round_ in answers))


def _report(
    title: str, head: Sequence[str], rows: Iterable[Sequence[str]], answers: dict[str, Answers]
) -> None:
    """Print a table, and write the answers to the folder of ``shoal bench --out``."""
    table = Table(title=title, title_justify="left")
    for i, name in enumerate(head):
        table.add_column(name, justify="right" if i else "left")
    for row in rows:
        table.add_row(*row)
    Console().print(table)
    context = click.get_current_context()
    assert context.parent is not None
    out = Path(context.parent.params["out"])
    out.mkdir(parents=True, exist_ok=True)
    record = {"machine": machine(), "answers": answers}
    (out / f"{context.info_name}.json").write_text(json.dumps(record, indent=1) + "\n")


def _ranks_option(default: int) -> Callable[[F], F]:
    return click.option("--ranks", type=click.IntRange(2, 256), default=default, show_default=True)


@click.command("async")
@_ranks_option(2)
def together(ranks: int) -> None:
    """64 all-reduces of 64 KB: all submitted at once, compared with one after another."""
    count, nbytes = 64, 64 * 2**10
    answers = _ask(_ASYNCHRONOUS, ranks, _ROUNDS, "together", count=count, nbytes=nbytes, repeat=5)
    rows = []
    for name, rounds in answers.items():
        both, single = _slowest(rounds, "together"), _slowest(rounds, "one by one")
        rows.append([name, format_duration(both), format_duration(single), f"{single / both:.2g} x"])
    title = f"64 all-reduces of 64 KB, {ranks} ranks, median of {_ROUNDS}"
    _report(title, ["", "submitted, then waited for", "one after another", "gain"], rows, answers)


@click.command("split")
@_ranks_option(8)
def split(ranks: int) -> None:
    """Creation of a group of all ranks: group.split compared with new_group of Gloo."""
    answers = _ask(_ASYNCHRONOUS, ranks, _ROUNDS, "split")
    rows = [[name, format_duration(_slowest(rounds, "seconds"))] for name, rounds in answers.items()]
    _report(f"a new group, {ranks} ranks, median of {_ROUNDS}", ["", "time"], rows, answers)


@click.command("late")
@_ranks_option(4)
@click.option("--seconds", type=FiniteRange(min=0), default=1.0, show_default=True)
def late(ranks: int, seconds: float) -> None:
    """CPU time of ranks that wait in an all-reduce for a late rank."""
    answers = _ask((*_ASYNCHRONOUS, "mpich", "openmpi"), ranks, 3, "late", seconds=seconds)
    rows = []
    for name, rounds in answers.items():
        waiting = [[answer["share"] for answer in round_[:-1]] for round_ in rounds]
        rows.append([name, f"{statistics.median(max(shares) for shares in waiting):.1%}"])
    title = f"share of a core that a waiting rank uses, {ranks} ranks, one late by {seconds:g} s"
    _report(title, ["", "the busiest waiting rank"], rows, answers)


@click.command("memory")
@_ranks_option(4)
def memory(ranks: int) -> None:
    """Memory of idle ranks (unique set size), minus that of a process that has only imported torch."""
    answers = _ask(_ASYNCHRONOUS, ranks, 1, "memory", idle=0.5)
    rows = [[name, f"{_slowest(rounds, 'bytes') / 2**20:.1f} MB"] for name, rounds in answers.items()]
    _report(f"unique memory of an idle rank, {ranks} ranks", ["", "the largest rank"], rows, answers)


COMMANDS = (together, split, late, memory)
