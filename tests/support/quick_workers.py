"""The processes of ``init_master_worker(workers=n)`` without the seconds that each takes to import torch.

A nursery, which is a fork of the fork server and has imported torch, forks them.  A worker gets the pipes,
the arguments and the environment that it would have got, and runs the program that it would have run; the
master is told of its end as usual.  Whoever tests the start of Python itself calls :func:`start_python`.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import pickle
import secrets
import select
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import Connection, Pipe
from types import FrameType, ModuleType, SimpleNamespace
from typing import Any

from shoal.controller.start import processes as node_processes
from shoal.testing.leaks import ignoring
from shoal.testing.processes import fork_server, preload

from .freezing import freeze

preload(__name__, "shoal.controller.node.serving", "shoal.controller.tensor.prediction")

#: bytes of a request, of which the environment is the most
_REQUEST = 1 << 17


@contextlib.contextmanager
def quick_workers() -> Iterator[None]:
    """Masters of this process start their workers as forks."""
    start_at(nursery())
    try:
        yield
    finally:
        start_python()


def start_at(address: str) -> None:
    """Have the workers of this process's masters started by a nursery."""
    node_processes.subprocess = SimpleNamespace(  # type: ignore[attr-defined]
        Popen=functools.partial(Worker, address),
        PIPE=subprocess.PIPE,
        TimeoutExpired=subprocess.TimeoutExpired,
    )


def start_python() -> None:
    """Have them started as users do."""
    node_processes.subprocess = subprocess  # type: ignore[attr-defined]


@functools.cache
def nursery() -> str:
    """The address of this process's nursery; the first call starts it."""
    with ignoring():  # it lives as long as this process
        address = (
            f"\0nursery-{secrets.token_hex(16)}"  # abstract: no file is left when this process is killed
        )
        ended, end = Pipe(duplex=False)
        ready, listening = Pipe(duplex=False)
        process = fork_server().Process(target=_serve, args=(address, ended, listening), name="nursery")
        process.start()
        ended.close()
        listening.close()
        with ready:
            ready.recv()

    def close() -> None:
        end.close()
        process.join()

    atexit.register(close)
    return address


class Worker:
    """What a master uses of a Popen."""

    def __init__(self, address: str, argv: Sequence[str], *, env: Mapping[str, str], **_: Any) -> None:
        into, out, err = os.pipe(), os.pipe(), os.pipe()
        self._nursery = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._nursery.connect(address)
        theirs = [into[0], out[1], err[1]]
        option, program, index, url, _, *path = argv[1:]
        # One thread, as each test has: with another number of threads, torch adds in another order.
        arguments = [option, program, index, url, "1", *path]
        socket.send_fds(self._nursery, [pickle.dumps((arguments, dict(env)))], theirs)
        for end in theirs:
            os.close(end)
        self.stdin, self.stdout, self.stderr = (
            os.fdopen(into[1], "wb"), os.fdopen(out[0], "rb"), os.fdopen(err[0], "rb")
        )  # fmt: skip
        self.pid: int = pickle.loads(self._nursery.recv(_REQUEST))
        self._code: int | None = None

    def poll(self) -> int | None:
        """Its exit code; None: it runs."""
        return self._ended(0)

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code, as soon as it has ended."""
        code = self._ended(timeout)
        if code is None:
            raise subprocess.TimeoutExpired("a worker", timeout or 0)
        return code

    def kill(self) -> None:
        """End it."""
        self.send_signal(signal.SIGKILL)

    def send_signal(self, signalled: int) -> None:
        """Send it a signal, if it has not ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # nobody has told yet
                os.kill(self.pid, signalled)

    def _ended(self, timeout: float | None) -> int | None:
        if self._code is None and select.select([self._nursery], [], [], timeout)[0]:
            code: int = pickle.loads(self._nursery.recv(_REQUEST))
            self._code = code
            self._nursery.close()
        return self._code


def _serve(address: str, ended: Connection, listening: Connection) -> None:
    """Fork workers until the other end of ``ended`` is closed; those that run end with their masters.

    Args:
        listening: is told when workers can be asked for.
    """
    freeze()
    waking, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, _pass)
    signal.set_wakeup_fd(wake)
    masters: dict[int, socket.socket] = {}
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(address)
        listener.listen(64)
        with listening:
            listening.send(None)
        while True:
            ready, _, _ = select.select([listener, waking, ended], [], [])
            if ended in ready:
                return
            if waking in ready:
                os.read(waking, 64)
                _tell(masters)
            if listener in ready:
                master = listener.accept()[0]
                request, files, _, _ = socket.recv_fds(master, _REQUEST, 3)
                if not request:  # it died before it had asked
                    master.close()
                    continue
                pid = os.fork()
                if pid == 0:
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    for each in (listener, master, *masters.values(), ended):
                        each.close()
                    _be_worker(files, *pickle.loads(request))
                for file in files:
                    os.close(file)
                masters[pid] = master
                with contextlib.suppress(OSError):  # it has died since
                    master.send(pickle.dumps(pid))


def _pass(signalled: int, frame: FrameType | None) -> None:
    """The wake-up file tells."""


def _tell(masters: dict[int, socket.socket]) -> None:
    """Tell the masters of workers that have ended."""
    for pid in list(masters):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            with masters.pop(pid) as master, contextlib.suppress(OSError):  # it has died, or asks no more
                master.send(pickle.dumps(os.waitstatus_to_exitcode(status)))


def _be_worker(files: Sequence[int], argv: Sequence[str], env: Mapping[str, str]) -> None:
    """Run ``python argv`` to its end."""
    code = 1
    try:
        for number, file in enumerate(files):
            os.dup2(file, number)
            os.close(file)
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        os.environ.clear()
        os.environ.update(env)
        option, program, *arguments = argv
        assert option == "-c"
        sys.argv = [option, *arguments]
        main = sys.modules["__main__"] = ModuleType("__main__")
        exec(program, main.__dict__)
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)
