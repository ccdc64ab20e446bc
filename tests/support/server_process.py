"""A server as a process of a test: it ends with the process that runs the tests, also if that is killed."""

from __future__ import annotations

import abc
import contextlib
import ctypes
import signal
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from .waiting import until

_PR_SET_PDEATHSIG = 1
_prctl = ctypes.CDLL(None).prctl
_Self = TypeVar("_Self", bound="ServerProcess")


class ServerProcess(abc.ABC):
    """One server; a context, which ends it.

    Args:
        command: the program and its arguments.
        log: what it says goes there.
    """

    def __init__(self, command: Sequence[str], log: Path) -> None:
        self._command, self._log = command, log
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, or start it again; returns when it answers."""
        self.launch()
        self.await_answer()

    def launch(self) -> None:
        """The first half of :meth:`start`."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                preexec_fn=lambda: _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL),
            )  # fmt: skip

    def await_answer(self) -> None:
        """The second half of :meth:`start`."""
        until(self._lives_and_answers, self._log.read_text)

    def kill(self) -> None:
        """End it without a warning."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """Let it stand still."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    @abc.abstractmethod
    def _answers(self) -> bool:
        """Whether it answers."""

    def _lives_and_answers(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, self._log.read_text()
        return self._answers()

    def __enter__(self: _Self) -> _Self:
        try:
            self.start()
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
