"""The running ranks of a contender: their start, orders and termination."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

import psutil

from ..signals import signals_deferred
from .contenders import Contender, ContenderUnavailable, commands, environment, last_line

#: seconds that a contender gets to start, or to answer an order
ANSWER_TIMEOUT_S = 120.0
#: seconds that ranks get to end by themselves: they finish their sample, and MPI ranks wait for one another
_END_TIMEOUT_S, _KILL_TIMEOUT_S = 20.0, 3.0


class MeasurementFailed(Exception):
    """A contender cannot give one measurement, but continues; `wrong`: its result was wrong."""

    def __init__(self, reason: str, wrong: bool) -> None:
        super().__init__(reason)
        self.wrong = wrong


class ContenderProcesses:
    """A contender's ranks, waiting for orders; raises `ContenderUnavailable` if they do not start."""

    def __init__(self, contender: Contender, size: int) -> None:
        self.contender = contender
        self.version = ""
        self._folder = tempfile.TemporaryDirectory(prefix="shoal-bench-")
        #: shared memory that existed before
        self._older = frozenset(os.listdir(SHARED))
        self._processes: list[subprocess.Popen[bytes]] = []
        self._ranks: list[TextIO] = []
        try:
            self._start(size)
        except BaseException:
            self.stop(kill=True)
            raise

    def _start(self, size: int) -> None:
        folder = Path(self._folder.name)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(folder / "control"))
            listener.listen(size)
            listener.settimeout(0.2)
            for rank, command in enumerate(commands(self.contender, size, folder / "control")):
                # Signals are deferred, so that every started process is in the list.
                with (folder / f"log{rank}").open("wb") as log, signals_deferred():
                    process = subprocess.Popen(
                        command, env=environment(self.contender, rank, size, folder),
                        stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                    )  # fmt: skip
                    self._processes.append(process)
            deadline = time.monotonic() + ANSWER_TIMEOUT_S
            while len(self._ranks) < size:
                try:
                    connection, _ = listener.accept()
                except TimeoutError:
                    if time.monotonic() > deadline or any(p.poll() is not None for p in self._processes):
                        raise ContenderUnavailable(self._log()) from None
                else:
                    connection.settimeout(ANSWER_TIMEOUT_S)
                    with connection:
                        self._ranks.append(connection.makefile("rw"))
        greetings = [self._answer(rank) for rank in self._ranks]
        self.version = greetings[0]["version"]
        in_order = sorted(range(size), key=lambda i: int(greetings[i]["rank"]))
        self._ranks = [self._ranks[i] for i in in_order]

    def ask(self, do: str, **arguments: Any) -> list[dict[str, Any]]:
        """Send an order to all ranks; return their answers in order.

        Raises `MeasurementFailed` or `ContenderUnavailable`.
        """
        order = json.dumps({"do": do, **arguments}) + "\n"
        try:
            for rank in self._ranks:
                rank.write(order)
                rank.flush()
        except OSError as error:
            raise ContenderUnavailable(self._log()) from error
        answers = [self._answer(rank) for rank in self._ranks]
        for answer in answers:
            if "absent" in answer:
                raise MeasurementFailed(answer["absent"], any(other.get("wrong") for other in answers))
        return answers

    def _answer(self, rank: TextIO) -> dict[str, Any]:
        try:
            line = rank.readline()
        except OSError as error:
            raise ContenderUnavailable(f"no answer for {ANSWER_TIMEOUT_S:.0f} s: {self._log()}") from error
        if not line:
            raise ContenderUnavailable(f"a rank ended: {self._log()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _log(self) -> str:
        logs = sorted(Path(self._folder.name).glob("log*"))
        return last_line("\n".join(log.read_text(errors="replace") for log in logs))

    def stop(self, *, kill: bool = False) -> None:
        """End the ranks by closing their connections; `kill` shortens the time to end by themselves."""
        for rank in self._ranks:
            with suppress(OSError):
                rank.close()
        try:
            terminate(self._processes, _KILL_TIMEOUT_S if kill else _END_TIMEOUT_S, self._older)
        finally:
            self._folder.cleanup()


#: directory of named shared memory
SHARED = Path("/dev/shm")
#: seconds between SIGTERM, at which mpiexec ends its ranks and removes its files, and SIGKILL
KILL_DELAY_S = 5.0


def terminate(processes: Sequence[subprocess.Popen[bytes]], patience: float, older: Iterable[str]) -> None:
    """End launchers and their ranks: wait, then send SIGTERM to the launchers, then kill all processes.

    Also removes named shared memory, which killed MPI ranks cannot do. A second Ctrl-C kills at once.

    Args:
        processes: the launchers, or the ranks if there is no launcher.
        patience: seconds that the processes get to end by themselves.
        older: names in :data:`SHARED` that existed before the processes, and are kept.
    """
    # Collected now, because the ranks of a launcher that dies can no longer be found.
    family = _process_tree(processes)
    mapped: set[Path] = set()
    for member in family:
        with suppress(psutil.Error):
            mapped |= {Path(each.path) for each in member.memory_maps()}
    try:
        _wait(processes, patience)
        for process in processes:
            process.terminate()
        _wait(processes, KILL_DELAY_S)
    finally:
        for member in {*family, *_process_tree(processes)}:
            with suppress(psutil.NoSuchProcess):
                member.kill()
        for process in processes:
            process.wait()
        psutil.wait_procs(family, timeout=KILL_DELAY_S)
        for path in mapped:
            if path.parent == SHARED and path.name not in older:
                path.unlink(missing_ok=True)


def _wait(processes: Sequence[subprocess.Popen[bytes]], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    for process in processes:
        with suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - time.monotonic()))


def _process_tree(processes: Iterable[subprocess.Popen[bytes]]) -> list[psutil.Process]:
    found = []
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            parent = psutil.Process(process.pid)
            found += [parent, *parent.children(recursive=True)]
    return found
