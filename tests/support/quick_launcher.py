"""``shoal run`` without the seconds that its ranks take to import torch.

A process imports torch once.  For each job it forks a launcher, whose ranks are forks again, told and
watched as usual.  A rank runs its script with the interpreter's own way to end: the exception that nobody
caught is printed, and Python finalizes itself before the process exits.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

#: a job takes a second on an idle machine
DEADLINE = 60

#: Whatever has an optimiser imports the compiler, which takes a second in every rank, and so do the digits.
PRELOADED = (
    "torch._dynamo", "torch.distributed.optim", "torch.distributed.fsdp", "torch.distributed.tensor.parallel",
    "sklearn.datasets", "sklearn.model_selection",
)  # fmt: skip


class QuickLauncher:
    """Runs jobs one after the other; a context."""

    def __init__(self, folder: Path) -> None:
        self._out, self._err = folder / "job.out", folder / "job.err"
        self._process = subprocess.Popen(
            [sys.executable, "-c", "from tests.support.quick_launcher import serve; serve()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, size: int, *command: str, **constants: float) -> tuple[int, str, str]:
        """Run a script and its arguments on ``size`` ranks.

        Args:
            constants: of the supervisor, in the place of its own.

        Returns:
            Exit code, stdout, stderr.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        job: dict[str, Any] = {"size": size, "command": command, "out": str(self._out), "err": str(self._err)}
        job["constants"] = constants
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        code = int(self._process.stdout.readline())
        return code, self._out.read_text(), self._err.read_text()

    def __enter__(self) -> QuickLauncher:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()
        assert self._process.returncode == 0


def serve() -> None:
    """Launch what is asked for on stdin until it ends."""
    import torch

    import shoal.compat.connect
    import shoal.initialize
    import shoal.launch.run  # noqa: F401

    for module in PRELOADED:
        importlib.import_module(module)
    torch.set_num_threads(1)
    gc.freeze()  # or each rank walks over all of torch when it ends
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            os._exit(_launch(**json.loads(line)))
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


def _launch(size: int, command: Sequence[str], out: str, err: str, constants: Mapping[str, float]) -> int:
    from shoal.launch import process, run, supervisor

    for name, value in constants.items():
        assert hasattr(supervisor, name)
        setattr(supervisor, name, value)
    signal.alarm(DEADLINE)
    for number, path in enumerate((os.devnull, out, err)):
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, number)
        os.close(file)
    names = ("PIPE", "DEVNULL", "SubprocessError")
    process.subprocess = SimpleNamespace(  # type: ignore[attr-defined]
        Popen=_Rank, **{name: getattr(subprocess, name) for name in names}
    )
    return run.launch(list(command), size, {})


class _Rank:
    """What the launcher uses of a Popen."""

    def __init__(
        self, argv: Sequence[str], *, env: Mapping[str, str], preexec_fn: Callable[[], None], **_: Any
    ) -> None:
        out, err = os.pipe(), os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.setsid()
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


def _play(argv: Sequence[str], env: Mapping[str, str]) -> None:
    """Be a rank to its end."""
    from shoal import failure_report

    signal.alarm(0)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_DFL)
    signal.set_wakeup_fd(-1)
    os.environ.clear()
    os.environ.update(env)
    failure_report._line = failure_report._inherited()
    sys.argv[:] = argv
    sys.path.insert(0, str(Path(argv[0]).resolve().parent))
    python = ctypes.pythonapi
    # It ends the process after SystemExit.
    program = f"import runpy; runpy.run_path({argv[0]!r}, run_name='__main__')"
    failed = python.PyRun_SimpleString(program.encode())
    python.Py_Exit(1 if failed else 0)
