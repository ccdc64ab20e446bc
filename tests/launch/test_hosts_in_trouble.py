"""``shoal run --hosts`` when output is not read, stores do not answer, or hosts are lost at a bad moment."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from typing import NoReturn

import psutil
import pytest

from shoal.errors import StoreError
from shoal.launch.job.job_store import ExitNotifier
from shoal.launch.remote.ssh import PROGRAM
from tests.support.waiting import until

from .conftest import Workshop, alive
from .test_hosts import far, run, start
from .test_respawn import PRELUDE as RESPAWNED

__all__ = ["far"]


def lasting(
    far: Workshop, script: str, *options: str, hosts: str = "h1:2,h2:2", ranks: int = 4
) -> subprocess.Popen[bytes]:
    """A job whose launcher has heard all of its ranks."""
    script = "print('runs', flush=True)\n" + script
    launcher = start(far, script, "--log-dir", "logs", *options, hosts=hosts)
    logs = [far.path / "logs" / f"rank{rank}.log" for rank in range(ranks)]
    until(lambda: all(log.exists() and log.read_text() for log in logs))
    return launcher


def test_a_named_store_is_opened_before_any_agent_starts(
    far: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent that hears nothing while the store does not answer would kill itself."""
    monkeypatch.setenv("SHOAL_TIMEOUT", "0.5")
    (far.path / "fake_ssh").write_text("#!/bin/sh\ntouch started\nexec sleep 600\n")
    code, out, err = run(far, "", "--store", "tcp://127.0.0.1:1")
    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert not (far.path / "started").exists()


@pytest.mark.parametrize("host", ["h1", "localhost"])
def test_a_projects_modules_take_no_place_of_pythons_in_the_agent(far: Workshop, host: str) -> None:
    for name in ("secrets", "queue", "click", "msgspec"):
        (far.path / f"{name}.py").write_text("raise SystemExit('the project has its own')")
    (far.path / "program.sh").write_text("echo good\n")
    launcher = [sys.executable, "-c", PROGRAM, "run", "--hosts", host, "sh", "program.sh"]
    assert far.end(far.start_process(launcher)) == (0, b"[0] good\n", b"")


@pytest.mark.parametrize("end", ["fails", "is interrupted"])
def test_a_stop_signal_ends_a_launcher_whose_output_nobody_reads(far: Workshop, end: str) -> None:
    """The agents cannot send the rest of it, and never say Bye."""
    launcher = start(
        far,
        f"""
        tell(f"here{{rank}}", os.getpid())
        if rank == 1:
            await_file("full")
            sys.exit(3) if {end == "fails"} else time.sleep(600)
        import select
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.set_blocking(1, False)
        while select.select([], [1], [], 1.0)[1]:
            os.write(1, b"x" * 99 + b"\\n")
        tell("full")
        time.sleep(600)
        """,
        hosts="h1:2",
    )
    pids = far.pids("here0", "here1")
    far.read("full")
    if end == "is interrupted":
        launcher.send_signal(signal.SIGINT)
    until(lambda: not any(map(alive, pids)))
    assert launcher.poll() is None

    def has_ended() -> bool:
        launcher.send_signal(signal.SIGTERM)
        return launcher.poll() is not None

    until(has_ended)


def test_a_host_that_is_lost_before_it_has_sent_everything_is_no_success(far: Workshop) -> None:
    code, _, err = run(far, "", hosts="h1,cut")
    assert code == 74
    assert err == "shoal: host cut is lost: the connection has ended; ssh ended with exit code 9\n"


def test_a_process_that_scale_promised_starts_where_a_host_lives(
    far: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was to have the place of the first one that leaves, whose host is lost instead."""
    monkeypatch.setenv("TMPDIR", str(far.path))  # no job but this one
    script = """
    if joins:
        tell("new" + os.environ["SHOAL_HOST_ID"])
        await_file("go")
        sys.exit()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    rank = os.environ["SHOAL_RANK"]
    tell("ready" + rank, os.getpid())
    await_file("leave" if rank == "1" else "go")
    """
    (far.path / "script.py").write_text(RESPAWNED + textwrap.dedent(script))
    job = far.shoal("run", "--hosts", "h1,h2,h3", "--min", "1", "--max", "3", "script.py")
    pids = far.pids("ready0", "ready1", "ready2")
    assert far.end(far.shoal("scale", "1"))[1] == b"shoal: 1 rank wanted: ranks 1, 2 leave\n"
    assert b"2 ranks wanted" in far.end(far.shoal("scale", "2"))[1]
    os.kill(psutil.Process(pids[2]).ppid(), signal.SIGKILL)
    assert job.stderr is not None
    while b"rank 2 on h3 has left" not in (line := job.stderr.readline()):
        assert line
    (far.path / "leave").touch()
    far.read("newh2")
    (far.path / "go").touch()
    assert far.end(job)[0] == 0


def test_a_store_that_does_not_answer_is_not_asked_for_every_rank_that_ends() -> None:
    """Each question may last a second, in which no agent hears a beat."""
    asked = []

    def connect() -> NoReturn:
        asked.append(1)
        raise StoreError("it is gone")

    notes = ExitNotifier(connect, "job")
    for rank in range(5):
        notes.ended(rank, "exit code 1")
    notes.close()
    assert asked == [1]


def test_a_lost_host_is_the_end_with_code_74(far: Workshop) -> None:
    launcher = lasting(far, "tell(f'here{rank}', os.getpid()); time.sleep(600)")
    pids = far.pids(*(f"here{rank}" for rank in range(4)))
    agent = psutil.Process(pids[2]).ppid()
    os.kill(agent, signal.SIGKILL)
    code, _, err = far.end(launcher)
    text = err.decode()
    assert code == 74
    lost = "shoal: host h2 is lost, and with it ranks 2, 3: the connection has ended"
    assert text.startswith(f"{lost}; ssh ended with exit code 137\n")
    assert "shoal: rank 2 on h2 failed first: its host was lost, after " in text
    until(lambda: not any(map(alive, pids)))


def test_with_min_the_loss_of_a_host_is_the_loss_of_its_ranks(far: Workshop) -> None:
    launcher = lasting(far, "tell(f'here{rank}', os.getpid()); await_file('go')", "--min", "2")
    pids = far.pids(*(f"here{rank}" for rank in range(4)))
    os.kill(psutil.Process(pids[0]).ppid(), signal.SIGKILL)
    until(lambda: not alive(pids[0]) and not alive(pids[1]))
    (far.path / "go").touch()
    code, _, err = far.end(launcher)
    text = err.decode()
    assert code == 0
    assert "shoal: host h1 is lost, and with it ranks 0, 1: " in text
    assert "shoal: rank 1 on h1 failed: its host was lost" in text
    assert text.endswith("shoal: 2 of 4 ranks finished; ranks 0, 1 were lost with the host\n"), text


def test_an_agent_that_hears_nothing_kills_all_and_ends(far: Workshop) -> None:
    """The launcher stands still; its beats do not come."""
    launcher = lasting(far, "tell(f'here{rank}', os.getpid()); time.sleep(600)", hosts="h1:2", ranks=2)
    pids = far.pids("here0", "here1")
    launcher.send_signal(signal.SIGSTOP)
    begin = time.monotonic()
    until(lambda: not any(map(alive, pids)))
    assert time.monotonic() - begin < 30
    launcher.send_signal(signal.SIGCONT)
    assert far.end(launcher)[0] == 74
