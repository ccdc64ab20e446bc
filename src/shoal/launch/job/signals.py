"""Signals as bytes in a pipe, for an event loop."""

from __future__ import annotations

import math
import os
import selectors
import signal
import time
from contextlib import suppress
from types import FrameType
from typing import Any

#: end the job
STOP = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
#: suspend the job: Ctrl-Z, and use of the terminal by a job in the background
SUSPEND = (signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU)
#: passed on to the ranks
USER = (signal.SIGUSR1, signal.SIGUSR2)
#: SIGINTs within this time count as one, which reached the launcher directly and through its process group
_DUPLICATE_SIGNAL_S = 0.2
#: seconds after Ctrl-C until the launcher prints for which ranks it waits
_REMIND_S = 1.0


class Stopped(Exception):
    """A signal ended the launcher before a rank was started."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


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

    def __exit__(self, *_: object) -> None:
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

    def raise_if_stopped(self) -> None:
        """Raise Stopped if a signal of :data:`STOP` has come since the last call of :meth:`read`."""
        for number in self.read():
            if number in STOP:
                raise Stopped(number)

    def wait_readable(self, file: int) -> None:
        """Wait until a descriptor is readable; raises Stopped if a signal of :data:`STOP` comes first."""
        with selectors.DefaultSelector() as selector:
            selector.register(self.fd, selectors.EVENT_READ)
            selector.register(file, selectors.EVENT_READ)
            while all(key.fd != file for key, _ in selector.select()):
                self.raise_if_stopped()


class CtrlCFilter:
    """Distinguishes a second Ctrl-C from the first one.

    ``remind_at`` is the time to print for which ranks the launcher waits.
    """

    def __init__(self) -> None:
        self._first_at = -math.inf
        self.remind_at = math.inf

    def is_first(self, now: float) -> bool:
        """Record a SIGINT; return whether it is the first one."""
        if self._first_at > -math.inf:
            return False
        self._first_at, self.remind_at = now, now + _REMIND_S
        return True

    def is_another(self, now: float) -> bool:
        """Whether a SIGINT at this time is a second one, and not a copy of the first."""
        return now - self._first_at > _DUPLICATE_SIGNAL_S


def stop_this_process(number: int) -> None:
    """Stop as a SUSPEND signal does by default; return once this process is continued.

    Returns at once in an orphaned process group, which the kernel does not stop.
    """
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    signal.signal(number, _nothing)


def _nothing(number: int, frame: FrameType | None) -> None:
    """Do nothing: Python has written the signal's number into the pipe."""
