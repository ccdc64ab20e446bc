"""The identity of a process, and whether it has ended."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from shoal.common import process_identity
from shoal.common.process_identity import ProcessIdentity, ProcessStatus, machine_id, now, start_ticks
from tests.support.waiting import until


def test_processes_of_one_machine_have_one_identity() -> None:
    program = "from shoal.common.process_identity import machine_id; print(machine_id())"
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert output.stdout.strip() == machine_id()
    assert machine_id().startswith(socket.gethostname())


def other(pid: object, start: object, namespace: str | None = None) -> ProcessIdentity:
    mine = ProcessIdentity.current()
    return ProcessIdentity(mine.machine, f"{namespace or mine.process.split('/')[0]}/{pid}/{start}")


def test_a_process_is_dead_when_it_ended_or_its_number_was_used_again() -> None:
    mine = ProcessIdentity.current()
    assert mine.pid == os.getpid()
    assert mine.status() is ProcessStatus.ALIVE
    assert other(mine.pid, float(mine.process.rsplit("/")[-1]) - 100).is_dead()
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    assert other(ended.pid, 1.0).is_dead()


def test_a_process_of_another_container_or_machine_is_not_judged() -> None:
    pid = ProcessIdentity.current().pid
    assert other(pid, 1.0, namespace="pid:[1]").status() is ProcessStatus.UNKNOWN
    elsewhere = ProcessIdentity("elsewhere/boot/net", other(pid, 1.0).process)
    assert elsewhere.status() is ProcessStatus.UNKNOWN
    assert not elsewhere.is_stopped()


def test_a_process_that_nobody_waited_for_is_dead() -> None:
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)  # it stays a zombie
    assert other(child, start_ticks(child)).is_dead()
    os.waitpid(child, 0)


def test_a_process_whose_first_thread_ended_is_alive() -> None:
    program = (
        "import ctypes, threading, time; threading.Thread(target=time.sleep, args=(60,)).start();"
        "ctypes.PyDLL(None).pthread_exit(0)"  # keeps the lock of the interpreter, which does no harm here
    )
    process = subprocess.Popen([sys.executable, "-c", program])
    try:
        stat = Path(f"/proc/{process.pid}/stat")
        until(lambda: ") Z " in stat.read_text())
        assert other(process.pid, start_ticks(process.pid)).status() is ProcessStatus.ALIVE
    finally:
        process.kill()
        process.wait()


def test_a_stopped_process_is_found() -> None:
    process = subprocess.Popen(["sleep", "60"])
    try:
        found = other(process.pid, start_ticks(process.pid))
        assert not found.is_stopped()
        process.send_signal(signal.SIGSTOP)
        until(found.is_stopped)
        assert found.status() is ProcessStatus.ALIVE
    finally:
        process.kill()
        process.wait()


def test_a_process_that_proc_hides_is_not_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = ProcessIdentity.current()
    monkeypatch.setattr(process_identity, "_state", lambda pid: None)
    assert mine.status() is ProcessStatus.UNKNOWN
    assert ProcessIdentity.current().status() is ProcessStatus.UNKNOWN  # with an unknown start


def test_a_process_was_started_after_whatever_came_before_it() -> None:
    script = """
    import os, time
    from shoal.common.process_identity import now, process_start_time
    def in_child():
        before, child = now(), os.fork()
        if not child:
            os._exit(not before <= process_start_time() <= now())
        assert os.waitpid(child, 0)[1] == 0
    for _ in range(20):
        in_child()
    print(process_start_time())
    """
    before = now()
    out = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True, stdout=subprocess.PIPE)
    assert before <= float(out.stdout) <= now()
