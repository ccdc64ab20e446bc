"""Signals that tell a process to leave its session, at the end of a step."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any


class Notice:
    """Whether this process shall leave.

    Args:
        can_wait: whether there will be the end of a step; if not, a signal does what it did before.

    Attributes:
        given: whether it shall.
    """

    def __init__(self, can_wait: Callable[[], bool]) -> None:
        self.given = False
        self._can_wait = can_wait
        self._signalled = False
        self._former: dict[int, Any] = {}

    def listen(self) -> None:
        """Take SIGTERM, and within a job of Slurm SIGUSR1, for the notice; in the main thread alone.

        Signals that are ignored stay ignored, and those whose handler Python does not know as they are.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        for number in _numbers():
            former = signal.getsignal(number)
            if former not in (None, signal.SIG_IGN):
                self._former[number] = former
                signal.signal(number, self._heard)

    def restore(self) -> None:
        """Let signals do what they did before."""
        while self._former:
            number, former = self._former.popitem()
            if signal.getsignal(number) == self._heard:  # the program has not changed it meanwhile
                signal.signal(number, former)

    def _heard(self, number: int, frame: FrameType | None) -> None:
        if self._signalled or not self._can_wait():
            self.restore()
            signal.raise_signal(number)
        self._signalled = self.given = True


def _numbers() -> tuple[int, ...]:
    # Slurm gives notice with that of `--signal=USR1@60`; elsewhere programs have uses of their own for it.
    return (signal.SIGTERM, signal.SIGUSR1) if "SLURM_JOB_ID" in os.environ else (signal.SIGTERM,)
