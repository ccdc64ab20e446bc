"""``shoal doctor``: the table of checks, and their output."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import click
import msgspec
from rich import box
from rich.console import Console
from rich.table import Table

from ...common.formatting import counted, describe_error, encodable, printable
from ...errors import UsageError
from ..findings import Finding, fail
from ..options import FiniteRange
from . import dump_findings, machine, network, self_test, settings, software
from .hosts import HostsReport, check_hosts
from .job import check_job

SCHEMA = "shoal.doctor/1"
#: topic -> its checks; each returns a finding or several
CHECKS: dict[str, list[Callable[[], Finding | list[Finding]]]] = {
    "software": [software.python, software.shoal, software.core, software.torch],
    "this machine": [
        machine.cores, machine.threads, machine.memory, machine.shared_memory_directory, machine.open_files,
        machine.processes, machine.connection_backlog, machine.temporary_files,
    ],
    "kernel": [machine.memfd, machine.pidfd, machine.robust_list, machine.proc],
    "settings": [
        settings.variables, settings.launcher, settings.secret, settings.dump_directory,
        settings.trace_directory,
    ],
    "network": [
        network.loopback, network.interfaces, network.host_name, network.store, network.offered_address,
    ],
    "libraries": [software.mpi, software.cuda, software.nccl, software.nccl_variables],
    "self test": [self_test.two_ranks],
}  # fmt: skip
_COLORS = {"ok": "green", "warn": "yellow", "fail": "red"}
#: rows of the table of pairs; of more, the failed and the slowest ones are shown
_MAX_ROWS = 60
#: width for files and pipes, where no line is folded
_WIDE = 1000
#: value of --hosts without a number
_BY_LAUNCHER = "launcher"


@click.command(short_help="Check this machine, the connections between hosts, or dump files.")
@click.argument("dumps", metavar="[DUMP]...", nargs=-1, type=click.Path(path_type=Path))
@click.option(
    "--hosts",
    metavar="[N]",
    is_flag=False,
    flag_value=_BY_LAUNCHER,
    help="Check the connections between N hosts; run it on each of them.  [default: the number that the "
    "launcher sets]",
)
@click.option(
    "--store",
    metavar="URL",
    help="With --hosts: where the hosts meet, such as tcp://FIRST-HOST:29400, where the first host serves "
    "the store.  [default: SHOAL_STORE, or set by the launcher]",
)
@click.option(
    "--timeout",
    type=FiniteRange(min=0, min_open=True),
    default=60.0,
    metavar="SECONDS",
    show_default=True,
    help="With --hosts: time to wait for the other hosts.",
)
@click.option(
    "--job",
    metavar="[NAME]",
    is_flag=False,
    flag_value="",
    help="Check the ranks that run on this machine, of jobs whose name begins with NAME: which one do the "
    "others wait for?",
)
@click.option("--json", "as_json", is_flag=True, help="Print one line of JSON.")
def doctor(
    dumps: tuple[Path, ...],
    hosts: str | None,
    store: str | None,
    timeout: float,
    job: str | None,
    as_json: bool,
) -> int:
    """Check this machine: software, limits, kernel, settings, network and libraries, and run two ranks on it.

    With --hosts, on each host: check the connection, the latency and the clock offset of every pair of hosts.
    The process of the first host prints all pairs, the others print their own.

    With --job: find the rank for which others of a running job wait now. The job need not cooperate, and may
    hang.

    With files or directories of dumps (SHOAL_DUMP_DIR): print what happened, and what to do.

    Each line is a fact, marked ok, warn or fail, and below it what to do. The exit code is 1 if one is marked
    fail.
    """
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    if bool(dumps) + bool(hosts or store) + (job is not None) > 1:
        raise UsageError("DUMP, --hosts and --job are different checks; start one of them")
    if store and not hosts:
        raise UsageError("--store is an option of --hosts")
    report = HostsReport([])
    found: Iterable[Finding]
    if hosts:
        report = check_hosts(store, _number(hosts), timeout)
        found = [each.placed("hosts", "hosts") for each in report.findings]
    elif job is not None:
        found = check_job(job)
    else:
        found = dump_findings.read_all(dumps) if dumps else run_checks()
    console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = _WIDE
    if as_json:
        shown = list(found)
        _print_json(shown, report)
    else:
        shown = list(_printed(console, found))
        if report.pairs:
            console.print(_table(report))
        counts = (counted(sum(each.status == status for each in shown), word) for status, word in (
            ("warn", "warning"), ("fail", "failure"),
        ))  # fmt: skip
        console.print("\n" * (not report.pairs) + ", ".join(counts))
    return int(any(each.status == "fail" for each in shown))


def run_checks() -> Iterator[Finding]:
    """Run all checks of this machine, one after another."""
    for topic, checks in CHECKS.items():
        for check in checks:
            try:
                results = check()
            except Exception as error:
                results = fail(
                    f"this check raised {describe_error(error)}",
                    "mount /proc and /sys if they are missing; otherwise report this line as a bug",
                )
            for each in results if isinstance(results, list) else [results]:
                yield each.placed(topic, check.__name__)


def _number(hosts: str) -> int | None:
    if hosts == _BY_LAUNCHER:
        return None
    if not re.fullmatch("[1-9][0-9]{0,8}", hosts):
        raise UsageError(f"--hosts {hosts!r}: expected the number of hosts")
    return int(hosts)


def _printed(console: Console, found: Iterable[Finding]) -> Iterator[Finding]:
    """Print each finding as it comes."""
    topic = None
    for each in found:
        if each.topic != topic:
            console.print(("" if topic is None else "\n") + _line(each.topic), style="bold")
            topic = each.topic
        console.print(f"  {each.status:5}", style=_COLORS[each.status], end="")
        console.print(_line(each.fact))
        if each.advice:
            console.print(f"       -> {_line(each.advice)}")
        yield each


def _line(text: str) -> str:
    return printable(encodable(" ".join(text.split())))


def _print_json(shown: list[Finding], report: HostsReport) -> None:
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "ok": all(each.status != "fail" for each in shown),
        "findings": shown,
    }
    if report.names:
        document["pairs"] = [
            {"from": report.names[one], "to": report.names[other], **msgspec.to_builtins(measurement)}
            for (one, other), measurement in sorted(report.pairs.items())
        ]
    for each in shown:
        each.fact, each.advice, each.topic = map(encodable, (each.fact, each.advice, each.topic))
    click.echo(msgspec.json.encode(document).decode())


def _table(report: HostsReport) -> Table:
    rows = sorted(report.pairs.items())
    title = None
    if len(rows) > _MAX_ROWS:
        rows.sort(key=lambda row: (not row[1].failure, -row[1].round_trip_us))
        title = f"{_MAX_ROWS} of {len(rows)} connections: the failed and the slowest ones"
        rows = rows[:_MAX_ROWS]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=title, title_justify="left")
    for heading in ("from", "to", "address", "round trip us", "clock offset us", "error us"):
        table.add_column(heading, justify="right" if heading.endswith("us") else "left", overflow="fold")
    for (one, other), each in rows:
        numbers = (each.round_trip_us, each.clock_offset_us, each.clock_error_us)
        shown = ("failed", "", "") if each.failure else (f"{number:.0f}" for number in numbers)
        table.add_row(report.names[one], report.names[other], each.address, *shown)
    return table
