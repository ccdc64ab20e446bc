"""Slots of ranks that failed get other processes: ``shoal run --respawn``."""

from __future__ import annotations

import math
import os
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest

from shoal.launch.ranks import guardian
from shoal.launch.ranks.guardian import Guardian
from shoal.launch.ranks.slots import RESET_AFTER_S, Respawn
from tests.support.quick_launcher import QuickLauncher
from tests.support.waiting import until

from .conftest import FILES, Workshop, alive

#: what a script of these tests can use beside what all can: the name of its process, and joining the others
PRELUDE = (
    FILES
    + """
slot = os.environ["SHOAL_LOCAL_RANK"]
joins = "SHOAL_JOIN" in os.environ
assert joins == ("SHOAL_RANK" not in os.environ)
def join():
    from shoal import failure_report
    failure_report.joined()
"""
)

#: the launcher, with other constants in its module of restarts
LAUNCHER = """
import sys
from shoal.launch import cli
from shoal.launch.ranks import slots
for word in sys.argv.pop(1).split():
    name, _, value = word.partition("=")
    setattr(slots, name, type(getattr(slots, name))(value))
cli.main()
"""


def start(
    workshop: Workshop,
    script: str,
    *options: str,
    min_ranks: int = 1,
    wait: float = 0.05,
    max_ranks: int = 10,
) -> subprocess.Popen[bytes]:
    """Start a job that respawns."""
    (workshop.path / "script.py").write_text(PRELUDE + textwrap.dedent(script))
    constants = f"MIN_DELAY_S={wait} MAX_RESTARTS={max_ranks}"
    command = ["run", "--respawn", "--min", str(min_ranks), *options, "script.py"]
    return workshop.start_process([sys.executable, "-c", LAUNCHER, constants, *command])


def said(job: subprocess.Popen[bytes], text: str) -> str:
    """What the launcher says until it says ``text``."""
    assert job.stderr is not None
    lines = ""
    while text not in lines:
        line = job.stderr.readline()
        assert line, lines
        lines += line.decode()
    return lines


def test_a_process_takes_the_place_of_a_rank_that_failed(workshop: Workshop) -> None:
    """It has its slot, cores, and log, but no rank; what the rank left in its process group is gone."""
    job = start(
        workshop,
        """
        names = ("SHOAL_SIZE", "RANK", "WORLD_SIZE", "LOCAL_RANK", "SHOAL_LOCAL_SIZE", "SHOAL_STORE", "MARK")
        print({name: os.environ.get(name) for name in names}.values(), os.sched_getaffinity(0))
        if joins:
            left = open("left").read()
            while os.path.exists(f"/proc/{left}") and ") Z" not in open(f"/proc/{left}/stat").read():
                time.sleep(0.005)
            join()
            tell("joined")
        elif slot == "2":
            if os.fork() == 0:
                tell("left", os.getpid())
                time.sleep(600)
            await_file("left")
            sys.exit(3)
        await_file("joined")
        """,
        *("-n", "3", "--bind", "--log-dir", "logs"),
        min_ranks=2,
    )
    code, out, err = workshop.end(job)
    assert code == 0, err
    said = dict(re.findall(r"^\[([0-9.]+)\] dict_values\((.*)$", out.decode(), re.MULTILINE))
    places = {name: eval(values.partition(")")[0]) for name, values in said.items()}
    store = places["2"][5]
    assert places["2"] == ["3", "2", "3", "2", "3", store, None]
    assert places["2.1"] == [None, None, None, "2", "3", store, None]
    assert said["2"].partition(")")[2] == said["2.1"].partition(")")[2], "the cores"
    lines = err.decode().splitlines()
    assert re.fullmatch(
        r"shoal: rank 2 failed: exit code 3, .*; ranks 0, 1 go on; a new process replaces it in 0 s",
        lines[0],
    )
    assert lines[1:] == ["shoal: 3 of 3 ranks finished; rank 2 ended with exit code 3; rank 2.1 finished"]
    log = (workshop.path / "logs" / "rank2.log").read_text().splitlines()
    assert [line.partition("(")[0] for line in log] == ["dict_values", "--- rank 2.1 ", "dict_values"]


#: rank 1 dies; the others train until there are two again
TRAINING = """
import os, signal
import torch
from shoal import elastic

net = torch.nn.Linear(4, 1)
opt = torch.optim.SGD(net.parameters(), lr=0.01)
x = torch.randn(64, 4)
samples = elastic.Samples(len(x), batch=8)
with elastic.Session(elastic.State(model=net, optimizer=opt, samples=samples)) as session:
    model = session.parallel(net)
    for step in session.steps():
        with step:
            (model(x[step.indices]).square().mean() * step.weight).backward()
            if step.number == 3 and os.environ.get("SHOAL_RANK") == "1":
                os.kill(os.getpid(), signal.SIGKILL)
            step.commit()
            opt.step()
            opt.zero_grad()
        if step.number > 3 and session.group.size == 2:
            break
    print(f"{session.group.rank} of {session.group.size}")
"""


def test_a_process_that_takes_the_place_of_a_rank_joins_the_session(
    launcher: QuickLauncher, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAINING)
    code, out, err = launcher.run(2, str(script), min_ranks=1, respawn=True)
    assert code == 0, err
    assert sorted(out.splitlines()) == ["[0] 0 of 2", "[1.1] 1 of 2"]
    last = "shoal: 2 of 2 ranks finished; rank 1 was killed by SIGKILL; rank 1.1 finished"
    assert err.splitlines()[-1] == last


def test_a_newcomer_with_nobody_left_to_join_is_ended_without_a_word(workshop: Workshop) -> None:
    job = start(
        workshop,
        """
        if joins:
            tell("newcomer", os.getpid())
            time.sleep(600)
        elif slot == "1":
            sys.exit(3)
        await_file("newcomer")
        """,
        *("-n", "2"),
    )
    code, _, err = workshop.end(job)
    assert code == 0
    assert b"rank 1 failed" in err
    assert b"1.1" not in err
    assert not alive(*workshop.pids("newcomer"))


@pytest.mark.parametrize("joined", [False, True])
def test_a_newcomer_counts_once_it_has_joined(workshop: Workshop, joined: bool) -> None:
    job = start(
        workshop,
        f"""
        if joins and slot == "1":
            {"join()" if joined else ""}
            tell("newcomer")
            await_file("go")
            sys.exit(9)
        elif slot == "1":
            sys.exit(3)
        elif not joins:
            await_file("newcomer")
            sys.exit(4)
        time.sleep(600)
        """,
        *("-n", "2"),
    )
    if joined:
        said(job, "shoal: rank 0 failed: exit code 4")
        (workshop.path / "go").touch()
    code, _, err = workshop.end(job)
    assert code == (9 if joined else 4)
    first = "1.1 failed first: exit code 9" if joined else "0 failed first: exit code 4"
    assert f"shoal: rank {first}" in err.decode()
    assert f"shoal: rank {first.split()[0]} wrote nothing to stderr" in err.decode()


def test_a_newcomer_that_fails_is_replaced_but_not_for_ever(workshop: Workshop) -> None:
    script = "sys.exit(5) if joins or slot == '1' else await_file('go')"
    job = start(workshop, script, *("-n", "2"), wait=0.001, max_ranks=2)
    lines = said(job, "shoal: rank 1.2 failed").splitlines()
    (workshop.path / "go").touch()
    assert [line.rpartition("; ")[2] for line in lines] == [
        "a new process replaces it in 0 s",
        "a new process replaces it in 0 s",
        "it is not replaced after 2 restarts in 10 minutes",
    ]
    code, _, err = workshop.end(job)
    assert code == 0
    assert err == b"shoal: 1 of 2 ranks finished; ranks 1, 1.1, 1.2 ended with exit code 5\n"


def test_the_rank_that_failed_first_is_named_when_its_slot_has_been_refilled(workshop: Workshop) -> None:
    job = start(
        workshop,
        """
        if joins:
            tell("newcomer")
            time.sleep(600)
        elif slot == "1":
            sys.exit("no such fish")
        await_file("newcomer")
        from shoal import failure_report
        failure_report.notified([1])
        sys.exit(4)
        """,
        *("-n", "2"),
    )
    code, _, err = workshop.end(job)
    lines = err.decode().splitlines()
    assert code == 1, lines
    assert lines[-4].startswith("shoal: rank 1 failed first: exit code 1"), lines
    assert lines[-3].startswith("shoal: rank 0 ended because rank 1 did (exit code 4); rank 1.1 "), lines
    assert lines[-2:] == ["shoal: the end of rank 1's stderr:", "  | no such fish"]


def test_ctrl_c_ends_a_job_that_is_about_to_start_a_process(workshop: Workshop) -> None:
    job = start(workshop, "sys.exit(3) if slot == '1' else time.sleep(600)", *("-n", "2"), wait=900.0)
    said(job, "a new process replaces it in 900 s")
    job.send_signal(signal.SIGINT)
    code, _, err = workshop.end(job)
    assert code == 130
    assert b"shoal: stopped by SIGINT: " in err


@pytest.mark.parametrize("with_guardian", [True, False])
def test_no_newcomer_outlives_a_killed_launcher(workshop: Workshop, with_guardian: bool) -> None:
    job = start(
        workshop,
        """
        if joins:
            if os.fork() == 0:
                tell("child", os.getpid())
                time.sleep(600)
            tell("newcomer", os.getpid())
        elif slot == "1":
            sys.exit(3)
        time.sleep(600)
        """,
        *("-n", "2"),
    )
    newcomer, child = workshop.pids("newcomer", "child")
    (watcher,) = (
        each.pid for each in psutil.Process(job.pid).children() if "guardian.py" in " ".join(each.cmdline())
    )
    if not with_guardian:
        os.kill(watcher, signal.SIGKILL)
    job.kill()
    until(lambda: not alive(newcomer))
    if not with_guardian:  # the child nobody can know any more
        os.kill(child, signal.SIGKILL)
    until(lambda: not alive(child))


def test_the_guardian_spares_a_process_that_was_given_the_number_of_a_rank() -> None:
    groups = [subprocess.Popen(["sleep", "600"], start_new_session=True) for _ in range(3)]
    stranger, rank, again = (group.pid for group in groups)
    reader, writer = os.pipe()
    for pid in (stranger, rank, again, -stranger, -again, again):
        os.write(writer, pid.to_bytes(4, sys.byteorder, signed=True))
    os.close(writer)
    subprocess.run([sys.executable, guardian.__file__], stdin=reader, check=True)
    os.close(reader)
    assert [groups[index].wait() for index in (1, 2)] == [-signal.SIGKILL] * 2
    assert groups[0].poll() is None
    groups[0].kill()
    groups[0].wait()


def test_a_wrapped_program_runs_as_one_that_is_started_directly() -> None:
    look = "tr '\\0' '\\n' < /proc/self/environ; grep 'Sig[BCI]' /proc/self/status; ls /proc/self/fd"
    with Guardian() as watcher:

        def run(argv: list[str]) -> subprocess.CompletedProcess[bytes]:
            env = {"A": "1=2", "B": ""}
            return subprocess.run(argv, env=env, pass_fds=[watcher.pipe], capture_output=True, check=False)

        def seen(output: bytes) -> str:
            # 32 and 33 are of the C library, and no program can set what becomes of them.
            mine = ~(0b11 << 31)
            return re.sub("[0-9a-f]{16}", lambda mask: f"{int(mask[0], 16) & mine:x}", output.decode())

        plain = ["/bin/sh", "-c", look]
        direct = subprocess.run(plain, env={"A": "1=2", "B": ""}, capture_output=True, check=False)
        assert seen(run(watcher.wrapped(plain, None)).stdout) == seen(direct.stdout)
        missing = run(watcher.wrapped(["/nowhere"], None))
        assert (missing.returncode, missing.stderr) == (127, b"shoal: /nowhere: No such file or directory\n")


def test_waits_double_up_to_the_longest_and_begin_anew_after_a_long_life() -> None:
    slots = Respawn()
    now = 0.0
    waits = []
    for _ in range(8):
        wait = slots.failed(3, 0.0, now)
        assert wait is not None
        assert slots.next_at() == now + wait
        assert slots.due(now + 0.99 * wait) == []
        now += wait
        waits.append(wait)
        assert slots.due(now) == [3]
        assert slots.next_at() == math.inf
        now += 100.0
    assert waits == [1, 2, 4, 8, 16, 30, 30, 30]
    assert slots.failed(3, RESET_AFTER_S, now) == 1
    assert slots.failed(4, 0.0, now) == 1, "each slot for itself"
    slots.cancel(slots.waiting)
    assert slots.due(1e9) == []


def test_a_slot_has_ten_restarts_in_ten_minutes() -> None:
    slots = Respawn()
    for restart in range(1, 11):
        assert slots.failed(0, 0.0, 50.0 * restart) is not None
        assert slots.due(50.0 * restart + 40) == [0]
    assert slots.failed(0, 0.0, 50.0 + 40 + 599.0) is None
    assert slots.failed(0, 0.0, 50.0 + 40 + 601.0) is not None


def test_respawn_needs_to_know_how_many_must_go_on(workshop: Workshop) -> None:
    code, _, err = workshop.end(workshop.shoal("run", "-n", "2", "--respawn", "script.py"))
    assert code == 2
    assert err == b"shoal: --respawn needs --min N: the job ends when fewer than N ranks are left\n"


def test_the_plan_says_what_later_processes_find(workshop: Workshop) -> None:
    (workshop.path / "script.py").touch()
    plan = ("run", "-n", "2", "--min", "1", "--respawn", "--dry-run", "script.py")
    code, out, _ = workshop.end(workshop.shoal(*plan))
    assert code == 0
    last = out.decode().splitlines()[-1]
    assert last == (
        "replacement of a failed rank: the same without SHOAL_RANK, SHOAL_SIZE, RANK, WORLD_SIZE, "
        "and with SHOAL_JOIN=1"
    )
