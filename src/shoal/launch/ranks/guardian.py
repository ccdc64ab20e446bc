"""The guardian: a small process that ends the ranks if the launcher is killed.

The guardian reads a pipe; only the launcher holds the other end.  Each rank writes its process id into the
pipe before its program runs.  So when the pipe ends, all ranks have been announced, and the guardian kills
their process groups, including their children.  The launcher writes the negative id of a rank before the
kernel may reuse the id, and a zero when it exits normally.

The guardian is in a separate session, so that a kill of the launcher's process group does not reach it.  It
is a file without imports from shoal, so that it is small and starts in milliseconds.  In addition each rank
asks the kernel to be killed when the launcher dies (``PR_SET_PDEATHSIG``), in case both die together.

Initial ranks are forked before the launcher has threads, and announce themselves between fork and exec.
Later no Python code may run between fork and exec: another thread may hold a lock, for example of the
allocator, which is never released in the child.  So a later process first executes this file
(:func:`begin`), which announces it and executes its program.
"""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NoReturn

_RECORD = struct.Struct("=i")
_IN_ORDER = 0
#: timeout in seconds for the guardian to exit after a job, when it has nothing to do
END_S = 2.0
_PR_SET_PDEATHSIG = 1


class Guardian:
    """The launcher's side: a context with a guardian process, which must not end before all ranks.

    Attributes:
        pipe: the descriptor that a process with the command of :meth:`wrapped` must inherit.
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

    def wrapped(self, argv: Sequence[str], cores: Sequence[int] | None) -> list[str]:
        """A command that announces its process, binds it to ``cores``, and executes ``argv``."""
        bound = ",".join(map(str, cores or ()))
        python = os.path.abspath(sys.executable)
        return [python, "-I", "-S", __file__, str(os.getpid()), str(self.pipe), bound, *argv]

    def forget(self, pid: int) -> None:
        """Forget a rank, after its process group was killed and before it is reaped."""
        with suppress(BrokenPipeError):
            os.write(self.pipe, _RECORD.pack(-pid))

    def __enter__(self) -> Guardian:
        return self

    def __exit__(self, *_: object) -> None:
        """End and reap the guardian, without killing: all ranks have ended."""
        with suppress(BrokenPipeError):  # the guardian was killed
            os.write(self.pipe, _RECORD.pack(_IN_ORDER))
        os.close(self.pipe)
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:  # the guardian was stopped
            self._process.kill()
            self._process.wait()


def watch(pipe: int) -> None:
    """Read process ids from ``pipe`` until it ends; then kill their groups, unless a zero was read."""
    # Slurm sends signals of a job, such as SIGUSR1, to all processes of its steps.
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
    """Announce this process, and execute its program; the command of :meth:`Guardian.wrapped`."""
    preparation(launcher, pipe, [int(core) for core in cores.split(",") if core])()
    os.close(pipe)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # ignored by Python
        signal.signal(number, signal.SIG_DFL)
    # Python changes variables of the locale when it starts; this file has them as given by the launcher.
    with open("/proc/self/environ", "rb") as file:
        given = file.read().split(b"\0")
    try:
        os.execvpe(argv[0], argv, dict(each.split(b"=", 1) for each in given if b"=" in each))
    except OSError as error:
        print(f"shoal: {argv[0]}: {error.strerror}", file=sys.stderr, flush=True)
    os._exit(127)


def preparation(launcher: int, pipe: int, cores: Sequence[int] | None) -> Callable[[], None]:
    """A function for a rank to call between fork and exec, after it has become a group leader.

    It announces the rank, a child of ``launcher``, to the guardian, and binds it to ``cores``.
    """
    # Imported here: between fork and exec only simple calls are safe.
    import ctypes

    prctl = ctypes.CDLL(None).prctl

    def prepare() -> None:
        prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != launcher:  # it died before prctl was called
            os._exit(1)
        with suppress(BrokenPipeError):  # the guardian was killed
            os.write(pipe, _RECORD.pack(os.getpid()))
        if cores:
            os.sched_setaffinity(0, cores)

    return prepare


if __name__ == "__main__":
    if len(sys.argv) == 1:
        watch(sys.stdin.fileno())
    else:
        begin(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4:])
