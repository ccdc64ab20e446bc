"""Ranks as processes that run one function after another, under any launcher.

Each process connects to the pool over a unix socket and proves to know its secret, also across ``mpiexec``.
The process reads the socket in a thread, and ends when the connection does.  It runs jobs in its main thread.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import itertools
import math
import os
import pickle
import queue
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from typing import IO, Any, TypeVar

import torch

from ..common.formatting import counted
from ..errors import RemoteError, UsageError, WireError, WireTimeout
from ..net import Acceptor, Connection, Deadline, connect_unix, listen_unix, peer_pid, recv_fds, send_fds
from ..rendezvous import launcher_variables, report_exit
from ..store import TCPStore, TCPStoreServer
from .outcome import Outcome, failed, reported, values
from .processes import END_TIMEOUT_S, fork_server, read_stacks
from .worker import DUMP_SIGNAL, Report, attach, call, reported_error

T = TypeVar("T")

#: seconds within which all processes must have started and connected
START_TIMEOUT_S = 120.0
#: maximum bytes of a job and of a result
MESSAGE_LIMIT_BYTES = 2**31
#: number of characters of the launcher's output in an error
OUTPUT_CHARACTERS = 4000
_PURPOSE = "pool"
#: environment variable with the secret of the pool, as hexadecimal digits
_SECRET = "_SHOAL_POOL_SECRET"
_PROGRAM = f"from {__name__} import launched; launched()"
#: seconds between two checks whether a starting process has ended
_POLL_INTERVAL_S = 0.1
#: seconds that a launcher gets to print why a rank has ended
_REPORT_TIMEOUT_S = 2.0


class RankPool:
    """Processes that stay alive and run functions as the ranks of new groups.

        with RankPool(3, launcher=["mpiexec", "-n", "3"]) as pool:
            assert pool.run(lambda group: group.size, backend="mpi") == [3, 3, 3]

    The processes start at the first :meth:`run`, and again if one of them has ended.  At the end of the block
    they end; they also end with the process that has the pool.

    Args:
        size: number of processes.
        launcher: command that starts ``size`` processes on this host, without the program; None: start child
            processes.  Its output and that of the ranks goes to a file, whose end is in errors.  The rank of
            a process is that in the launcher's variables; without such variables, its order of connecting.
        env: additional environment variables.
        prepare: called once in each process, for example to register a backend.

    Attributes:
        pids: process id of each rank; empty if none are running.
    """

    def __init__(
        self,
        size: int,
        *,
        launcher: Sequence[str] | None = None,
        env: Mapping[str, str] | None = None,
        prepare: Callable[[], None] | None = None,
    ) -> None:
        if size < 1:
            raise UsageError(f"size={size!r}: expected at least 1")
        self.size = size
        self._pid = os.getpid()
        self._launcher = None if launcher is None else list(launcher)
        self._env = dict(env or {})
        self._prepare = prepare
        self._ranks: list[_PoolRank] = []
        self._started: _Launched | _Children | None = None
        self._numbers = itertools.count()

    @property
    def pids(self) -> list[int]:
        return [rank.pid for rank in self._ranks]

    def run(
        self,
        fn: Callable[..., T],
        *args: Any,
        size: int | None = None,
        timeout: float = 60.0,
        hosts: Sequence[str] | None = None,
        op_timeout: float | None = None,
        **options: Any,
    ) -> list[T]:
        """Run ``fn(group, *args)`` on every rank of a new group and return the results in rank order.

        A rank that raises aborts its group, so that the others end too.  The groups are closed at the end.

        Args:
            fn: called with each rank's world group.  Functions that the ranks cannot import, such as
                closures, need cloudpickle.
            args: further arguments of ``fn``; they and the results are pickled.
            size: number of ranks of the group, which are the first processes; None: all processes.
            timeout: seconds until all must have returned.  After that the stacks of the late ranks are in the
                exception, and the processes are killed.
            hosts: host identity of each rank, to treat this machine as several; None means one host.
            op_timeout: default timeout of operations and of ``init`` in seconds; None means ``timeout``.
            options: further arguments of ``shoal.init``, such as ``backend``, and options of the backend.

        Raises:
            RemoteError: at least one rank raised, ended, or did not return in time, or the processes did not
                start.  The message has each such rank's traceback, exit code or stacks, in the order of
                failure.
        """
        size = self.size if size is None else size
        if not 1 <= size <= self.size:
            raise UsageError(f"size={size!r}: expected 1 to {self.size}, the number of processes of the pool")
        if hosts is not None and len(hosts) != size:
            raise UsageError(f"hosts={list(hosts)!r}: expected one for each of {counted(size, 'rank')}")
        seconds = timeout if op_timeout is None else op_timeout
        work = _pickled(fn, args)
        self._ensure_started()
        secret, job = secrets.token_hex(16), f"pool-{os.getpid()}-{next(self._numbers)}"
        with TCPStoreServer(secret=secret.encode()) as server:

            def on_end(rank: int) -> None:
                # Otherwise ranks that still connect would wait for it until their timeout.
                with TCPStore(server.host, server.port, secret.encode(), timeout=END_TIMEOUT_S) as store:
                    report_exit(store, rank, "killed or crashed", job=job)

            common = {
                "backend": "native", **options, "timeout": seconds, "url": server.url, "secret": secret,
                "size": size, "job": job,
            }  # fmt: skip
            own = [{}] * size if hosts is None else [{"host_id": host} for host in hosts]
            jobs = [(work, {**common, **each, "rank": rank}) for rank, each in enumerate(own)]
            results: list[T] = values(self._outcomes(jobs, timeout, on_end))
            return results

    def close(self) -> None:
        """End the processes; kill those that have not ended after 10 s."""
        if os.getpid() != self._pid:
            return  # a fork of the process that has the pool
        for rank in self._ranks:
            with contextlib.suppress(WireError):
                rank.connection.send(b"", END_TIMEOUT_S)
        if self._started is not None and self._started.wait(END_TIMEOUT_S):
            self._release()
        self._kill()

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _ensure_started(self) -> None:
        # A process does not send anything between two jobs: its connection is readable if it has ended.
        peers: list[Any] = [rank.connection for rank in self._ranks]
        if peers and connection.wait(peers, 0):
            self._kill()
        if self._ranks:
            return
        try:
            self._start()
        except BaseException:
            self._kill()
            raise

    def _start(self) -> None:
        address, secret = f"shoal-pool-{secrets.token_hex(8)}", secrets.token_bytes(16)
        deadline = Deadline(START_TIMEOUT_S)
        with Acceptor(listen_unix(address), secret=secret, purpose=_PURPOSE) as acceptor:
            # Not by a finalizer: that of multiprocessing waits for the children.
            atexit.register(self.close)
            if self._launcher is None:
                self._started = _Children(self.size, address, secret, self._env)
            else:
                self._started = _Launched(self._launcher, address, secret, self._env)
            while len(self._ranks) < self.size:
                try:
                    peer = acceptor.accept(min(_POLL_INTERVAL_S, deadline.remaining()))
                except WireTimeout as error:
                    if deadline.expired or self._started.ended():
                        raise self._not_started(str(error)) from None
                else:
                    self._ranks.append(self._connected(peer, deadline))
        numbers = [rank.number for rank in self._ranks if rank.number is not None]
        if numbers and sorted(numbers) != list(range(self.size)):
            raise UsageError(f"the launcher gave its processes the ranks {sorted(numbers)}")
        # Stable: without numbers, the order of their arrival.
        self._ranks.sort(key=lambda rank: -1 if rank.number is None else rank.number)
        if self._prepare is not None:
            job = _pickled(self._prepare, ()), None
            values(self._outcomes([job] * self.size, deadline.remaining()))

    def _connected(self, peer: Connection, deadline: Deadline) -> _PoolRank:
        try:
            rank = _PoolRank(peer, deadline)
        except WireError as error:
            raise self._not_started(str(error)) from None
        if rank.size not in (None, self.size):
            rank.close()
            raise UsageError(
                f"the launcher {self._launcher} starts {rank.size} processes, expected {self.size}"
            )
        return rank

    def _not_started(self, why: str) -> RemoteError:
        assert self._started is not None
        reason = f"{self._started.name} ended" if self._started.ended() else why
        return RemoteError(
            f"{len(self._ranks)} of {counted(self.size, 'rank')} of the pool started: {reason}"
            f"{self._started.output()}"
        )

    def _outcomes(
        self,
        jobs: Sequence[tuple[bytes, dict[str, Any] | None]],
        timeout: float,
        on_end: Callable[[int], None] = lambda rank: None,
    ) -> list[Outcome]:
        """Run one job on each of the first ranks; kill all processes if one has ended or is late.

        Args:
            jobs: one for each of these ranks.
            on_end: called with each rank whose process ends.
        """
        try:
            for rank, job in zip(self._ranks, jobs, strict=False):
                with contextlib.suppress(WireError):  # the process has ended, as the next step detects
                    rank.connection.send(pickle.dumps(job), timeout)
            outcomes = dict(self._reports(len(jobs), Deadline(timeout), on_end))
            others = [number for number in range(len(jobs)) if number not in outcomes]
            outcomes |= self._endings([number for number in others if self._ranks[number].ended_at])
            outcomes |= self._late([number for number in others if not self._ranks[number].ended_at])
        except BaseException:
            self._kill()
            raise
        if others:
            self._kill()
        return [outcomes[number] for number in range(len(jobs))]

    def _reports(
        self, size: int, deadline: Deadline, on_end: Callable[[int], None]
    ) -> Iterator[tuple[int, Outcome]]:
        """Yield the outcomes of the first ``size`` ranks that report before the deadline.

        Sets ``ended_at`` of those that end.
        """
        waiting: dict[Any, int] = {self._ranks[number].connection: number for number in range(size)}
        while waiting and (ready := connection.wait(list(waiting), deadline.remaining())):
            for peer in ready:
                assert isinstance(peer, Connection)
                try:
                    report = peer.recv(deadline.remaining())
                except WireTimeout:
                    continue  # part of a report
                except WireError:
                    self._ranks[waiting[peer]].ended_at = time.monotonic()
                    on_end(waiting[peer])
                else:
                    yield waiting[peer], _outcome(waiting[peer], report)
                del waiting[peer]

    def _endings(self, numbers: Sequence[int]) -> dict[int, Outcome]:
        """Return the outcomes of ranks whose processes have ended."""
        assert self._started is not None
        found: dict[int, Outcome] = {}
        for number in numbers:
            rank = self._ranks[number]
            code, output = self._started.why_ended(number)
            if code is not None:
                found[number] = Outcome(number, exitcode=code, at=rank.ended_at)
                continue
            text = f"process {rank.pid} of rank {number} ended before the function returned{output}"
            found[number] = Outcome(number, error=RemoteError(text), traceback=text, at=rank.ended_at)
        return found

    def _late(self, numbers: Sequence[int]) -> dict[int, Outcome]:
        """Return the outcomes of ranks that still run at the deadline: their stacks."""
        for number in numbers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._ranks[number].pid, DUMP_SIGNAL)
        found: dict[int, Outcome] = {}
        for number in numbers:
            stacks = read_stacks(self._ranks[number].dumps)
            stacks = stacks or "(no stacks: it is stopped or does not handle signals)"
            found[number] = Outcome(number, stacks=stacks, at=time.monotonic())
        return found

    def _kill(self) -> None:
        for rank in self._ranks:
            if not rank.ended_at:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(rank.pid, signal.SIGKILL)
        if self._started is not None:
            self._started.kill()
            self._release()

    def _release(self) -> None:
        """Release the resources of the processes, which have ended."""
        atexit.unregister(self.close)
        for rank in self._ranks:
            rank.close()
        self._ranks = []
        if self._started is not None:
            self._started.release()
            self._started = None


def _pickled(fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    dumps: Callable[[object], bytes] = pickle.dumps
    with contextlib.suppress(ModuleNotFoundError):
        from cloudpickle import dumps  # type: ignore[import-untyped, unused-ignore, no-redef]
    try:
        return dumps((fn, args))
    except Exception as error:
        by_name = dumps is pickle.dumps
        raise UsageError(
            f"{fn!r} and its arguments cannot be pickled ({error})"
            f"{'; functions that are not at the top level of a module need cloudpickle' if by_name else ''}"
        ) from error


def _outcome(rank: int, message: bytes) -> Outcome:
    kind, raw, text, at = pickle.loads(message)
    try:
        return reported(rank, kind, raw, text, at)
    except Exception as error:  # the value or exception cannot be unpickled here
        return failed(rank, error, at)


class _PoolRank:
    """A connected process."""

    def __init__(self, peer: Connection, deadline: Deadline) -> None:
        peer.limit = MESSAGE_LIMIT_BYTES
        self.connection = peer
        with contextlib.ExitStack() as opened:
            opened.callback(peer.close)
            self.pid = peer_pid(peer)
            if self.pid <= 0:
                raise UsageError("a process of the pool is in another pid namespace and cannot be killed")
            (fd,) = recv_fds(peer, 1, deadline.remaining())
            self.dumps = opened.enter_context(connection.Connection(fd, writable=False))
            place: tuple[int | None, int | None] = pickle.loads(peer.recv(deadline.remaining()))
            opened.pop_all()
        self.number, self.size = place
        #: time at which the process was found to have ended; 0.0: it is running
        self.ended_at = 0.0

    def close(self) -> None:
        self.connection.close()
        self.dumps.close()


class _Children:
    """Processes that the fork server starts; they load torch from it."""

    name = "a child process"

    def __init__(self, size: int, address: str, secret: bytes, env: Mapping[str, str]) -> None:
        self._processes: list[BaseProcess] = []
        for rank in range(size):
            process = fork_server().Process(
                target=_child, args=(address, secret, (rank, size), dict(env)), name=f"pool rank {rank}"
            )
            try:
                process.start()
            except BaseException:
                self.kill()
                raise
            self._processes.append(process)

    def ended(self) -> bool:
        return any(not process.is_alive() for process in self._processes)

    def why_ended(self, rank: int) -> tuple[int | None, str]:
        """Return the exit code of a process that has ended, and output that may have the reason."""
        self._processes[rank].join(END_TIMEOUT_S)
        return self._processes[rank].exitcode, ""

    def output(self) -> str:
        return ""

    def wait(self, timeout: float) -> bool:
        deadline = Deadline(timeout)
        for process in self._processes:
            process.join(deadline.remaining())
        return all(not process.is_alive() for process in self._processes)

    def kill(self) -> None:
        for process in self._processes:
            process.kill()
        self.wait(END_TIMEOUT_S)

    def release(self) -> None:
        for process in self._processes:
            process.close()


class _Launched:
    """Processes that a launcher starts."""

    def __init__(self, command: Sequence[str], address: str, secret: bytes, env: Mapping[str, str]) -> None:
        self.name = f"the launcher {' '.join(command)!r}"
        self._output: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed by release
        try:
            self._process = subprocess.Popen(
                [*command, sys.executable, "-c", _PROGRAM, address],
                # Ranks import the modules of functions from where this process does.
                env={
                    **os.environ, **env, _SECRET: secret.hex(),
                    "PYTHONPATH": os.pathsep.join(folder or os.getcwd() for folder in sys.path),
                },
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            self._output.close()
            raise UsageError(f"cannot start {self.name}: {error}") from error

    def ended(self) -> bool:
        return self._process.poll() is not None

    def why_ended(self, rank: int) -> tuple[int | None, str]:
        # Only the launcher knows the exit code.
        self.wait(_REPORT_TIMEOUT_S)
        return None, self.output()

    def output(self) -> str:
        """The end of the output of the launcher and its ranks, for errors."""
        # The launcher writes at the position that the descriptors share.
        size = os.fstat(self._output.fileno()).st_size
        text = os.pread(self._output.fileno(), size, 0).decode(errors="replace").strip()
        return f"\nOutput of {self.name}:\n{text[-OUTPUT_CHARACTERS:]}" if text else ""

    def wait(self, timeout: float) -> bool:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout)
        return self.ended()

    def kill(self) -> None:
        """End the launcher, whose connected ranks are killed already; it ends those that are starting."""
        if not self.ended():
            self._process.terminate()
        if not self.wait(END_TIMEOUT_S):
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def release(self) -> None:
        self._output.close()


# -- in the process of a rank ---------------------------------------------------------------------------


def _child(address: str, secret: bytes, place: tuple[int, int], env: Mapping[str, str]) -> None:
    """Main function of a child process."""
    reader, writer = connection.Pipe(duplex=False)
    attach(writer)
    os.environ.update(env)
    _serve(address, secret, place, reader, writer)


def launched() -> None:
    """Main function of a process that a launcher started."""
    launch = launcher_variables.read(os.environ)
    place = (None, None) if launch is None else (launch.rank, launch.size)
    reader, writer = connection.Pipe(duplex=False)
    faulthandler.register(DUMP_SIGNAL, file=writer.fileno(), all_threads=True, chain=False)
    _serve(sys.argv[1], bytes.fromhex(os.environ.pop(_SECRET)), place, reader, writer)


def _serve(
    address: str,
    secret: bytes,
    place: tuple[int | None, int | None],
    stacks: connection.Connection,
    _writer: connection.Connection,
) -> None:
    """Connect to the pool and run its jobs.

    Args:
        place: rank and size; None: without a launcher's variables.
        stacks: the pipe to which stacks are written at ``DUMP_SIGNAL``.
        _writer: its other end, open until this function returns.
    """
    # Ctrl-C in a terminal is for the process that has the pool.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    with connect_unix(
        address, secret=secret, purpose=_PURPOSE, timeout=START_TIMEOUT_S, limit=MESSAGE_LIMIT_BYTES
    ) as pool:
        send_fds(pool, [stacks.fileno()], START_TIMEOUT_S)
        stacks.close()
        pool.send(pickle.dumps(place), START_TIMEOUT_S)
        jobs: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        threading.Thread(target=_receive, args=(pool, jobs), name="pool", daemon=True).start()
        while job := jobs.get():
            report = _run(job)
            pool.send(pickle.dumps(report), math.inf)
    # Nobody waits for a process that hangs while it exits: the pool may have ended.
    faulthandler.dump_traceback_later(END_TIMEOUT_S, exit=True)


def _receive(pool: Connection, jobs: queue.SimpleQueue[bytes]) -> None:
    """Pass jobs to the main thread; end the process when the connection ends."""
    message = b"job"
    while message:
        try:
            message = pool.recv(math.inf)
        except WireTimeout:
            continue
        except WireError:
            os._exit(1)
        jobs.put(message)


def _run(job: bytes) -> Report:
    try:
        work, options = pickle.loads(job)
        fn, args = pickle.loads(work)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        return call(fn, args, options)
    except BaseException as error:
        return reported_error(error)
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
