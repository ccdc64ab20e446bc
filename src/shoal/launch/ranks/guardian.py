"""The guardian: a small process that ends the ranks when the launcher is killed.

A launcher that dies by SIGKILL cannot end its ranks; the guardian does it then.  The guardian reads a pipe
whose other end only the launcher holds.  Each rank, before its program runs, writes its process id
into it; so when the pipe ends, every rank that exists has been announced, and the guardian kills
their process groups, including children that the ranks started.  The launcher writes the negative id of
a rank before the kernel may give the id to a stranger, and a zero when it ends in order.

The guardian is a session of its own, so that what kills the launcher's process group spares it,
and runs as a file without imports from shoal, so that it is small and starts in milliseconds.
In addition each rank asks the kernel to die with the launcher (``PR_SET_PDEATHSIG``), which
also covers the death of launcher and guardian together.

Ranks that meet first are forked before the launcher has threads, and announce themselves between fork and
exec.  Later no Python may run between fork and exec: another thread may hold a lock, of the allocator for
example, which nobody would release in the child.  So a later process first executes this file
(:func:`begin`), which announces it, and executes its program.
"""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import NoReturn

_RECORD = struct.Struct("=i")
_IN_ORDER = 0
#: seconds in which the guardian ends after an orderly job; it has nothing to do then
END_S = 2.0
_PR_SET_PDEATHSIG = 1


class Guardian:
    """The launcher's side: starts the guardian process; a context that all ranks must not outlive.

    Attributes:
        pipe: the descriptor that a process which runs :meth:`wrapped` must inherit.
    """

    def __init__(self) -> None:
        reader, self.pipe = os.pipe()
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
            os.close(self.pipe)
            raise
        finally:
            os.close(reader)

    def announcer(self) -> Callable[[], None]:
        """A function for a rank to call between fork and exec, after it became a group leader."""
        return _announcer(os.getpid(), self.pipe)

    def wrapped(self, argv: Sequence[str], cores: Sequence[int] | None) -> list[str]:
        """The command that announces its process, binds it to ``cores``, and then executes ``argv``."""
        bound = ",".join(map(str, cores or ()))
        python = os.path.abspath(sys.executable)
        return [python, "-I", "-S", __file__, str(os.getpid()), str(self.pipe), bound, *argv]

    def forget(self, pid: int) -> None:
        """A rank is gone, and with it all processes of its group; to be called before it is reaped."""
        with suppress(BrokenPipeError):
            os.write(self.pipe, _RECORD.pack(-pid))

    def __enter__(self) -> Guardian:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Every rank is gone: let the guardian end without a deed, and collect it."""
        with suppress(BrokenPipeError):  # somebody killed the guardian
            os.write(self.pipe, _RECORD.pack(_IN_ORDER))
        os.close(self.pipe)
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:  # somebody has stopped it, and nothing is left to guard
            self._process.kill()
            self._process.wait()


def watch(pipe: int) -> None:
    """Read process ids from ``pipe`` until it ends; then kill their groups, unless the last is zero."""
    # Slurm sends what a job is told, such as SIGUSR1, to all processes of its steps.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    data = b""
    while chunk := os.read(pipe, 4096):
        data += chunk
    groups: set[int] = set()
    for (pid,) in _RECORD.iter_unpack(data):
        if pid == _IN_ORDER:
            return
        groups.discard(-pid)
        if pid > 0:
            groups.add(pid)
    for group in groups:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)


def begin(launcher: int, pipe: int, cores: str, argv: list[str]) -> NoReturn:
    """Be the process that :meth:`Guardian.wrapped` means: announce it and execute its program."""
    _announcer(launcher, pipe)()
    os.close(pipe)
    if cores:
        os.sched_setaffinity(0, map(int, cores.split(",")))
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # which Python ignores
        signal.signal(number, signal.SIG_DFL)
    # Python changes the locale's variables when it starts; here they are as the launcher gave them.
    with open("/proc/self/environ", "rb") as file:
        given = file.read().split(b"\0")
    try:
        os.execvpe(argv[0], argv, dict(each.split(b"=", 1) for each in given if b"=" in each))
    except OSError as error:
        print(f"shoal: {argv[0]}: {error.strerror}", file=sys.stderr, flush=True)
    os._exit(127)


def _announcer(launcher: int, pipe: int) -> Callable[[], None]:
    # Loaded here: between fork and exec only simple calls are safe.
    import ctypes

    prctl = ctypes.CDLL(None).prctl

    def announce() -> None:
        prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != launcher:  # it died before the line above
            os._exit(1)
        with suppress(BrokenPipeError):  # somebody killed the guardian
            os.write(pipe, _RECORD.pack(os.getpid()))

    return announce


if __name__ == "__main__":
    if len(sys.argv) == 1:
        watch(sys.stdin.fileno())
    else:
        begin(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4:])
