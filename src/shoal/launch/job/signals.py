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
#: suspend the job: Ctrl-Z, and use of the terminal by a job in the background
SUSPEND = (signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU)
#: passed on to the ranks
USER = (signal.SIGUSR1, signal.SIGUSR2)


class Signals:
    """A context in which STOP, SUSPEND and USER signals only make ``fd`` readable.

    Must be used on the main thread.  On exit the former handlers are restored.  SIGHUP and SUSPEND signals
    that are ignored, as by nohup, stay ignored.

    Args:
        settle: seconds by which :meth:`read` delays signals other than SIGINT, so that Slurm has sent the
            signal to the other processes of the job before this process passes it on.
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
        # If the parent left SIGCHLD ignored, the exit status of children would be lost.
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
        """Make ``fd`` readable without a signal; may be called on any thread."""
        with suppress(BlockingIOError):
            os.write(self._writer, b"\0")

    def read(self) -> list[int]:
        """The signals since the last call, in order of arrival; blocks for at most ``settle`` seconds."""
        with suppress(BlockingIOError):
            found = [number for number in os.read(self.fd, 4096) if number in self._old]
            if self._settle and any(number != signal.SIGINT for number in found):
                time.sleep(self._settle)
            return found
        return []


def stop_this_process(number: int) -> None:
    """Stop as a SUSPEND signal does by default; return once this process is continued.

    Returns at once in an orphaned process group, which the kernel does not stop.
    """
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    signal.signal(number, _nothing)


def _nothing(number: int, frame: FrameType | None) -> None:
    """Do nothing: Python has written the signal's number into the pipe."""
