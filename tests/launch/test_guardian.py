"""No rank outlives a launcher that was killed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from tests.support.waiting import until

from .conftest import Workshop, alive

FAMILY = """
if os.fork() == 0:
    tell(f"child{rank}", os.getpid())
    time.sleep(600)
tell(f"rank{rank}", os.getpid())
time.sleep(600)
"""


def started(workshop: Workshop) -> tuple[subprocess.Popen[bytes], list[int], list[int], int]:
    """A launcher with two ranks that have a child each: launcher, ranks, children, guardian."""
    launcher = workshop.start(FAMILY, start_new_session=True)
    ranks = workshop.pids("rank0", "rank1")
    children = workshop.pids("child0", "child1")
    (guardian,) = {child.pid for child in psutil.Process(launcher.pid).children()} - set(ranks)
    return launcher, ranks, children, guardian


def test_a_killed_launcher_leaves_neither_ranks_nor_their_children(workshop: Workshop) -> None:
    launcher, ranks, children, guardian = started(workshop)
    launcher.kill()
    until(lambda: not any(alive(pid) for pid in (*ranks, *children, guardian)))


@pytest.mark.parametrize("victim", [0, 1])
def test_a_launcher_and_a_rank_killed_together_leave_nothing(workshop: Workshop, victim: int) -> None:
    launcher, ranks, children, guardian = started(workshop)
    os.kill(ranks[victim], signal.SIGKILL)
    launcher.kill()
    until(lambda: not any(alive(pid) for pid in (*ranks, *children, guardian)))


def test_children_of_a_rank_that_is_gone_die_with_the_launcher(workshop: Workshop) -> None:
    launcher, ranks, children, guardian = started(workshop)
    launcher.send_signal(signal.SIGSTOP)
    os.kill(ranks[0], signal.SIGKILL)
    until(lambda: not alive(ranks[0]))
    launcher.kill()
    until(lambda: not any(alive(pid) for pid in (*ranks, *children, guardian)))


def test_the_guardian_is_not_in_the_launchers_process_group(workshop: Workshop) -> None:
    launcher, ranks, children, guardian = started(workshop)
    os.killpg(launcher.pid, signal.SIGKILL)
    until(lambda: not any(alive(pid) for pid in (*ranks, *children, guardian)))


def test_ranks_die_even_when_the_guardian_is_killed_with_the_launcher(workshop: Workshop) -> None:
    launcher, ranks, children, guardian = started(workshop)
    os.kill(guardian, signal.SIGKILL)
    launcher.kill()
    until(lambda: not any(alive(pid) for pid in ranks))
    for child in children:  # these nobody can know any more
        os.kill(child, signal.SIGKILL)


def test_a_job_survives_the_loss_of_its_guardian(workshop: Workshop) -> None:
    launcher = workshop.start("tell(f'here{rank}'); await_file('go')")
    workshop.read("here0"), workshop.read("here1")
    for process in psutil.Process(launcher.pid).children():
        if "guardian.py" in " ".join(process.cmdline()):
            process.kill()
    (workshop.path / "go").touch()
    assert workshop.end(launcher) == (0, b"", b"")


def test_a_launcher_killed_at_any_moment_of_its_start_leaves_nothing(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_TEST_MARK", str(workshop.path))
    mark = f"SHOAL_TEST_MARK={workshop.path}".encode()

    def marked() -> list[int]:
        found = []
        for pid in psutil.pids():
            with contextlib.suppress(OSError):
                if mark in Path(f"/proc/{pid}/environ").read_bytes() and alive(pid):
                    found.append(pid)
        return found

    for trial in range(8):
        launcher = workshop.start("time.sleep(600)", ranks=8)
        # The guardian, then one rank after the other: strike when some of them are there.
        until(lambda: len(marked()) >= 1 + trial)  # noqa: B023
        launcher.kill()
        launcher.wait()
        until(lambda: not marked())


def test_ranks_inherit_no_descriptor_but_the_standard_ones_and_the_one_for_reports(
    workshop: Workshop,
) -> None:
    code, out, _ = workshop.run(
        """
        there = set(map(int, os.listdir("/proc/self/fd")))
        opened = os.open("/", os.O_RDONLY)  # as listing them needed a descriptor too
        report = int(os.environ["SHOAL_REPORT_FD"].partition(":")[0])
        print(sorted(there - {opened, report}))
        """,
        ranks=1,
    )
    assert (code, out) == (0, b"[0] [0, 1, 2]\n")


def test_a_stopped_guardian_does_not_keep_the_launcher(workshop: Workshop) -> None:
    launcher = workshop.start("tell('ready'); await_file('go')", ranks=1)
    workshop.read("ready")
    (watcher,) = (
        each.pid
        for each in psutil.Process(launcher.pid).children()
        if "guardian.py" in " ".join(each.cmdline())
    )
    os.kill(watcher, signal.SIGSTOP)
    (workshop.path / "go").touch()
    assert workshop.end(launcher) == (0, b"", b"")
    assert not alive(watcher)
