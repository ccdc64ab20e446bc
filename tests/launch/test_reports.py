"""What the launcher takes from a rank: well-formed reports, a few, from the time in which it ran."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import msgspec
import pytest

from shoal import failure_report
from shoal.failure_report import MAX_RANKS, MAX_REPORT_BYTES, Report
from shoal.launch.ranks.reports import Reports


def encoded(report: object) -> bytes:
    return msgspec.msgpack.encode(report)


def now() -> float:
    return time.monotonic()


def test_reports_are_sorted_by_their_time() -> None:
    reports = Reports(2)
    early, late = Report("left", now()), Report("told", now(), (1,))
    for each in (late, early):
        os.write(reports.inherited, encoded(each))
    reports.read()
    assert reports.received == [early, late]
    reports.close()


@pytest.mark.parametrize(
    "nonsense",
    [
        lambda: b"",
        lambda: b"\xff" * 100,
        lambda: encoded(Report("failed", now(), text="x" * 300)),
        lambda: encoded(Report("told", now(), tuple([0] * (MAX_RANKS + 1)))),
        lambda: encoded(Report("told", now(), (2,))),
        lambda: encoded(Report("told", now(), (-1,))),
        lambda: encoded(Report("ended", now(), code=256)),
        lambda: encoded(Report("ended", now(), code=0)),
        lambda: encoded(Report("failed", now() - 1000)),
        lambda: encoded(Report("failed", now() + 1000)),
        lambda: encoded(Report("failed", float("nan"))),
        lambda: encoded({"kind": "unheard", "at": now()}),
        lambda: encoded(Report("failed", now())) + b"\0" * MAX_REPORT_BYTES,
    ],
)
def test_nonsense_is_dropped(nonsense: object) -> None:
    assert callable(nonsense)
    reports = Reports(2)
    os.write(reports.inherited, nonsense())
    reports.read()
    assert reports.received == []
    reports.close()


def test_a_rank_that_reports_without_end_is_heard_a_few_times() -> None:
    reports = Reports(2)
    for _ in range(100):
        try:
            for _ in range(1000):
                os.write(reports.inherited, encoded(Report("left", now())))
        except BlockingIOError:
            pass
        reports.read()
    assert len(reports.received) <= 24
    reports.close()


def test_a_rank_that_goes_on_without_others_is_heard_anew() -> None:
    reports = Reports(2)
    for _ in range(40):
        os.write(reports.inherited, encoded(Report("told", now(), (1,))))
        reports.read()
        assert [each.kind for each in reports.received] == ["told"]
        os.write(reports.inherited, encoded(Report("rebuilt", now())))
        reports.read()
        assert reports.received == []
    os.write(reports.inherited, encoded(Report("rebuilt", now() + 1000)))
    os.write(reports.inherited, encoded(Report("failed", now())))
    reports.read()
    assert [each.kind for each in reports.received] == ["failed"]
    reports.close()


#: a process that says which of its children, beside itself, can report
SPEAKERS = """
import os, subprocess, sys
from shoal import failure_report
child = "from shoal import failure_report as r; print('executed', r._descriptor is not None, flush=True)"
subprocess.run([sys.executable, "-c", child], close_fds=False)
if os.fork() == 0:
    failure_report.left()
    os._exit(0)
os.wait()
failure_report.notified([1])
"""


def test_neither_a_forked_child_nor_an_executed_one_speaks_for_the_rank() -> None:
    reports = Reports(2)
    ran = subprocess.run(
        [sys.executable, "-c", SPEAKERS],
        env={
            **os.environ,
            "SHOAL_REPORT_FD": failure_report.descriptor_name(reports.inherited),
            "SHOAL_RANK": "0",
            "SHOAL_SIZE": "2",
        },
        pass_fds=[reports.inherited],
        stdout=subprocess.PIPE,
        check=True,
    )
    reports.read()
    assert [(report.kind, report.ranks) for report in reports.received] == [("told", (1,))]
    assert ran.stdout == b"executed False\n"
    reports.close()


def test_a_thread_goes_on_only_when_it_is_reported_that_the_rank_leaves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Though another one has begun to report the same: what it then tells the peers comes later."""
    begun, go_on = threading.Event(), threading.Event()
    sent: list[bytes] = []

    class Line:
        def send(self, report: bytes) -> None:
            if threading.current_thread() is other:
                begun.set()
                assert go_on.wait(60)
            sent.append(report)

    monkeypatch.setattr(failure_report, "_descriptor", Line())
    monkeypatch.setattr(failure_report, "_reported", set())
    other = threading.Thread(target=failure_report.left)
    other.start()
    assert begun.wait(60)
    failure_report.left()
    assert len(sent) == 1
    go_on.set()
    other.join()


def test_a_number_that_means_another_file_by_now_is_not_written_to() -> None:
    reports = Reports(2)
    script = "import os, sys; from shoal import failure_report; os.dup2(2, {}); failure_report.left()"
    ran = subprocess.run(
        [sys.executable, "-c", script.format(reports.inherited)],
        env={**os.environ, "SHOAL_REPORT_FD": failure_report.descriptor_name(reports.inherited)},
        pass_fds=[reports.inherited],
        stderr=subprocess.PIPE,
        check=True,
    )
    reports.read()
    assert (reports.received, ran.stderr) == ([], b"")
    reports.close()
