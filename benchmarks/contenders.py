"""Who takes part, how its ranks are started, and how they are told what to measure."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PATIENCE = 120.0  # seconds for a contender to start, or to answer one order


class Absent(Exception):
    """A contender cannot take part, or failed; the message says why."""


@dataclass(frozen=True)
class Contender:
    """One set of processes.  ``variants`` are (name in the results, kind of buffer) measured in it."""

    name: str
    engine: str
    variants: tuple[tuple[str, str], ...]
    environment: dict[str, str] = field(default_factory=dict)


CONTENDERS = (
    Contender("shoal", "shoal", (("shoal registered", "registered"), ("shoal", "ordinary"))),
    Contender("shoal tcp", "shoal", (("shoal tcp", "ordinary"),), {"SHOAL_TRANSPORT": "tcp"}),
    Contender("Gloo", "gloo", (("Gloo", "ordinary"),)),
    Contender("MPICH", "mpi", (("MPICH", "ordinary"),)),
    Contender("Open MPI", "mpi", (("Open MPI", "ordinary"),)),
)


def _mpi_environment(wheel: str) -> Path:
    """A virtual environment with this MPI alone: the wheels overwrite each other's mpiexec."""
    where = ROOT / "build" / "bench" / wheel
    if not (where / "bin" / "mpiexec").exists():
        shutil.rmtree(where, ignore_errors=True)
        venv.create(where, with_pip=True)
        pip = [str(where / "bin" / "pip"), "--disable-pip-version-check", "install", "--quiet"]
        command = [*pip, "-c", str(ROOT / "constraints.txt"), "mpi4py", "numpy", wheel]
        result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if result.returncode:
            raise Absent(f"pip install {wheel}: {_last_line(result.stdout)}")
    return where


def _commands(contender: Contender, size: int, arguments: Sequence[str]) -> list[list[str]]:
    """What to start, each with its engine's own launcher and that launcher's defaults."""
    script = [str(ROOT / "benchmarks" / "rank.py"), "--engine", contender.engine, *arguments]
    if contender.engine == "shoal":
        return [[sys.executable, "-m", "shoal", "run", "-n", str(size), *script]]
    if contender.engine == "gloo":
        return [[sys.executable, *script] for _ in range(size)]
    where = _mpi_environment(contender.name.lower().replace(" ", ""))
    launcher = [str(where / "bin" / "mpiexec"), "-n", str(size)]
    if contender.name == "Open MPI":
        launcher.append("--allow-run-as-root")
        if size > len(os.sched_getaffinity(0)):
            launcher.append("--oversubscribe")
    return [[*launcher, str(where / "bin" / "python"), *script]]


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no output"


class Running:
    """A contender's ranks, started and waiting for orders."""

    def __init__(self, contender: Contender, size: int) -> None:
        """Start ``size`` ranks and wait for all of them.  Raises ``Absent``."""
        self.contender = contender
        self._folder = tempfile.TemporaryDirectory(prefix="shoal-bench-")
        self._processes: list[subprocess.Popen[bytes]] = []
        self._ranks: list[Any] = []
        self.version = ""
        try:
            self._start(size)
        except BaseException:
            self.stop(kill=True)
            raise

    def _start(self, size: int) -> None:
        folder = Path(self._folder.name)
        commands = _commands(self.contender, size, ["--control", str(folder / "control")])
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(folder / "control"))
            listener.listen(size)
            listener.settimeout(0.2)
            for rank, command in enumerate(commands):
                environment = {**os.environ, "OMP_NUM_THREADS": "1", **self.contender.environment}
                if self.contender.engine == "gloo":
                    environment |= {"RANK": str(rank), "WORLD_SIZE": str(size)}
                with (folder / f"log{rank}").open("wb") as log:
                    process = subprocess.Popen(
                        command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                        start_new_session=True,
                    )  # fmt: skip
                self._processes.append(process)
            deadline = time.monotonic() + PATIENCE
            while len(self._ranks) < size:
                try:
                    connection, _ = listener.accept()
                except TimeoutError:
                    if time.monotonic() > deadline or any(p.poll() is not None for p in self._processes):
                        raise Absent(self._log()) from None
                else:
                    connection.settimeout(PATIENCE)
                    with connection:
                        self._ranks.append(connection.makefile("rw"))
        greetings = [self._answer(rank) for rank in self._ranks]
        self.version = greetings[0]["version"]

    def measure(self, variant: str, nbytes: int, repeat: int) -> float:
        """Seconds for one all-reduce of ``nbytes`` of fp32 on the slowest rank.  Raises ``Absent``."""
        order = json.dumps({"variant": variant, "count": nbytes // 4, "repeat": repeat})
        for rank in self._ranks:
            rank.write(order + "\n")
            rank.flush()
        return max(self._answer(rank)["seconds"] for rank in self._ranks)

    def _answer(self, rank: Any) -> dict[str, Any]:
        try:
            answer: dict[str, Any] = json.loads(rank.readline() or "{}")
        except OSError as error:
            raise Absent(f"no answer for {PATIENCE:.0f} s: {self._log()}") from error
        if not answer or "error" in answer:
            raise Absent(answer.get("error") or self._log())
        return answer

    def _log(self) -> str:
        logs = sorted(Path(self._folder.name).glob("log*"))
        return _last_line("\n".join(log.read_text(errors="replace") for log in logs))

    def stop(self, *, kill: bool = False) -> None:
        """End the ranks: their connections close, and what does not end by itself is killed."""
        for rank in self._ranks:
            rank.close()
        for process in self._processes:
            try:
                process.wait(0 if kill else 20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        self._folder.cleanup()
