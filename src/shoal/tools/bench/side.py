"""``shoal bench async | split | late | memory``: small benchmarks with one figure each."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from .contenders import entries
from .environments import Absent
from .machine import machine
from .running import RunningContender, Unmeasured
from .table import time_name

_ROUNDS = 11
_TENSORS, _TENSOR_BYTES = 64, 64 * 2**10

Answers = list[list[dict[str, Any]]]


def _ask(names: Sequence[str], ranks: int, rounds: int, name: str, **arguments: Any) -> dict[str, Answers]:
    """Ask all contenders in turns; return their answers by name, one list per round, in rank order."""
    running: list[RunningContender] = []
    answers: dict[str, Answers] = {}
    try:
        for contender in entries(names, ranks):
            try:
                running.append(RunningContender(contender, ranks))
            except Absent as reason:
                click.echo(f"{contender.name} is not available: {reason}", err=True)
        for _ in range(rounds):
            for one in list(running):
                label = one.contender.name
                try:
                    answers.setdefault(label, []).append(one.ask("side", name=name, **arguments))
                except (Absent, Unmeasured) as reason:
                    click.echo(f"{label} failed: {reason}", err=True)
                    running.remove(one)
                    answers.pop(label, None)
                    one.stop(kill=True)
    except BaseException:
        _stop(running, kill=True)
        raise
    _stop(running, kill=False)
    return answers


def _stop(running: Iterable[RunningContender], *, kill: bool) -> None:
    for one in running:
        one.stop(kill=kill)


def _slowest(answers: Answers, key: str) -> float:
    return float(statistics.median(max(answer[key] for answer in round_) for round_ in answers))


def _report(
    title: str, head: Sequence[str], rows: Iterable[Sequence[str]], answers: object, out: Path
) -> None:
    table = Table(title=title, title_justify="left")
    for i, name in enumerate(head):
        table.add_column(name, justify="right" if i else "left")
    for row in rows:
        table.add_row(*row)
    Console().print(table)
    out.mkdir(parents=True, exist_ok=True)
    name = str(click.get_current_context().info_name)
    record = {"machine": machine(), "answers": answers}
    (out / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")


def _out() -> Path:
    parent = click.get_current_context().parent
    assert parent is not None
    return Path(parent.params["out"])


def _chosen(context: click.Context, names: Sequence[str]) -> list[str]:
    return [name for name in names if name in context.obj]


@click.command("async")
@click.option("--ranks", type=click.IntRange(2, 256), default=2, show_default=True)
@click.pass_context
def together(context: click.Context, ranks: int) -> None:
    """64 all-reduces of 64 KB: all submitted at once, compared with one after another."""
    names = _chosen(context, ["shoal", "shoal-tcp", "gloo"])
    answers = _ask(names, ranks, _ROUNDS, "together", count=_TENSORS, nbytes=_TENSOR_BYTES, repeat=5)
    rows = []
    for name, rounds in answers.items():
        both, single = _slowest(rounds, "together"), _slowest(rounds, "one by one")
        rows.append([name, time_name(both), time_name(single), f"{single / both:.2g} x"])
    title = f"64 all-reduces of 64 KB, {ranks} ranks, median of {_ROUNDS}"
    _report(title, ["", "submitted, then waited for", "one after another", "gain"], rows, answers, _out())


@click.command("split")
@click.option("--ranks", type=click.IntRange(2, 256), default=8, show_default=True)
@click.pass_context
def split(context: click.Context, ranks: int) -> None:
    """Creation of a group of all ranks: group.split compared with new_group of Gloo."""
    answers = _ask(_chosen(context, ["shoal", "shoal-tcp", "gloo"]), ranks, _ROUNDS, "split")
    rows = [[name, time_name(_slowest(rounds, "seconds"))] for name, rounds in answers.items()]
    _report(f"a new group, {ranks} ranks, median of {_ROUNDS}", ["", "time"], rows, answers, _out())


@click.command("late")
@click.option("--ranks", type=click.IntRange(2, 256), default=4, show_default=True)
@click.option("--seconds", type=click.FloatRange(min=0), default=1.0, show_default=True)
@click.pass_context
def late(context: click.Context, ranks: int, seconds: float) -> None:
    """CPU time of ranks that wait in an all-reduce for a late rank."""
    names = ["shoal", "shoal-tcp", "gloo", "mpich", "openmpi"]
    answers = _ask(_chosen(context, names), ranks, 3, "late", seconds=seconds)
    rows = []
    for name, rounds in answers.items():
        waiting = [[answer["share"] for answer in round_[:-1]] for round_ in rounds]
        rows.append([name, f"{statistics.median(max(shares) for shares in waiting):.1%}"])
    title = f"share of a core that a waiting rank uses, {ranks} ranks, one late by {seconds:g} s"
    _report(title, ["", "the busiest waiting rank"], rows, answers, _out())


@click.command("memory")
@click.option("--ranks", type=click.IntRange(2, 256), default=4, show_default=True)
@click.pass_context
def memory(context: click.Context, ranks: int) -> None:
    """Memory of idle ranks (unique set size), minus that of a process that has only imported torch."""
    answers = _ask(_chosen(context, ["shoal", "shoal-tcp", "gloo"]), ranks, 1, "memory", idle=0.5)
    rows = [[name, f"{_slowest(rounds, 'bytes') / 2**20:.1f} MB"] for name, rounds in answers.items()]
    _report(f"unique memory of an idle rank, {ranks} ranks", ["", "the largest rank"], rows, answers, _out())


COMMANDS = (together, split, late, memory)
