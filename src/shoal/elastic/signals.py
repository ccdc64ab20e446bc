"""Signals that tell a process to leave its session, at the end of a step."""

from __future__ import annotations

import atexit
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

#: seconds in which a signal to all processes of a job reaches the last of them
_SPREADING = 5.0


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
        #: until when a signal is that of which this process has heard from others
        self._known_until: float | None = None

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

    def close(self, *, others_were_told: bool) -> None:
        """Let signals do what they did before.

        Args:
            others_were_told: this process ends because others were told to leave.  Where all of them were,
                its own signal may still be on its way, and is no second one.
        """
        if others_were_told:
            self._known_until = time.monotonic() + _SPREADING
            atexit.register(self._ignore)
        else:
            self._restore()

    def _restore(self) -> None:
        while self._former:
            number, former = self._former.popitem()
            if signal.getsignal(number) == self._heard:  # the program has not changed it meanwhile
                signal.signal(number, former)

    def _ignore(self) -> None:
        """The interpreter ends, and would give up the handlers before the process has ended."""
        for number in self._former:
            if signal.getsignal(number) == self._heard:
                signal.signal(number, signal.SIG_IGN)

    def _heard(self, number: int, frame: FrameType | None) -> None:
        if self._known_until is not None:
            self._restore()
            if time.monotonic() > self._known_until:
                signal.raise_signal(number)
            return
        if self._signalled or not self._can_wait():
            self._restore()
            signal.raise_signal(number)
        self._signalled = self.given = True


def _numbers() -> tuple[int, ...]:
    # Slurm gives notice with that of `--signal=USR1@60`; elsewhere programs have uses of their own for it.
    return (signal.SIGTERM, signal.SIGUSR1) if "SLURM_JOB_ID" in os.environ else (signal.SIGTERM,)
