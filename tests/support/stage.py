"""Starting programs that use torch.distributed as users do, and looking for what they leave behind."""

from __future__ import annotations

import multiprocessing.context
import os
import re
import secrets
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from shoal.testing.processes import fork_server

from .launch_environments import Environment, by_hand
from .ports import free_port
from .quick_launcher import play_alone, stderr_of

ROOT = Path(__file__).resolve().parents[2]

#: nothing here takes ten seconds on an idle machine
DEADLINE = 120.0

#: how a rank talks to the test, and something that needs every rank
PRELUDE = """
import os, signal, sys, time
import torch
import torch.distributed as dist
torch.set_num_threads(1)
def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())  # whole lines, even from torchrun's ranks
def total():
    x = torch.full((1000,), float(dist.get_rank() + 1))
    dist.all_reduce(x)
    return x.unique().tolist()
"""

#: what the user of the tests has set must not decide their results
FOREIGN = ("SHOAL_", "TORCHELASTIC_", "RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "MASTER_", "OMP_NUM_THREADS")


@dataclass(frozen=True)
class Ended:
    """How a command ended: exit code, stdout, stderr."""

    code: int
    out: str
    err: str


class Stage:
    """A folder where programs run, marked so that whatever they start can be found."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._mark = secrets.token_hex(16)
        self._started: list[subprocess.Popen[str]] = []
        self._forks: list[multiprocessing.context.ForkServerProcess] = []
        self._shared = set(os.listdir("/dev/shm"))
        paths = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
        self.environment = {k: v for k, v in os.environ.items() if not k.startswith(FOREIGN)}
        self.environment |= {
            "STAGE": self._mark,
            "OMP_NUM_THREADS": "1",
            "PET_MASTER_PORT": str(free_port()),  # for torchrun, whose default is one port for all jobs
            "PYTHONPATH": os.pathsep.join([str(_entry_points(path)), *map(os.path.abspath, paths)]),
        }

    def script(self, body: str, *, prelude: str = PRELUDE) -> str:
        """Write a program; gives its name."""
        (self.path / "script.py").write_text(prelude + textwrap.dedent(body))
        return "script.py"

    def start(self, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        """Start Python with ``arguments``."""
        return self._start(sys.executable, *arguments, **environment)

    def _start(self, *command: str, **environment: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            command,
            cwd=self.path,
            env=self.environment | environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._started.append(process)
        return process

    def end(self, process: subprocess.Popen[str]) -> Ended:
        """Wait for a command to end."""
        out, err = process.communicate(timeout=DEADLINE)
        return Ended(process.returncode, out, err)

    def run(self, *arguments: str, **environment: str) -> Ended:
        """Run Python with ``arguments`` to its end."""
        return self.end(self.start(*arguments, **environment))

    def execute(self, *command: str, **environment: str) -> Ended:
        """Run a command to its end."""
        return self.end(self._start(*command, **environment))

    def ranks(
        self, script: str, size: int = 2, launcher: Callable[[int, int, int], Environment] = by_hand
    ) -> list[Ended]:
        """Run ``script`` on ranks that nobody watches over; they are forks that have torch imported.

        Args:
            launcher: makes the variables by which a rank finds its place, of rank, size and a free port.
        """
        port, ranks = free_port(), []
        for rank in range(size):
            files = self.path / f"{rank}.out", self.path / f"{rank}.err"
            variables = self.environment | launcher(rank, size, port)
            arguments = ([script], variables, self.path, *files)
            process = fork_server().Process(target=play_alone, args=arguments)
            ranks.append((process, *files))
            self._forks.append(process)
            process.start()
        end = time.monotonic() + DEADLINE
        for process, _, _ in ranks:
            process.join(max(0.0, end - time.monotonic()))
            assert process.exitcode is not None, [path.read_text() for _, *files in ranks for path in files]
        return [Ended(process.exitcode, out.read_text(), stderr_of(err)) for process, out, err in ranks]

    def assert_nothing_is_left(self) -> None:
        """No process of this stage, and nothing new in shared memory."""
        end = time.monotonic() + 10
        while left := self._alive():
            assert time.monotonic() < end, f"still running: {left}"
            time.sleep(0.01)
        assert not {name for name in os.listdir("/dev/shm") if "shoal" in name} - self._shared

    def close(self) -> None:
        for process in self._started:
            if process.poll() is None:
                process.kill()
            process.communicate()
        for fork in self._forks:
            fork.kill()
            fork.join()
        for left in self._alive():
            left.kill()

    def _alive(self) -> list[psutil.Process]:
        found, sessions = [], {fork.pid for fork in self._forks}
        for process in psutil.process_iter():
            try:
                # The environment of a fork is that of the fork server, but each has a session.
                if process.environ().get("STAGE") == self._mark or os.getsid(process.pid) in sessions:
                    found.append(process)
            except (psutil.Error, ProcessLookupError):
                continue
        return found


def _entry_points(folder: Path) -> Path:
    """A folder for ``sys.path`` that declares what an installed shoal does, for tests of a source tree."""
    site = folder / "site"
    metadata = site / "shoal_declared-1.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: shoal-declared\nVersion: 1\n")
    project = (ROOT / "pyproject.toml").read_text()
    declared = re.search(r'\[project\.entry-points\."torch\.backends"\]\n(\w+) = "(\S+)"\n', project)
    assert declared is not None
    (metadata / "entry_points.txt").write_text("[torch.backends]\n{} = {}\n".format(*declared.groups()))
    return site
