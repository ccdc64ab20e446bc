"""The launcher names the rank that failed first, and returns its exit code."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.support.quick_launcher import QuickLauncher

from .conftest import Workshop

#: how a rank ends, and the exit code that this is
ENDS = {
    "raise ValueError('no such fish')": 1,
    "sys.exit(3)": 3,
    "os._exit(3)": 3,
    "os.kill(os.getpid(), signal.SIGKILL)": 137,
    "os.kill(os.getpid(), signal.SIGSEGV)": 139,
}

#: all ranks work together; the rank that the command line names does what it says
SCRIPT = """
import atexit, os, signal, subprocess, sys, threading, time
import torch
rank, who, what, backend = int(os.environ["RANK"]), int(sys.argv[1]), sys.argv[2], sys.argv[3]
if backend == "torch":
    import torch.distributed as dist
    dist.init_process_group("shoal")
    def together():
        dist.all_reduce(torch.ones(1000))
else:
    import shoal
    group = shoal.init()
    def together():
        group.all_reduce(torch.ones(1000)).wait()
for _ in range(3):
    together()
if rank == who:
    exec(what)
"""
#: what the others do
GO_ON = "while True: together()\n"


def launch(
    launcher: QuickLauncher,
    folder: Path,
    end: str,
    *,
    rank: int = 1,
    size: int = 2,
    backend: str = "native",
    others: str = GO_ON,
    **constants: float,
) -> tuple[int, str]:
    script = folder / "script.py"
    script.write_text(SCRIPT + textwrap.dedent(others))
    code, _, err = launcher.run(size, str(script), str(rank), textwrap.dedent(end), backend, **constants)
    return code, err


@pytest.mark.parametrize(
    ("end", "backend", "rank"),
    [(end, *place) for end, place in zip(ENDS, itertools.cycle([("torch", 1), ("native", 0)]), strict=False)],
)
def test_the_first_failure_is_named_and_its_exit_code_returned(
    launcher: QuickLauncher, tmp_path: Path, end: str, backend: str, rank: int
) -> None:
    code, err = launch(launcher, tmp_path, end, rank=rank, size=4, backend=backend)
    assert (code, f"shoal: rank {rank} failed first: " in err) == (ENDS[end], True), err


@pytest.mark.parametrize(
    "end",
    [
        # It tells the others first, and ends long after they did.
        "group.abort('no more'); time.sleep(0.5); sys.exit(3)",
        "try: sys.exit(3)\nfinally: group.close(); time.sleep(0.5)",
        "atexit.register(time.sleep, 0.5); atexit.register(group.close); sys.exit(3)",
        "with group: sys.exit(3)",
        # None of this hides the cause.
        "sys.excepthook = lambda *error: os._exit(3)\nraise ValueError",
        "group.subgroup([0, 1]).close(); os._exit(3)",
    ],
)
def test_a_rank_that_tells_the_others_before_it_ends_is_the_cause(
    launcher: QuickLauncher, tmp_path: Path, end: str
) -> None:
    code, err = launch(launcher, tmp_path, end, CULPRIT_GRACE_S=60.0)
    assert (code, "shoal: rank 1 failed first: exit code 3" in err) == (3, True), err


@pytest.mark.parametrize("end", ["sys.exit(3)", "os._exit(3)"])
def test_a_rank_that_catches_the_error_and_exits_by_itself_is_a_consequence(
    launcher: QuickLauncher, tmp_path: Path, end: str
) -> None:
    others = """
        try:
            while True: together()
        except Exception:
            os._exit(9)
        """
    code, err = launch(launcher, tmp_path, f"time.sleep(0.1); {end}", others=others, CULPRIT_GRACE_S=60.0)
    assert (code, "shoal: rank 1 failed first: exit code 3" in err) == (3, True), err
    assert re.search(r"rank 0 (ended because rank 1 did \(exit code [19]\)|was ended by)", err), err


def test_a_rank_that_hangs_after_it_raised_is_ended_and_keeps_its_code(
    launcher: QuickLauncher, tmp_path: Path
) -> None:
    hang = "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM]); time.sleep(600)"
    end = f"atexit._clear()\nimport shoal.world\ndef hang(): {hang}\natexit.register(hang)\n"
    end += "atexit.register(shoal.world._close_at_exit)\nraise ValueError('no such fish')"
    others = "try: together()\nexcept Exception: os._exit(9)"
    code, err = launch(launcher, tmp_path, end, others=others, CULPRIT_GRACE_S=0.5)
    assert code == 1
    assert "shoal: rank 1 failed first: ValueError: no such fish; it did not end by itself" in err
    assert re.search(r"rank 0 ended because rank 1 did \(exit code [19]\)", err), err


def test_what_a_thread_raises_ends_no_rank_and_is_no_cause(launcher: QuickLauncher, tmp_path: Path) -> None:
    thread = "t = threading.Thread(target=lambda: 1 / 0); t.start(); t.join(); together(); sys.exit(3)"
    code, err = launch(launcher, tmp_path, thread, rank=0, others="together(); together()")
    assert (code, "shoal: rank 0 failed first: exit code 3" in err) == (3, True), err


def test_a_cause_that_ends_well_leaves_the_code_to_its_consequence(
    launcher: QuickLauncher, tmp_path: Path
) -> None:
    code, err = launch(launcher, tmp_path, "os._exit(0)")
    assert (code, "shoal: rank 0 failed first: exit code 1" in err) == (1, True), err
    assert "shoal: rank 1 ended with exit code 0 while others needed it\n" in err


def test_ranks_that_wait_in_init_are_told_which_rank_ended_before_it_and_how(
    launcher: QuickLauncher, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os, shoal\nif os.environ['RANK'] != '1': shoal.init()\n")
    code, _, err = launcher.run(3, str(script))
    assert code == 1
    assert "RendezvousError: rendezvous (job " in err
    assert "rank 1 ended (exit code 0) without meeting the others" in err
    assert "rank 1 ended with exit code 0 while others needed it" in err


def test_the_user_is_told_of_a_rank_that_ended_before_torchs_init(
    launcher: QuickLauncher, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
        import os, sys, time, datetime, torch.distributed as dist
        path = os.path.join(os.path.dirname(os.path.abspath(sys.argv[0])), "pid")
        if os.environ["RANK"] == "1":
            with open(path + ".new", "w") as file: file.write(str(os.getpid()))
            os.rename(path + ".new", path)
        else:
            while not os.path.exists(path): time.sleep(0.005)
            place = f"/proc/{open(path).read()}/stat"
            while os.path.exists(place) and ") Z" not in open(place).read(): time.sleep(0.005)
            try: dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=2))
            except dist.DistError: pass
        """)
    )
    code, _, err = launcher.run(3, str(script), EARLY_EXIT_WARNING_S=0.1)
    told = "shoal: rank 1 ended with exit code 0 without leaving a group of shoal; ranks 0, 2 still run: "
    assert (code, err.count(told)) == (0, 1), err


def test_nothing_is_said_of_a_rank_that_leaves_its_group_before_it_ends(
    launcher: QuickLauncher, tmp_path: Path
) -> None:
    # Nobody needs it any more.
    code, err = launch(launcher, tmp_path, "", others="if rank == 0: time.sleep(1)", EARLY_EXIT_WARNING_S=0.1)
    assert (code, err) == (0, "")


def test_programs_that_do_not_use_shoal_are_judged_by_the_order_of_their_ends(workshop: Workshop) -> None:
    (workshop.path / "program").write_text('#!/bin/sh\n[ "$SHOAL_RANK" = 1 ] && exit 6\nsleep 600\n')
    (workshop.path / "program").chmod(0o755)
    code, _, err = workshop.end(workshop.shoal("run", "-n", "3", "./program"))
    assert code == 6
    assert b"shoal: rank 1 failed first: exit code 6" in err


def test_the_ranks_of_a_real_launcher_report_too(workshop: Workshop) -> None:
    script = SCRIPT + GO_ON
    (workshop.path / "script.py").write_text(script)
    end = "time.sleep(0.2); sys.exit(3)"
    code, _, err = workshop.end(workshop.shoal("run", "-n", "2", "script.py", "1", end, "native"))
    assert (code, b"shoal: rank 1 failed first: exit code 3" in err) == (3, True), err


#: jobs of each kind: `make stress STRESS=short` has minutes for what takes an hour
_TIMES = 1 if os.environ.get("STRESS") == "short" else 50


@pytest.mark.stress
@pytest.mark.parametrize("load", [0, 4], ids=["idle", "loaded"])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize("end", ENDS)
def test_it_is_named_every_time(
    launcher: QuickLauncher, tmp_path: Path, end: str, backend: str, size: int, load: int
) -> None:
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(load)]
    try:
        for run, rank in itertools.product(range(_TIMES), (0, 1)):
            code, err = launch(
                launcher, tmp_path, end, rank=rank, size=size, backend=backend, CULPRIT_GRACE_S=60.0
            )
            assert (code, f"shoal: rank {rank} failed first: " in err) == (ENDS[end], True), (run, err)
    finally:
        for process in busy:
            process.kill()
            process.wait()
