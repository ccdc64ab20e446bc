"""Signals that ask a process to leave its session at the end of a step."""

from __future__ import annotations

import atexit
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

#: seconds within which a signal that is sent to all processes of a job reaches all of them
_SIGNAL_SPREAD_S = 5.0


class LeaveRequest:
    """A request to leave the session, made by a signal or by the program, which sets ``requested``."""

    def __init__(self, can_wait: Callable[[], bool]) -> None:
        self.requested = False
        self._can_wait = can_wait  # whether a step will end; if not, a signal has its former effect
        self._signalled = False
        self._previous_handlers: dict[int, Any] = {}
        #: until this time a signal is taken for the one that other ranks have already received
        self._known_until: float | None = None

    def listen(self) -> None:
        """Handle SIGTERM, and in a Slurm job SIGUSR1, as a request to leave; in the main thread only.

        Ignored signals, and signals with a handler that was not installed from Python, are left as they are.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        for number in _numbers():
            former = signal.getsignal(number)
            if former not in (None, signal.SIG_IGN):
                self._previous_handlers[number] = former
                signal.signal(number, self._on_signal)

    def close(self, *, leave_was_requested: bool) -> None:
        """Restore the former handlers.

        ``leave_was_requested``: this process ends because other ranks were asked to leave.  If all ranks were
        signalled, its own signal may still arrive, and is not a second one.
        """
        if leave_was_requested:
            self._known_until = time.monotonic() + _SIGNAL_SPREAD_S
            atexit.register(self._ignore)
        else:
            self._restore()

    def _restore(self) -> None:
        while self._previous_handlers:
            number, former = self._previous_handlers.popitem()
            if signal.getsignal(number) == self._on_signal:  # the program has not changed it meanwhile
                signal.signal(number, former)

    def _ignore(self) -> None:
        """Ignore the signals at exit: the interpreter restores default handlers before the process ends."""
        for number in self._previous_handlers:
            if signal.getsignal(number) == self._on_signal:
                signal.signal(number, signal.SIG_IGN)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._known_until is not None:
            self._restore()
            if time.monotonic() > self._known_until:
                signal.raise_signal(number)
            return
        if self._signalled or not self._can_wait():
            self._restore()
            signal.raise_signal(number)
        self._signalled = self.requested = True


def _numbers() -> tuple[int, ...]:
    # Slurm sends SIGUSR1 before the time limit with `--signal=USR1@60`; elsewhere programs may use it.
    return (signal.SIGTERM, signal.SIGUSR1) if "SLURM_JOB_ID" in os.environ else (signal.SIGTERM,)
