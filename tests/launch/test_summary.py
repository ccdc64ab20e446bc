"""``shoal run --summary``: what the ranks did, and for whom they waited."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

from shoal.failure_report import MAX_REPORT_BYTES, Report, WaitSummary
from shoal.launch.output.waiting import WaitingTable
from shoal.launch.ranks.reports import MeetingTable, Reports

from .conftest import Workshop


def test_the_slow_rank_is_named_and_a_killed_one_has_no_row(workshop: Workshop) -> None:
    """Rank 1 is late, and rank 2 is killed; the others go on."""
    launcher = workshop.start(
        """
        import torch, shoal
        group = shoal.init()
        for _ in range(3):
            if group.rank == 1:
                time.sleep(0.2)
            group.all_reduce(torch.ones(1000)).wait()
        if group.rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            group.barrier().wait()
        except shoal.errors.PeerLost:
            group = group.rebuild()
        group.close()
        """,
        ranks=3,
        options=["--summary", "--min", "1"],
    )
    _, err = launcher.communicate(timeout=240)
    assert launcher.returncode == 0, err
    lines = [line.removeprefix("shoal: ") for line in err.decode().splitlines()]
    rows = {line.split()[0]: line.split() for line in lines if line.startswith(" ") and "rank 1, " in line}
    assert "0" in rows, err.decode()
    assert rows["0"][1] == "3"
    assert float(rows["0"][6]) >= 0.5
    assert " ".join(rows["0"][8:10]) == "rank 1,"
    named = [line for line in lines if " for rank 1, which arrived last in 3 operations" in line]
    assert named, err.decode()
    assert "no summary of rank 2" in lines


def test_a_process_has_a_row_for_each_of_its_worlds(workshop: Workshop) -> None:
    launcher = workshop.start(
        """
        import torch, shoal
        for count in (3, 5):
            with shoal.init() as group:
                for _ in range(count):
                    if group.rank == 1:
                        time.sleep(0.1)
                    group.all_reduce(torch.ones(10)).wait()
        """,
        ranks=2,
        options=["--summary"],
    )
    _, err = launcher.communicate(timeout=240)
    assert launcher.returncode == 0, err
    rows = [line.split()[1:3] for line in err.decode().splitlines() if line.startswith("shoal:  ")]
    assert rows[2:] == [["0", "3"], ["0", "5"], ["1", "3"], ["1", "5"]], err.decode()


@dataclass
class Process:
    index: int
    name: str = field(init=False)

    def __post_init__(self) -> None:
        self.name = str(self.index)


def summary(*late: tuple[int, float], seconds: float = 10.0, completed: int = 4) -> WaitSummary:
    waited = sum(spent for _, spent in late)
    return WaitSummary(seconds, completed, 2_000_000, waited, 1e-3, 2e-3, late)


def lines(processes: list[Any], *reports: tuple[int, Report]) -> list[str]:
    table = WaitingTable()
    for index, report in reports:
        table.add(processes[index], report)
    return [line.decode().removeprefix("shoal: ").rstrip("\n") for line in table.lines(processes)]


def test_waiting_is_attributed_to_processes_over_several_worlds() -> None:
    processes = [Process(0), Process(1), Process(2)]
    found = lines(
        processes,
        (1, Report("summary", 10.0, (), summary=summary())),
        (0, Report("summary", 10.0, (1, 2), summary=summary((3, 4.0), (1, 1.0)))),
        (0, Report("summary", 21.0, (1,), summary=summary((4, 5.0)))),
    )
    assert [line.split() for line in found[2:5]] == [
        ["0", "4", "2.0", "1,000", "2,000", "10.0", "5.0", "50", "rank", "1,", "80", "%"],
        ["0", "4", "2.0", "1,000", "2,000", "10.0", "5.0", "50", "rank", "1,", "100", "%"],
        ["1", "4", "2.0", "1,000", "2,000", "10.0", "0.0", "0"],
    ]
    assert found[5:] == [
        "operations of the others waited 45 % of the time for rank 1, which arrived last in 7 operations",
        "operations of the others waited 3 % of the time for rank 2, which arrived last in 1 operation",
        "no summary of rank 2",
    ]


def test_a_rank_that_never_came_did_not_arrive_last() -> None:
    found = lines(
        [Process(0), Process(1)], (0, Report("failure", 10.0, (1,), summary=summary((0, 8.0), completed=0)))
    )
    assert found[3:] == [
        "operations of the others waited 80 % of the time for rank 1",
        "no summary of rank 1",
    ]


def test_shares_are_of_the_time_and_not_of_its_sum_over_worlds_at_the_same_time() -> None:
    found = lines(
        [Process(0), Process(1)],
        (0, Report("summary", 10.0, (1,), summary=summary((4, 6.0)))),
        (0, Report("summary", 12.0, (), summary=summary())),  # two seconds more
        (0, Report("summary", 11.0, (), summary=summary(seconds=4.0))),
        (1, Report("summary", 10.0, (0,), summary=summary((1, 8.0)))),
        (1, Report("summary", 10.0, (0,), summary=summary((1, 8.0), seconds=5.0))),
    )
    assert found[7:] == [
        "operations of the others waited 100 % of the time for rank 0, which arrived last in 2 operations",
        "operations of the others waited 50 % of the time for rank 1, which arrived last in 4 operations "
        "(its own operations waited 100 % of the time, most for rank 0)",
    ]


def test_a_rank_that_is_late_because_it_waits_in_another_group_is_named_with_the_rank_it_waits_for() -> None:
    processes = [Process(0), Process(1), Process(2), Process(3)]
    found = lines(
        processes,
        (0, Report("summary", 1.0, (2,), summary=summary((4, 9.0)))),
        (1, Report("summary", 1.0, (2,), summary=summary((4, 9.0)))),
        (2, Report("summary", 1.0, (1, 3), summary=summary((1, 0.1), (4, 9.8)))),
        (3, Report("summary", 1.0, (2,), summary=summary((1, 0.1)))),
    )
    assert found[6:] == [
        "operations of the others waited 60 % of the time for rank 2, which arrived last in 4 operations "
        "(its own operations waited 99 % of the time, most for rank 3)",
        "operations of the others waited 33 % of the time for rank 3, which arrived last in 4 operations",
    ]


def test_waits_of_operations_at_the_same_time_are_at_most_the_whole_time() -> None:
    found = lines(
        [Process(0), Process(1)],
        (0, Report("summary", 1.0, (1,), summary=summary((4, 15.0)))),
        (1, Report("summary", 1.0, (), summary=WaitSummary(10.0, 4, 0, 12.0, 1e-3, 2e-3))),
    )
    assert found[2].split()[6:8] == ["15.0", "150"]
    assert found[4:] == [
        "operations of the others waited 100 % of the time for rank 1, which arrived last in 4 operations "
        "(its own operations waited 100 % of the time)"
    ]


def test_without_a_report_it_says_why() -> None:
    assert lines([Process(0)]) == [
        "no rank has reported a summary: none has closed a group of the native backend"
    ]


def test_ranks_of_a_later_meeting_are_translated_and_unknown_ones_left_out() -> None:
    table = MeetingTable()
    table.add(Report("met", 1.0, (0,), meeting="m"), 5)
    report = Report("summary", 1.0, (0, 1), meeting="m", summary=summary((1, 1.0), (2, 2.0)))
    resolved = table.resolved(report)
    assert resolved.ranks == (5,)
    assert resolved.summary is not None
    assert resolved.summary.late == ((1, 1.0),)


@pytest.mark.parametrize(
    "wrong",
    [
        Report("summary", 0.0, (1,)),
        Report("told", 0.0, (1,), summary=summary((1, 1.0))),
        Report("summary", 0.0, (1, 2), summary=summary((1, 1.0))),
        Report("summary", 0.0, (9,), summary=summary((1, 1.0))),
        Report("summary", 0.0, (), summary=summary(seconds=float("nan"))),
        Report("summary", 0.0, (), summary=summary(seconds=-1.0)),
        Report("summary", 0.0, (), summary=summary(completed=-1)),
        Report("summary", 0.0, tuple([0] * 17), summary=summary(*[(1, 1.0)] * 17)),
    ],
)
def test_a_report_that_is_no_summary_is_dropped(wrong: Report) -> None:
    reports = Reports(3)
    try:
        for report in (wrong, Report("summary", 0.0, (1,), summary=summary((1, 1.0)))):
            data = msgspec.msgpack.encode(msgspec.structs.replace(report, at=time.monotonic()))
            assert len(data) < MAX_REPORT_BYTES
            os.write(reports.inherited, data)
        reports.read()
        assert [each.ranks for each in reports.take_notices()] == [(1,)]
        assert reports.received == []
    finally:
        reports.close()


def test_the_longest_summary_fits_into_a_report() -> None:
    late = [(2**63 - 1, 1e12)] * 16
    report = Report("summary", 1e9, tuple([2**40] * 16), meeting="m" * 16, summary=summary(*late))
    assert len(msgspec.msgpack.encode(report)) < MAX_REPORT_BYTES
