"""A contender's processes end in order, and what shared memory they leave is removed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from shoal.tools.bench import contender_process

#: a launcher with one rank; both map a file in shared memory.  argv: the file, what it does on SIGTERM
LAUNCHER = """
import os, mmap, signal, subprocess, sys, time
path, on_sigterm = sys.argv[1:]
if os.path.exists(path):
    file = os.open(path, os.O_RDWR)
else:
    file = os.open(path, os.O_RDWR | os.O_CREAT)
    os.truncate(file, 4096)
memory = mmap.mmap(file, 4096)
rank = os.fork()
if not rank:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("ready", flush=True)
    while True: time.sleep(600)
def end(*_):
    os.kill(rank, signal.SIGKILL)
    os.unlink(path)
    open(path + ".removed-by-launcher", "w").close()
    os._exit(0)
signal.signal(signal.SIGTERM, signal.SIG_IGN if on_sigterm == "ignore" else end)
while True: time.sleep(600)
"""


@pytest.fixture
def name() -> Iterator[str]:
    name = f"bench-test-{os.getpid()}"  # tests beside this one look for what "shoal" is in the name of
    yield name
    for path in contender_process.SHARED.glob(f"{name}*"):
        path.unlink()


def start(name: str, on_sigterm: str) -> tuple[subprocess.Popen[bytes], list[psutil.Process]]:
    path = str(contender_process.SHARED / name)
    launcher = subprocess.Popen(
        [sys.executable, "-S", "-c", LAUNCHER, path, on_sigterm], stdout=subprocess.PIPE
    )
    assert launcher.stdout is not None
    with launcher.stdout:
        assert launcher.stdout.readline() == b"ready\n"
    # The rank may be ready before its launcher is.
    parent = psutil.Process(launcher.pid)
    while not _handles(parent.pid, signal.SIGTERM):
        assert launcher.poll() is None
    return launcher, [parent, *parent.children()]


def _handles(pid: int, number: signal.Signals) -> bool:
    """Whether a process catches or ignores a signal."""
    status = dict(line.split(":\t") for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return bool((int(status["SigCgt"], 16) | int(status["SigIgn"], 16)) >> (number - 1) & 1)


def test_a_launcher_may_end_its_ranks_and_remove_its_files_itself(name: str) -> None:
    launcher, family = start(name, "end")
    contender_process.terminate([launcher], 0.0, older=())
    assert launcher.returncode == 0
    assert not psutil.wait_procs(family, timeout=30)[1]
    assert not (contender_process.SHARED / name).exists()
    assert (contender_process.SHARED / f"{name}.removed-by-launcher").exists()


def test_what_does_not_end_is_killed_and_its_shared_memory_removed(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contender_process, "KILL_DELAY_S", 0.1)
    launcher, family = start(name, "ignore")
    contender_process.terminate([launcher], 0.0, older=())
    assert launcher.returncode == -signal.SIGKILL
    assert not psutil.wait_procs(family, timeout=30)[1]
    assert not (contender_process.SHARED / name).exists()


def test_shared_memory_of_others_stays(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contender_process, "KILL_DELAY_S", 0.1)
    (contender_process.SHARED / name).write_bytes(bytes(4096))
    launcher, _ = start(name, "ignore")
    contender_process.terminate([launcher], 0.0, older=[name])
    assert (contender_process.SHARED / name).exists()


def test_an_interrupt_meanwhile_kills_at_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher, family = start(name, "ignore")

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(contender_process, "_wait", interrupt)
    with pytest.raises(KeyboardInterrupt):
        contender_process.terminate([launcher], 600.0, older=())
    assert launcher.returncode == -signal.SIGKILL
    assert not psutil.wait_procs(family, timeout=30)[1]
    assert not (contender_process.SHARED / name).exists()
