"""The guardian: a small process that ends the ranks when the launcher is killed.

A launcher that dies by SIGKILL cannot end its ranks; the guardian does it then.  The guardian reads a pipe
whose other end only the launcher holds.  Each rank, between fork and exec, writes its process id
into it; so when the pipe ends, every rank that exists has been announced, and the guardian kills
their process groups, including children that the ranks started.  A launcher that ends in order
writes a zero first.

The guardian is a session of its own, so that what kills the launcher's process group spares it,
and runs as a file without imports from shoal, so that it is small and starts in milliseconds.
In addition each rank asks the kernel to die with the launcher (``PR_SET_PDEATHSIG``), which
also covers the death of launcher and guardian together.
"""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType

_RECORD = struct.Struct("=i")
_IN_ORDER = 0
_PR_SET_PDEATHSIG = 1


class Guardian:
    """The launcher's side: starts the guardian process; a context that all ranks must not outlive."""

    def __init__(self) -> None:
        reader, self._writer = os.pipe()
        try:
            self._process = subprocess.Popen(
                [os.path.abspath(sys.executable), "-I", "-S", __file__],
                stdin=reader,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                start_new_session=True,
            )
        except BaseException:
            os.close(self._writer)
            raise
        finally:
            os.close(reader)

    def announcer(self) -> Callable[[], None]:
        """A function for a rank to call between fork and exec, after it became a group leader."""
        # Loaded here, in the parent: after the fork only simple calls are safe.
        import ctypes

        prctl = ctypes.CDLL(None).prctl
        launcher, writer = os.getpid(), self._writer

        def announce() -> None:
            prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
            if os.getppid() != launcher:  # it died before the line above
                os._exit(1)
            os.write(writer, _RECORD.pack(os.getpid()))

        return announce

    def __enter__(self) -> Guardian:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Every rank is gone: let the guardian end without a deed, and collect it."""
        with suppress(BrokenPipeError):  # somebody killed the guardian
            os.write(self._writer, _RECORD.pack(_IN_ORDER))
        os.close(self._writer)
        self._process.wait()


def watch(pipe: int) -> None:
    """Read process ids from ``pipe`` until it ends; then kill their groups, unless one is zero."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    data = b""
    while chunk := os.read(pipe, 4096):
        data += chunk
    groups = [pid for (pid,) in _RECORD.iter_unpack(data)]
    if _IN_ORDER in groups:
        return
    for group in groups:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    watch(sys.stdin.fileno())
