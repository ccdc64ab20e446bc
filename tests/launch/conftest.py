"""Starting launchers on small scripts, and watching what becomes of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.waiting import until

#: nothing here takes a second; a busy machine may make it ten
DEADLINE = 240.0

USER_SETTINGS = {"COLUMNS", "LINES", "FORCE_COLOR", "NO_COLOR", "TERM", "OMP_NUM_THREADS"}

#: files by which scripts talk to the test and to each other
FILES = """
import os, signal, sys, time
def tell(name, text=""):
    with open(name + ".new", "w") as file:
        file.write(str(text))
    os.rename(name + ".new", name)
def await_file(name):
    while not os.path.exists(name):
        time.sleep(0.005)
"""

#: what every script can use: its rank, its pid in a file, and waiting for files of others
PRELUDE = (
    FILES
    + """
rank = int(os.environ["SHOAL_RANK"])
def await_signal():
    # Python looks for signals and then sleeps: one that comes in between waits for the end of the sleep.
    while True:
        time.sleep(0.05)
"""
)


def alive(pid: int) -> bool:
    """Whether a process runs; one that waits to be reaped does not."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


class Workshop:
    """A directory for scripts, in which launchers run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._started: list[subprocess.Popen[bytes]] = []

    def start(
        self, script: str, *, ranks: int = 2, options: Sequence[str] = (), **settings: Any
    ) -> subprocess.Popen[bytes]:
        """Start ``shoal run`` with ``options`` on a script."""
        (self.path / "script.py").write_text(PRELUDE + textwrap.dedent(script))
        return self.shoal("run", "-n", str(ranks), *options, "script.py", **settings)

    def shoal(self, *arguments: str, **options: Any) -> subprocess.Popen[bytes]:
        """Start a ``shoal`` command, with pipes unless told otherwise."""
        return self.start_process([sys.executable, "-m", "shoal", *arguments], **options)

    def start_process(self, argv: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
        """Start a program in the directory."""
        settings: dict[str, Any] = {
            "cwd": self.path,
            # Not by inheritance: importing readline, as pytest does, sets COLUMNS behind Python's back.
            "env": dict(os.environ),
            "stdin": subprocess.DEVNULL,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
        }
        process = subprocess.Popen(argv, **settings | options)
        self._started.append(process)
        return process

    def run(self, script: str, *, ranks: int = 2, **options: Any) -> tuple[int, bytes, bytes]:
        """Run a script to its end: exit code, stdout, stderr."""
        return self.end(self.start(script, ranks=ranks, **options))

    def end(self, process: subprocess.Popen[bytes]) -> tuple[int, bytes, bytes]:
        """Wait for the end of a command: exit code, stdout, stderr."""
        out, err = process.communicate(timeout=DEADLINE)
        return process.returncode, out, err

    def read(self, name: str) -> str:
        """What a rank told, once it has."""
        until((self.path / name).exists)
        return (self.path / name).read_text()

    def pids(self, *names: str) -> list[int]:
        """The process ids that ranks told."""
        return [int(self.read(name)) for name in names]

    def close(self) -> None:
        for process in self._started:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
            process.wait()
            for pipe in (process.stdin, process.stdout, process.stderr):
                if pipe is not None:
                    with suppress(BrokenPipeError):
                        pipe.close()


@pytest.fixture
def workshop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Workshop]:
    for name in list(os.environ):  # what the user of the tests has set must not decide their results
        if name.startswith("SHOAL_") or name in USER_SETTINGS:
            monkeypatch.delenv(name)
    if paths := os.environ.get("PYTHONPATH"):  # launchers run in another directory
        absolute = (os.path.abspath(path) for path in paths.split(os.pathsep))
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(absolute))
    workshop = Workshop(tmp_path)
    yield workshop
    workshop.close()
