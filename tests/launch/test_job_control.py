"""The whole job is one process of the shell: it stops, goes on, hangs up and reads as its launcher does."""

from __future__ import annotations

import os
import signal
import sys
import textwrap
import time

import psutil
import pytest

from shoal.launch.agent_protocol import SILENCE_TIMEOUT_S
from tests.support.waiting import until

from .conftest import PRELUDE, Workshop
from .test_hosts import far as far


def is_stopped(pid: int) -> bool:
    return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)


WORKS = """
if os.fork() == 0:
    tell(f"child{rank}", os.getpid())
else:
    tell(f"rank{rank}", os.getpid())
await_file("go")
"""
PROCESSES = ("rank0", "rank1", "child0", "child1")


@pytest.mark.parametrize("hosts", [False, pytest.param(True, marks=pytest.mark.stress)])
def test_ctrl_z_stops_the_whole_job_and_the_shell_continues_it(far: Workshop, hosts: bool) -> None:
    """On other hosts too, whose agents would take the silence of a launcher for its end."""
    (far.path / "script.py").write_text(PRELUDE + WORKS)
    where = ("--hosts", "h1:1,h2:1") if hosts else ("-n", "2")
    job = far.shoal("run", *where, "script.py", preexec_fn=os.setpgrp)
    pids = far.pids(*PROCESSES)
    job.send_signal(signal.SIGTSTP)
    until(lambda: all(map(is_stopped, [job.pid, *pids])))
    if hosts:
        time.sleep(SILENCE_TIMEOUT_S + 0.5)
    job.send_signal(signal.SIGCONT)
    until(lambda: not any(map(is_stopped, [job.pid, *pids])))
    (far.path / "go").touch()
    assert far.end(job) == (0, b"", b"")


def test_a_hang_up_reaches_the_ranks(workshop: Workshop) -> None:
    job = workshop.start(
        """
        signal.signal(signal.SIGHUP, lambda number, frame: sys.exit(tell(f"saved{rank}") or 7))
        tell(f"rank{rank}")
        await_signal()
        """,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # these tests may run under nohup
    )
    workshop.read("rank0"), workshop.read("rank1")
    job.send_signal(signal.SIGHUP)
    code, _, err = workshop.end(job)
    assert (code, err) == (129, b"shoal: stopped by SIGHUP: ranks 0, 1 ended with exit code 7\n")
    workshop.read("saved0"), workshop.read("saved1")


def test_under_nohup_a_hang_up_does_nothing(workshop: Workshop) -> None:
    job = workshop.start(
        "tell(f'rank{rank}'); await_file('go')",
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN),
    )
    workshop.read("rank0"), workshop.read("rank1")
    job.send_signal(signal.SIGHUP)
    (workshop.path / "go").touch()
    assert workshop.end(job) == (0, b"", b"")


#: a shell on a terminal of its own: starts a job in the background, reads a line, and brings the job to the
#: foreground
SHELL = """
import fcntl, os, signal, subprocess, sys, termios, time
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # as shells do
def begin():
    os.setpgrp()
    signal.signal(signal.SIGTTOU, signal.SIG_DFL)
job = subprocess.Popen([sys.executable, "-m", "shoal", *sys.argv[1:]], preexec_fn=begin)
while not os.path.exists("ready"):
    time.sleep(0.01)
print("the shell read", input(), flush=True)
os.tcsetpgrp(0, job.pid)
code = job.wait()
os.tcsetpgrp(0, os.getpgrp())
print("code", code)
"""


def test_a_job_in_the_background_reads_nothing_until_it_is_in_the_foreground(workshop: Workshop) -> None:
    (workshop.path / "script.py").write_text(
        PRELUDE + "tell('ready'); print('rank 0 read', sys.stdin.readline().strip())"
    )
    master, slave = os.openpty()
    shell = workshop.start_process(
        [sys.executable, "-c", textwrap.dedent(SHELL), "run", "script.py"],
        stdin=slave,
        start_new_session=True,
    )
    os.close(slave)
    workshop.read("ready")
    assert shell.stdout is not None
    os.write(master, b"first\n")
    assert shell.stdout.readline() == b"the shell read first\n"
    os.write(master, b"second\n")
    code, out, err = workshop.end(shell)
    os.close(master)
    assert (code, out.splitlines(), err) == (0, [b"[0] rank 0 read second", b"code 0"], b"")
