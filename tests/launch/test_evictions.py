"""Processes without which the other ranks go on are named, ended and replaced."""

from __future__ import annotations

import math
import re
import signal
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.failure_report import STACKS, Report
from shoal.launch.job.evictions import EXIT_TIMEOUT_S, KILL_DELAY_S, STACKS_S, Evictions
from shoal.launch.ranks.reports import MeetingTable
from tests.support.quick_launcher import QuickLauncher

from .conftest import Workshop
from .test_hosts import far as far
from .test_respawn import PRELUDE

#: the launcher, with shorter waits
LAUNCHER = """
import sys
from shoal.launch import cli
from shoal.launch.job import evictions
from shoal.launch.ranks import slots
evictions.EXIT_TIMEOUT_S = 0.1
evictions.KILL_DELAY_S = slots.MIN_DELAY_S = 0.2
cli.main()
"""

#: rank 1 hangs and ignores SIGTERM, rank 0 reports that it is evicted
SCRIPT = """
from shoal import failure_report
def stuck():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    tell("hangs")
    while True:
        time.sleep(60)
if joins:
    join()
    tell("replaced")
elif slot == "1":
    stuck()
else:
    await_file("hangs")
    failure_report.evicted([1])
    await_file("replaced")
"""


@pytest.mark.parametrize("hosts", [False, True])
def test_an_evicted_process_writes_its_stacks_is_ended_and_replaced(far: Workshop, hosts: bool) -> None:
    (far.path / "script.py").write_text(PRELUDE + textwrap.dedent(SCRIPT))
    options = ["--hosts", "h1:2"] if hosts else ["-n", "2"]
    command = ["run", "--min", "1", "--respawn", *options, "script.py"]
    code, _, err = far.end(far.start_process([sys.executable, "-c", LAUNCHER, *command]))
    lines = err.decode().splitlines()
    on = " on h1" if hosts else ""
    assert code == 0, lines
    assert re.match(rf"shoal: rank 1{on} \(process \d+\) is evicted: the other ranks go on without", lines[0])
    assert any(re.match(r"\[1\]   File .*script.py\", line \d+ in stuck$", line) for line in lines), lines
    assert f"shoal: rank 1{on} failed: evicted by the other ranks; killed by SIGKILL" in lines[-2]
    assert lines[-1] == "shoal: 2 of 2 ranks finished; rank 1 was killed by SIGKILL; rank 1.1 finished"


#: the group's timeout is shorter than that of a vote
HANGS = """
import os, time
os.environ["SHOAL_VOTE_TIMEOUT"] = "0.6"
import torch
import shoal
with shoal.init() as world:
    group = world.subgroup(range(3), timeout=0.3)
    group.barrier(timeout=60).wait()
    if group.rank == 1:
        time.sleep(600)
    try:
        group.barrier().wait()
    except shoal.OperationTimeout:
        group = group.rebuild()
    assert (group.size, group.rebuilt.lost) == (2, (1,))
"""


def test_the_healthy_ranks_finish_although_the_timeout_is_shorter_than_that_of_a_vote(
    launcher: QuickLauncher, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(HANGS)
    code, _, err = launcher.run(3, str(script), min_ranks=1)
    assert code == 0, err
    assert re.search(r"^\[1\]   File .*script.py\", line 10 in <module>$", err, re.MULTILINE), err
    assert err.endswith("shoal: 2 of 3 ranks finished; rank 1 was killed by SIGTERM\n")


class Process:
    """What evictions use of a rank."""

    def __init__(self, *reports: Report) -> None:
        self.status: int | None = None
        self.evicted = False
        self.reports = reports
        self.sent: list[int] = []
        self.index = 0
        self.notices: list[Report] = []

    def take_notices(self) -> list[Report]:
        return self.notices

    def send(self, number: int) -> None:
        self.sent.append(number)

    send_group = send


def signals(grace: float, process: Process, until: float = 100.0) -> Iterator[tuple[float, list[int]]]:
    evictions = Evictions(grace, lambda rank: None, lambda rank, report: None)
    evictions.add(process, 10.0)  # type: ignore[arg-type]
    evictions.add(process, 10.5)  # type: ignore[arg-type]
    while (at := evictions.next_at()) < until:
        evictions.tick(at)
        yield round(at - 10.0, 3), list(process.sent)
    process.status = 0
    evictions.tick(until)
    assert evictions.next_at() == math.inf


@pytest.mark.parametrize("grace", [2.0, math.inf])
def test_sigterm_follows_the_stacks_and_sigkill_follows_after_the_grace(grace: float) -> None:
    term = EXIT_TIMEOUT_S + STACKS_S
    kill = term + min(grace, KILL_DELAY_S)
    sent = [STACKS, signal.SIGTERM, signal.SIGKILL]
    expected = [(EXIT_TIMEOUT_S, sent[:1]), (term, sent[:2]), (kill, sent)]
    assert list(signals(grace, Process())) == [(pytest.approx(at), these) for at, these in expected]


def test_a_process_that_ends_by_itself_gets_no_signal() -> None:
    assert list(signals(1.0, Process(), until=10.5)) == []


def test_of_two_ranks_that_evict_each_other_the_first_report_counts() -> None:
    ranks = [Process(), Process()]
    for index, rank in enumerate(ranks):
        rank.index, rank.notices = index, [Report("evicted", 1.0, (1 - index,))]
    announced: list[object] = []
    evictions = Evictions(1.0, announced.append, lambda rank, report: None)
    for rank in ranks:
        evictions.take_notices(rank, ranks)  # type: ignore[arg-type]
    evictions.tick(math.inf)
    assert announced == [ranks[1]]
    assert [rank.evicted for rank in ranks] == [False, True]


def test_a_rank_that_has_just_left_its_group_is_not_evicted() -> None:
    assert list(signals(1.0, Process(Report("left", 9.5)))) == []
    assert len(list(signals(1.0, Process(Report("left", 5.0))))) == 3


def test_ranks_of_later_meetings_are_resolved() -> None:
    meetings = MeetingTable()
    for index, rank in ((0, 0), (5, 1)):
        meetings.add(Report("met", 1.0, (rank,), meeting="a"), index)
    told = Report("told", 2.0, (0, 1, 2))
    assert meetings.resolved(told) == told
    assert meetings.resolved(Report("told", 2.0, (1, 2), meeting="a")) == Report("told", 2.0, (5,))
    assert meetings.resolved(Report("told", 2.0, (1,), meeting="b")) == Report("told", 2.0)
    for number in range(1000):
        meetings.add(Report("met", 1.0, (0,), meeting=f"{number}"), number)
    assert len(meetings._processes) < 100
    assert meetings.resolved(Report("told", 2.0, (0,), meeting="999")).ranks == (999,)
