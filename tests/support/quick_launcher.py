"""``shoal run`` without the seconds that its ranks take to import torch.

A fork of the fork server, which has imported torch, forks a launcher for each job, whose ranks are forks
again, told and watched as usual.  A rank runs its script with the interpreter's own way to end: the exception
that nobody caught is printed, and Python finalizes itself before the process exits.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import importlib
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from shoal.backend.native import channel
from shoal.launch.ranks import guardian
from shoal.testing.processes import fork_server

from . import exit_handlers
from .freezing import freeze

#: a job takes a second on an idle machine
DEADLINE = 240
#: seconds after which a rank that still runs shows its stacks
_STACKS = 220
#: a line of nanobind's report, with the prefix of `shoal run`
_LEAK_REPORT = re.compile(
    r"^(\[\d+\] )?(nanobind: | - leaked | - \.\.\. skipped|See https://nanobind).*\n?", re.MULTILINE
)
#: modules of others that a rank of this process had imported when its program began
_libraries: list[str] = []


class QuickLauncher:
    """Runs jobs one after the other; a context.

    Args:
        folder: for the output of the jobs.
        preload: modules that all ranks need, beside torch and shoal.
    """

    def __init__(self, folder: Path, preload: Sequence[str] = ()) -> None:
        self._out, self._err = folder / "job.out", folder / "job.err"
        self._jobs, jobs = Pipe()
        self._process = fork_server().Process(target=serve, args=(jobs, preload), name="quick launcher")
        self._process.start()
        jobs.close()

    def run(
        self,
        size: int,
        *command: str,
        min_ranks: int | None = None,
        respawn: bool = False,
        spares: int = 0,
        **constants: float,
    ) -> tuple[int, str, str]:
        """Run a script and its arguments on ``size`` ranks.

        Args:
            min_ranks, respawn, spares: as ``--min``, ``--respawn`` and ``--spares``.
            constants: of the supervisor, in the place of its own.

        Returns:
            Exit code, stdout, stderr.
        """
        self._jobs.send((size, min_ranks, respawn, spares, command, self._out, self._err, constants))
        code = self._jobs.recv()
        return code, self._out.read_text(), stderr_of(self._err)

    def __enter__(self) -> QuickLauncher:
        return self

    def __exit__(self, *_: object) -> None:
        self._jobs.close()
        self._process.join()
        assert self._process.exitcode == 0


def stderr_of(path: Path) -> str:
    """Return the text that forks wrote to a file as their stderr, without nanobind's reports of leaks.

    Triton 3.9, which some releases of torch import, reports its own objects in forks of a process that has
    imported it.
    """
    return _LEAK_REPORT.sub("", path.read_text())


def serve(jobs: Connection, preload: Sequence[str]) -> None:
    """Launch what is asked for until the other end is closed."""
    import shoal.compat.connect
    import shoal.launch.commands.run  # noqa: F401

    for module in preload:
        importlib.import_module(module)
    exit_handlers.restore()
    freeze()
    with contextlib.suppress(EOFError):
        while True:
            job = jobs.recv()
            pid = os.fork()
            if pid == 0:
                os._exit(_launch(*job))
            jobs.send(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def _launch(
    size: int,
    min_ranks: int | None,
    respawn: bool,
    spares: int,
    command: Sequence[str],
    out: Path,
    err: Path,
    constants: Mapping[str, float],
) -> int:
    from shoal.launch.commands import run
    from shoal.launch.job import supervisor
    from shoal.launch.job.launch import LaunchOptions
    from shoal.launch.ranks import process
    from shoal.launch.ranks.environment import Job

    for name, value in constants.items():
        assert hasattr(supervisor, name)
        setattr(supervisor, name, value)
    signal.alarm(DEADLINE)
    _redirect(os.devnull, out, err)
    names = ("PIPE", "DEVNULL", "SubprocessError")
    process.subprocess = SimpleNamespace(  # type: ignore[attr-defined]
        Popen=_Rank, **{name: getattr(subprocess, name) for name in names}
    )
    return run.launch(list(command), Job(size, spares), {}, LaunchOptions(min_ranks, respawn=respawn))


class _Rank:
    """What the launcher uses of a Popen."""

    def __init__(
        self, argv: Sequence[str], *, env: Mapping[str, str], preexec_fn: Callable[[], None] | None, **_: Any
    ) -> None:
        out, err = os.pipe(), os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.setsid()
            if (
                preexec_fn is None
            ):  # a process that joins the others: what stands before its program does not run
                argv = argv[argv.index(guardian.__file__) + 4 :]
            else:
                preexec_fn()
            os.dup2(out[1], 1)
            os.dup2(err[1], 2)
            for end in (*out, *err):
                os.close(end)
            _play(argv, env)
        os.close(out[1])
        os.close(err[1])
        self.stdout, self.stderr = os.fdopen(out[0], "rb", 0), os.fdopen(err[0], "rb", 0)

    def wait(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def play_alone(argv: Sequence[str], env: Mapping[str, str], folder: Path, out: Path, err: Path) -> None:
    """Be a rank that has no launcher to its end, in a process of the fork server."""
    import shoal.compat.connect  # noqa: F401

    exit_handlers.restore()
    os.setsid()
    os.chdir(folder)
    _redirect(os.devnull, out, err)
    _play(argv, env)


def _redirect(*paths: str | Path) -> None:
    """Make files of stdin, stdout and stderr."""
    for number, path in enumerate(paths):
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, number)
        os.close(file)


def _play(argv: Sequence[str], env: Mapping[str, str]) -> None:
    """Be a rank to its end."""
    from shoal import failure_report

    signal.alarm(0)
    multiprocessing.set_start_method(None, force=True)  # the default again, not that of the fork server
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_DFL)
    signal.set_wakeup_fd(-1)
    os.environ.clear()
    os.environ.update(env)
    failure_report._descriptor = failure_report._inherited()
    faulthandler.dump_traceback_later(_STACKS)  # on stderr, which the launcher passes on
    # Python 3.12 and later warn of a fork beside the thread of the line above.
    warnings.filterwarnings("ignore", r".*multi-threaded, use of fork\(\)", DeprecationWarning)
    # Not before the fork: a child replaces torch's thread pool at its next use.  torch does that without a
    # lock, and threads of autograd that begin together then abort the process ("Invalid thread pool!").
    torch.set_num_threads(1)
    sys.argv[:] = argv
    sys.path.insert(0, str(Path(argv[0]).resolve().parent))
    ours = {"__main__", "shoal", *sys.stdlib_module_names}
    _libraries[:] = [name for name in sys.modules if name.partition(".")[0] not in ours]
    # After the exception that nobody caught was printed it returns; the program may also end by SystemExit.
    program = f"""
import runpy
code = None
try:
    runpy.run_path({argv[0]!r}, run_name="__main__")
except SystemExit as error:
    code = error.code
import {__name__}
{__name__}.end(code)
"""
    ctypes.pythonapi.PyRun_SimpleString(program.encode())
    end(1)


def end(code: object) -> None:
    """End as Python does, but let torch be: taking it to pieces takes each rank 0.3 s.

    Python finalizes itself and the modules of shoal and of the program, not those of libraries.  Then the
    process exits, without the destructors of C++, unless shoal has set an exit code, which is one of them.
    """
    if not isinstance(code, int | None):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    with mock.patch("shoal.backend.native.channel.exit_with", wraps=channel.exit_with) as exit_with:
        atexit._run_exitfuncs()
    if not exit_with.called:
        system = ctypes.CDLL(None)
        system.on_exit(system._exit, None)
    python = ctypes.pythonapi
    python.Py_IncRef(ctypes.py_object([sys.modules.pop(name, None) for name in _libraries]))
    python.Py_Exit(code or 0)
