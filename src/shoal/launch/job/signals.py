"""Signals as bytes in a pipe, for an event loop."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any

#: end the job
STOP = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
#: stop the job until a shell continues it: Ctrl-Z, and use of the terminal by a job in the background
SUSPEND = (signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU)
#: mean whatever the ranks make of them
USER = (signal.SIGUSR1, signal.SIGUSR2)


class Signals:
    """A context in which STOP, SUSPEND and USER signals do nothing but make ``fd`` readable.

    Only for the main thread, as Python's signal handlers are.  On leaving, the former handlers are
    in place again.  SIGHUP and SUSPEND signals that are ignored, as by nohup, stay ignored.

    Args:
        settle: seconds for which :meth:`read` keeps back what Slurm may be sending to other processes of the
            job too: they shall have got it when this process tells them.
    """

    def __init__(self, settle: float = 0.0) -> None:
        self._settle = settle

    def __enter__(self) -> Signals:
        self.fd, self._writer = os.pipe()
        os.set_blocking(self.fd, False)
        os.set_blocking(self._writer, False)
        self._old_wakeup = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        kept = {each for each in (signal.SIGHUP, *SUSPEND) if signal.getsignal(each) is signal.SIG_IGN}
        taken = [number for number in (*STOP, *USER, *SUSPEND) if number not in kept]
        self._old: dict[int, Any] = {number: signal.signal(number, _nothing) for number in taken}
        # With SIGCHLD ignored, as some parents hand it down, ended children would vanish unseen.
        self._old_child = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)
        signal.signal(signal.SIGCHLD, self._old_child)
        signal.set_wakeup_fd(self._old_wakeup)
        os.close(self.fd)
        os.close(self._writer)

    def wake(self) -> None:
        """Make ``fd`` readable without a signal; from any thread."""
        with suppress(BlockingIOError):
            os.write(self._writer, b"\0")

    def read(self) -> list[int]:
        """The signals since the last call, in order of arrival; blocks for ``settle`` seconds at most."""
        with suppress(BlockingIOError):
            found = [number for number in os.read(self.fd, 4096) if number in self._old]
            if self._settle and any(number != signal.SIGINT for number in found):
                time.sleep(self._settle)
            return found
        return []


def stop_this_process(number: int) -> None:
    """Stop as a SUSPEND signal does by default; returns once this process is continued.

    At once where the kernel lets nobody stop, as no shell could continue the process.
    """
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    signal.signal(number, _nothing)


def _nothing(number: int, frame: FrameType | None) -> None:
    """Do nothing: Python has written the signal's number into the pipe."""
