"""The running ranks of a contender."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..measuring import undisturbed
from .contenders import Contender, commands, environment
from .ending import SHARED, end
from .environments import Absent, last_line

#: seconds that a contender gets to start, or to answer an order
PATIENCE = 120.0
#: seconds that ranks get to end by themselves: they finish their sample, and MPI ranks wait for one another
_LEISURE, _HASTE = 20.0, 3.0


class Unmeasured(Exception):
    """A contender cannot give one measurement, but continues; `wrong`: its result was wrong."""

    def __init__(self, reason: str, wrong: bool) -> None:
        super().__init__(reason)
        self.wrong = wrong


class RunningContender:
    """A contender's ranks, started and waiting for orders; raises `Absent` if they do not start."""

    def __init__(self, contender: Contender, size: int) -> None:
        self.contender = contender
        self.version = ""
        self._folder = tempfile.TemporaryDirectory(prefix="shoal-bench-")
        #: shared memory that existed before
        self._older = frozenset(os.listdir(SHARED))
        self._processes: list[subprocess.Popen[bytes]] = []
        self._ranks: list[Any] = []
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
                with (folder / f"log{rank}").open("wb") as log, undisturbed():
                    process = subprocess.Popen(
                        command, env=environment(self.contender, rank, size, folder),
                        stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
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
        in_order = sorted(range(size), key=lambda i: int(greetings[i]["rank"]))
        self._ranks = [self._ranks[i] for i in in_order]

    def ask(self, do: str, **arguments: Any) -> list[dict[str, Any]]:
        """Send an order to all ranks; return their answers in order, or raise `Unmeasured` or `Absent`."""
        order = json.dumps({"do": do, **arguments}) + "\n"
        try:
            for rank in self._ranks:
                rank.write(order)
                rank.flush()
        except OSError as error:
            raise Absent(self._log()) from error
        answers = [self._answer(rank) for rank in self._ranks]
        for answer in answers:
            if "absent" in answer:
                raise Unmeasured(answer["absent"], any(other.get("wrong") for other in answers))
        return answers

    def _answer(self, rank: Any) -> dict[str, Any]:
        try:
            line = rank.readline()
        except OSError as error:
            raise Absent(f"no answer for {PATIENCE:.0f} s: {self._log()}") from error
        if not line:
            raise Absent(f"a rank ended: {self._log()}")
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
            end(self._processes, _HASTE if kill else _LEISURE, self._older)
        finally:
            self._folder.cleanup()
