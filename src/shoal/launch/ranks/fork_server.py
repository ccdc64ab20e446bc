"""The fork server of ``shoal run --preload``: one process imports modules, and ranks are forked from it.

Ranks of one host then share one import, and a rank that replaces another does not wait for one.  The ranks
must be children of the launcher, which waits for their end, and with which they die.  So the server forks
twice, and the process in between exits at once: the kernel passes its child to the nearest ancestor that has
declared itself a *subreaper*, which the launcher does meanwhile.

A message on the socket is a length and JSON; the descriptors of a rank come with the length.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import importlib.machinery
import io
import json
import os
import pkgutil
import runpy
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any

from ... import failure_report
from ...errors import LaunchError
from .guardian import Guardian, preparation

_LENGTH = struct.Struct("=I")
#: maximum number of descriptors of a rank
_MAX_DESCRIPTORS = 16
#: seconds for the server to fork a rank; meanwhile the launcher does nothing else
_FORK_TIMEOUT_S = 10.0
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 1, 36, 37
#: sent by Slurm to all processes of a job; blocked in the server, and in a rank until its program runs
_BLOCKED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
#: The command of the program follows, so that tools find ranks by it.
_PROGRAM = (
    "import sys; '' in sys.path and sys.path.remove(''); "
    "from shoal.launch.ranks.fork_server import serve; serve()"
)


class ForkedRank:
    """A rank that the server has forked, with the attributes of :class:`subprocess.Popen` that are used."""

    def __init__(self, pid: int, stdin: io.FileIO | None, stdout: io.FileIO, stderr: io.FileIO) -> None:
        self.pid, self.stdin, self.stdout, self.stderr = pid, stdin, stdout, stderr

    def wait(self) -> None:
        """Wait for the end of the process, and reap it."""
        with suppress(ChildProcessError):
            os.waitpid(self.pid, 0)


class ForkServer:
    """The launcher's side: ``argv`` is the command of each rank, a Python interpreter and its arguments."""

    def __init__(self, argv: Sequence[str], modules: Sequence[str], environment: Mapping[str, str]) -> None:
        self._modules = ", ".join(modules)
        self._is_ready = False
        self._socket, theirs = socket.socketpair()
        with theirs:
            try:
                self._process = subprocess.Popen(
                    [argv[0], "-c", _PROGRAM, str(theirs.fileno()), str(os.getpid()), *argv[1:]],
                    stdin=subprocess.DEVNULL,
                    stdout=theirs.fileno(),  # like a pipe it cannot seek, which sys.stdout remembers
                    env=environment,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                )
            except (OSError, ValueError) as error:
                self._socket.close()
                raise LaunchError(f"--preload: {argv[0]} could not be started: {error}") from error
        _send(self._socket, {"modules": list(modules)})

    def fileno(self) -> int:
        """The descriptor that is readable once the modules are imported, or cannot be."""
        return self._socket.fileno()

    def wait_ready(self, wait_readable: Callable[[int], None] | None = None) -> None:
        """Wait until the modules are imported; raises LaunchError if they cannot be.

        ``wait_readable`` waits for a descriptor, and may raise.
        """
        if self._is_ready:
            return
        if wait_readable is not None:
            wait_readable(self.fileno())
        self._answer()
        self._is_ready = True
        self._socket.settimeout(_FORK_TIMEOUT_S)

    def fork(
        self,
        guardian: Guardian,
        cores: Sequence[int] | None,
        environment: Mapping[str, str],
        stdin: int | None,
        inherits: Mapping[str, int],
    ) -> ForkedRank:
        """Fork a rank.

        Args:
            guardian: the rank announces itself to it.
            cores: the cores to bind it to; None: all.
            environment: of the rank.
            stdin: as of :class:`subprocess.Popen`.
            inherits: descriptors that the rank inherits, by the variable that names each.

        Raises:
            LaunchError: it could not be forked.
        """
        self.wait_ready()
        files: list[int] = []
        try:
            reader, writer = os.pipe() if stdin == subprocess.PIPE else (_input(stdin), -1)
            files += [reader, writer]
            files += (out := os.pipe())
            files += (err := os.pipe())
            request = {
                "environment": dict(environment), "inherits": list(inherits), "cores": list(cores or ()),
            }  # fmt: skip
            with _subreaper():
                given = [reader, out[1], err[1], guardian.pipe, *inherits.values()]
                _send(self._socket, request, given)
                pid = int(self._answer()["pid"])
        except TimeoutError:  # it is stopped, or waits for a lock of a module
            _close(files)
            self._kill()  # a late answer would be taken for the next one
            raise LaunchError(
                f"--preload {self._modules}: its process has not forked a rank in {_FORK_TIMEOUT_S:.0f} s"
            ) from None
        except OSError as error:
            _close(files)
            ended = isinstance(error, ConnectionError)
            reason = "its process has ended" if ended else f"a rank could not be forked: {error}"
            raise LaunchError(f"--preload {self._modules}: {reason}") from error
        except BaseException:
            _close(files)
            raise
        _close([reader, out[1], err[1]])
        to_stdin = io.FileIO(writer, "wb") if writer >= 0 else None
        return ForkedRank(pid, to_stdin, io.FileIO(out[0]), io.FileIO(err[0]))

    def _answer(self) -> dict[str, Any]:
        try:
            answer, _ = _receive(self._socket)
        except ConnectionError:
            answer = None
        if answer is None:
            answer = {"error": "its process has ended"}
        if "error" in answer:
            raise LaunchError(f"--preload {self._modules}: {answer['error']}")
        return answer

    def close(self) -> None:
        """Kill the server, and processes that its modules have started; ranks live on."""
        self._socket.close()
        self._kill()
        self._process.wait()

    def _kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)


def _input(stdin: int | None) -> int:
    """A descriptor for ``stdin``, which the caller closes: that of this process for None."""
    return os.dup(0) if stdin is None else os.open(os.devnull, os.O_RDONLY)


def _close(descriptors: Sequence[int]) -> None:
    for each in descriptors:
        if each >= 0:
            os.close(each)


@contextmanager
def _subreaper() -> Iterator[None]:
    """Take over orphaned descendants, also those of ranks if they are orphaned just now: that is harmless."""
    prctl = ctypes.CDLL(None).prctl
    before = ctypes.c_int()
    prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
    prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        prctl(_PR_SET_CHILD_SUBREAPER, before.value, 0, 0, 0)


# -- messages ------------------------------------------------------------------------------------


def _send(sock: socket.socket, message: Mapping[str, Any], descriptors: Sequence[int] = ()) -> None:
    data = json.dumps(message).encode()
    socket.send_fds(sock, [_LENGTH.pack(len(data))], descriptors)
    sock.sendall(data)


def _receive(sock: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    """The next message and its descriptors; None at the end."""
    head, descriptors, _, _ = socket.recv_fds(sock, _LENGTH.size, _MAX_DESCRIPTORS)
    if len(head) < _LENGTH.size:
        return None, descriptors
    (left,) = _LENGTH.unpack(head)
    data = bytearray()
    while len(data) < left:
        part = sock.recv(left - len(data))
        if not part:
            return None, descriptors
        data += part
    message: dict[str, Any] = json.loads(data)
    return message, descriptors


# -- in the server -------------------------------------------------------------------------------


def serve() -> None:
    """Import modules and fork ranks until the launcher closes the socket; each rank returns from here."""
    sock = socket.socket(fileno=int(sys.argv[1]))
    launcher, argv = int(sys.argv[2]), sys.argv[3:]
    os.set_inheritable(sock.fileno(), False)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != launcher:  # it died before prctl was called
        os._exit(1)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED)
    os.dup2(2, 1)  # what a module prints; sys.stdout is made already, and is as in a rank
    _prepare_main(argv)
    request, _ = _receive(sock)
    assert request is not None
    # As the documentation of gc.freeze() advises: otherwise the collector of each rank visits, and so copies,
    # the pages of all imported objects, above all at exit.
    gc.disable()
    server = os.getpid()
    error = _import_all(request["modules"])
    if os.getpid() != server:  # a module has forked, and this is its child
        os._exit(0)
    if error:
        _send(sock, {"error": error})
        os._exit(1)
    gc.freeze()
    # The globals of the program are to be collected at exit, so that its objects are finalized.
    main = ctypes.py_object(sys.modules["__main__"].__dict__)
    ctypes.pythonapi.PyObject_GC_UnTrack(main)
    ctypes.pythonapi.PyObject_GC_Track(main)
    _send(sock, {})
    while True:
        request, descriptors = _receive(sock)
        if request is None:
            os._exit(0)
        for file in (sys.stdout, sys.stderr):
            with suppress(AttributeError, ValueError):  # a module has replaced or closed it
                file.flush()
        try:
            pid = _fork_twice()
        except OSError as trouble:
            _send(sock, {"error": f"a process could not be forked: {trouble.strerror or trouble}"})
        else:
            if not pid:
                sock.close()
                break
            _send(sock, {"pid": pid})
        _close(descriptors)
    _become(request, descriptors, launcher)
    gc.enable()
    _run(argv, mask)


def _import_all(modules: Sequence[str]) -> str:
    """Import modules; return why that failed, or ""."""
    for name in modules:
        try:
            importlib.import_module(name)
        except BaseException as error:
            if not (isinstance(error, ModuleNotFoundError) and error.name == name) and error.__traceback__:
                # Without the frame of this file.
                traceback.print_exception(type(error), error, error.__traceback__.tb_next)
            return f"{name} cannot be imported: {type(error).__name__}: {error}"
        others = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
        if others:
            return f"importing {name} starts threads, which forked ranks would not have: {', '.join(others)}"
    return ""


def _fork_twice() -> int:
    """Fork a child of the launcher, in a new session; return its process id here, and 0 there."""
    reader, writer = os.pipe()
    try:
        between = os.fork()
    except OSError:
        _close([reader, writer])
        raise
    if between:
        os.close(writer)
        with open(reader, "rb") as file:
            found = file.read()
        with suppress(ChildProcessError):  # a module has set SIGCHLD to be ignored
            os.waitpid(between, 0)
        if not found:
            raise OSError("the process in between has failed")
        return int(found)
    between = os.getpid()
    try:
        if os.fork():
            os._exit(0)
    except OSError:
        os._exit(1)
    os.setsid()
    while os.getppid() == between:
        time.sleep(0.0005)
    os.write(writer, str(os.getpid()).encode())
    os.close(reader)
    os.close(writer)
    return 0


def _become(request: Mapping[str, Any], descriptors: Sequence[int], launcher: int) -> None:
    """Turn this process into the rank of a request."""
    *standard, guardian = descriptors[:4]
    preparation(launcher, guardian, request["cores"])()
    environment = dict(request["environment"])
    for name, fd in zip(request["inherits"], descriptors[4:], strict=True):
        os.set_inheritable(fd, True)
        environment[name] = failure_report.descriptor_name(fd)
    for target, fd in enumerate(standard):
        os.dup2(fd, target)
    _close([fd for fd in (*standard, guardian) if fd > 2])  # a module may have closed 0
    _reopen_stdin()
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    os.environ.update(environment)
    failure_report.inherit_again()
    # Otherwise all ranks would draw the same numbers.  Python's own generator has a new seed in each fork.
    if (numpy_random := sys.modules.get("numpy.random")) is not None:
        numpy_random.seed()
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.seed()


def _reopen_stdin() -> None:
    """Replace ``sys.stdin``, which remembers that /dev/null can seek."""
    former: Any = sys.__stdin__
    if former is None or former.closed or sys.stdin is not sys.__stdin__:
        return
    file: Any = open(0, encoding=former.encoding, errors=former.errors, closefd=False)  # noqa: SIM115
    file.buffer.raw.name = "<stdin>"
    vars(sys).update(stdin=file, __stdin__=file)


# -- the program of a rank -----------------------------------------------------------------------


def _prepare_main(argv: Sequence[str]) -> None:
    """Set ``sys`` and ``__main__`` as Python does for the command ``python argv...``."""
    main = sys.modules["__main__"].__dict__
    for name in [name for name in main if name not in ("__name__", "__builtins__")]:
        del main[name]
    main.update(__doc__=None, __package__=None, __loader__=None, __spec__=None, __annotations__={})
    sys.orig_argv = [sys.executable, *argv]
    safe_path = getattr(sys.flags, "safe_path", False)
    if argv[0] == "-m":
        sys.argv = ["-m", *argv[2:]]
        if not safe_path:
            sys.path.insert(0, os.getcwd())
        return
    sys.argv = list(argv)
    path = os.path.join(os.getcwd(), argv[0])  # not normalized: link/.. may be another directory
    if pkgutil.get_importer(path) is not None:  # a directory or a zip file
        sys.path.insert(0, path)
    else:
        main.update(__file__=path, __cached__=None)
        if not safe_path:
            sys.path.insert(0, os.path.dirname(os.path.realpath(path)))


def _run(argv: Sequence[str], mask: Collection[int]) -> None:
    """Run ``python argv...`` with a signal mask in this process, after :func:`_prepare_main`."""
    main = sys.modules["__main__"].__dict__
    try:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if argv[0] == "-m":
            runpy._run_module_as_main(argv[1])  # type: ignore[attr-defined]
        elif "__file__" not in main:  # a directory or a zip file
            runpy._run_module_as_main("__main__", False)  # type: ignore[attr-defined]
        else:
            _run_file(main["__file__"], main)
    except SystemExit:
        raise
    except BaseException:
        _hide_these_frames()
        raise


def _run_file(path: str, main: dict[str, Any]) -> None:
    loader: type[importlib.machinery.SourceFileLoader | importlib.machinery.SourcelessFileLoader]
    loader = importlib.machinery.SourcelessFileLoader
    with io.open_code(path) as file:
        code = pkgutil.read_code(file)  # None: it is not a .pyc file
        if code is None:
            loader = importlib.machinery.SourceFileLoader
            file.seek(0)
            code = compile(file.read(), path, "exec", dont_inherit=True)
    main["__loader__"] = loader("__main__", path)
    exec(code, main)


def _hide_these_frames() -> None:
    """Let Python report the exception that is being raised without the frames of this file."""
    former = sys.excepthook

    def report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        while trace is not None and trace.tb_frame.f_code.co_filename in ("<string>", __file__):
            trace = trace.tb_next
        sys.last_traceback = error.__traceback__ = trace
        sys.excepthook = former
        former(kind, error, trace)

    sys.excepthook = report
