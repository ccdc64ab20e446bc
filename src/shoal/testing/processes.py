"""Ranks as processes, with torch loaded once.

A fork server (:mod:`multiprocessing`) imports torch and shoal and forks a rank in a few milliseconds. Ranks
inherit nothing from the test's process. They meet at a TCP store in it, as under a launcher.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import random
import secrets
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from multiprocessing import connection
from multiprocessing.forkserver import ensure_running
from pathlib import Path
from typing import Any, TypeVar

from ..common.formatting import counted
from ..errors import OutOfResources, UsageError
from ..net import Deadline
from ..rendezvous import job_record
from ..rendezvous.records import job_keys, round_keys
from ..store import PrefixStore, Store, TCPStore, TCPStoreServer
from . import faults
from .leaks import ignoring
from .network import STORE, Network, enter
from .outcome import Outcome, reported, values
from .worker import DUMP_SIGNAL, run_rank

T = TypeVar("T")

#: seconds that a rank gets to write its stacks, and to end after it was killed
STACK_DUMP_TIMEOUT_S = 2.0
END_TIMEOUT_S = 10.0


def run_processes(fn: Callable[..., T], size: int, *args: Any, **how: Any) -> list[T]:
    """Run ``fn(group, *args)`` on ``size`` ranks as processes and return the results in rank order.

    Args:
        fn, size, args, how: as for :class:`Ranks`.

    Raises:
        RemoteError: at least one rank raised, ended, or did not return in time. The message has each such
            rank's traceback, exit code or stacks, in the order of failure.
    """
    with Ranks(fn, size, *args, **how) as ranks:
        results: list[T] = values(ranks.join())
        return results


class Ranks:
    """Ranks that run as processes while a test injects faults.

        with processes(fn, 3) as ranks:
            ranks.store.wait(["ready"])      # fn did group.store.set("ready", b"")
            ranks.kill(1)
            outcomes = ranks.join()

    At the end of the block running ranks are killed.

    Args:
        fn: called as ``fn(group, *args)`` with the world group, which is closed afterwards (aborted if ``fn``
            raises). Imported by name, so it cannot be a lambda or an inner function.
        size: number of ranks.
        args: picklable arguments of ``fn``.
        backend: name of the backend.
        timeout: seconds until all ranks must have ended; then the stacks of late ranks are collected and they
            are killed.
        hosts: host identity of each rank, to treat this machine as several; None means one host.
        network: the network of these hosts, which the test can cut.
        env: additional environment variables of the ranks.
        prepare: called in each rank before ``init``, for example to register a backend.
        mortal_store: run the store as a process, `shoal store`, for :meth:`kill_store`.
        op_timeout: default timeout of operations and of ``init`` in seconds; None means ``timeout``.
        options: further arguments of ``init``.

    Attributes:
        store: a store with the keys of the ranks' ``group.store``.
        pids: process id of each rank.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        size: int,
        *args: Any,
        backend: str = "native",
        timeout: float = 60.0,
        hosts: Sequence[str] | None = None,
        network: Network | None = None,
        env: Mapping[str, str] | None = None,
        prepare: Callable[[], None] | None = None,
        mortal_store: bool = False,
        op_timeout: float | None = None,
        **options: Any,
    ) -> None:
        if hosts is not None and len(hosts) != size:
            raise UsageError(f"hosts={list(hosts)!r}: expected one for each of {counted(size, 'rank')}")
        if network is not None and mortal_store:
            raise UsageError("mortal_store=True: with a network the store is in the test's process")
        if network is not None and not set(hosts or [""]) <= set(network.hosts):
            raise UsageError(f"hosts={hosts!r}: the hosts of this network are {', '.join(network.hosts)}")
        payload = pickled_work(fn, args, prepare)
        self._outcomes: dict[int, Outcome] = {}
        self._network = network
        self._secret = secret = secrets.token_hex(16)
        with contextlib.nullcontext() if network is None else network.inside(STORE):
            at = "127.0.0.1" if network is None else network.address(STORE)
            self._server: TCPStoreServer | StoreProcess = (
                StoreProcess(secret, size)
                if mortal_store
                else TCPStoreServer(at, secret=secret.encode(), records=job_record(size)).start()
            )
            self._client = TCPStore(self._server.host, self._server.port, secret.encode(), timeout=timeout)
        self.store: Store = PrefixStore("store", round_keys(job_keys(self._client, "default", 0), 0))
        options = {"backend": backend, "timeout": timeout if op_timeout is None else op_timeout, **options}
        self._ranks: list[Child] = []
        try:
            places = [""] * size if hosts is None else list(hosts)
            for rank, host in enumerate(places):
                environment = {
                    "SHOAL_STORE": self._server.url, "SHOAL_SECRET": secret, "SHOAL_RANK": str(rank),
                    "SHOAL_SIZE": str(size), "SHOAL_LOCAL_RANK": str(places[:rank].count(host)),
                    "SHOAL_LOCAL_SIZE": str(places.count(host)), **(env or {}),
                }  # fmt: skip
                if hosts is not None:
                    environment["SHOAL_HOST_ID"] = host
                if network is not None:
                    payload = pickled_work(fn, args, partial(enter, network.entrance(host), prepare))
                self._ranks.append(Child(f"rank {rank}", run_rank, payload, environment, options))
        except BaseException:
            self.close()
            raise
        self.pids = [rank.pid for rank in self._ranks]
        # Starts here, because the first rank waits until the fork server has loaded torch.
        self._deadline = Deadline(timeout)

    def newcomer(self, fn: Callable[..., Any], *args: Any, **environment: str) -> int:
        """Start a process that can join the ranks' session of :mod:`shoal.elastic`.

        Args:
            fn: called as ``fn(*args)``, with ``SHOAL_JOIN=1`` in the environment.
            environment: further variables; with a network, ``SHOAL_HOST_ID`` must be one of its hosts.

        Returns:
            Its index in ``pids`` and in the result of :meth:`join`.
        """
        variables = {"SHOAL_STORE": self._server.url, "SHOAL_SECRET": self._secret, "SHOAL_JOIN": "1"}
        variables.update(environment)
        number = len(self._ranks)
        enters = None
        if self._network is not None:
            enters = partial(enter, self._network.entrance(environment["SHOAL_HOST_ID"]))
        child = Child(f"newcomer {number}", run_rank, pickled_work(fn, args, enters), variables, None)
        self._ranks.append(child)
        self.pids.append(child.pid)
        return number

    def kill(self, rank: int) -> None:
        """Kill a rank (SIGKILL)."""
        faults.kill(self.pids[rank])

    def stop(self, rank: int) -> None:
        """Stop a rank (SIGSTOP); return when it is stopped."""
        faults.stop(self.pids[rank])

    def resume(self, rank: int) -> None:
        """Resume a stopped rank (SIGCONT)."""
        faults.resume(self.pids[rank])

    def delay(self, rank: int, seconds: float) -> None:
        """Stop a rank for ``seconds``; return immediately."""
        faults.delay(self.pids[rank], seconds)

    def cut(self, rank: int, other: int) -> int:
        """Break all TCP connections between two ranks and return their number."""
        return faults.cut(self.pids[rank], self.pids[other])

    def kill_store(self) -> None:
        """Kill the store process (SIGKILL), which loses its contents; requires ``mortal_store=True``."""
        self._mortal_store().kill()

    def restore_store(self) -> None:
        """Restart the store at the same address; return when clients can connect."""
        self._mortal_store().start()

    def _mortal_store(self) -> StoreProcess:
        if not isinstance(self._server, StoreProcess):
            raise UsageError("the store is in the test's process: pass mortal_store=True to Ranks")
        return self._server

    def ended(self, within: float = 0.0) -> bool:
        """Whether every rank has ended; wait for at most ``within`` seconds."""
        return not wait_for_ends(self._running(), Deadline(within))

    def _running(self) -> list[Child]:
        return [rank for number, rank in enumerate(self._ranks) if number not in self._outcomes]

    def join(self) -> list[Outcome]:
        """Wait until every rank has ended, at most until the deadline; return the outcomes in rank order."""
        stacks = kill_late(wait_for_ends(self._running(), self._deadline))
        for number, rank in enumerate(self._ranks):
            if rank in stacks:
                self._outcomes[number] = Outcome(number, stacks=stacks[rank], at=time.monotonic())
            elif number not in self._outcomes:
                self._outcomes[number] = rank.outcome(number)
        return [self._outcomes[number] for number in range(len(self._ranks))]

    def close(self) -> None:
        """Kill the running ranks and release everything."""
        for rank in self._ranks:
            rank.close()
        self._client.close()
        self._server.close()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def processes(fn: Callable[..., Any], size: int, *args: Any, **how: Any) -> Ranks:
    """Start ``fn(group, *args)`` on ``size`` ranks as processes; see :class:`Ranks`."""
    return Ranks(fn, size, *args, **how)


def pickled_work(
    fn: Callable[..., Any] | None, args: tuple[Any, ...], prepare: Callable[[], None] | None
) -> bytes:
    """Pickle the work of a process; raises `UsageError` if it cannot be pickled."""
    try:
        return pickle.dumps((fn, args, prepare))
    except Exception as error:
        raise UsageError(
            f"{fn!r} and its arguments cannot be pickled ({error}); define the function at the top level of "
            "a module"
        ) from error


class Child:
    """A process that the fork server starts, with pipes for its output.

    Args:
        name: name of the process.
        target: called in the process with ``args``, a pipe for its one report ``(kind, pickled value or
            exception, traceback, time)``, and a pipe for the stacks requested by ``DUMP_SIGNAL``.
    """

    def __init__(self, name: str, target: Callable[..., None], *args: Any) -> None:
        self.report: tuple[str, bytes, str, float] | None = None
        self.reports, reports = connection.Pipe(duplex=False)
        self.dumps, dumps = connection.Pipe(duplex=False)
        self.process = fork_server().Process(target=target, args=(*args, reports, dumps), name=name)
        try:
            self.process.start()
        finally:
            # Close our copies: then the end of the process closes the pipes.
            reports.close()
            dumps.close()
        self.pid = self.process.pid or 0
        self._closed = False

    def read_report(self) -> None:
        """Read the report; sets kind "none" if the process ended without one."""
        try:
            self.report = self.reports.recv()
        except (EOFError, OSError):
            self.report = ("none", b"", "", time.monotonic())

    def has_reported(self) -> bool:
        """Whether the report was read."""
        return self.report is not None and self.report[0] != "none"

    def outcome(self, rank: int = -1, worker: str = "") -> Outcome:
        """Return the outcome of the rank or worker, which must have reported or ended."""
        if self.report is None:
            self.read_report()
        kind, raw, text, at = self.report or ("none", b"", "", 0.0)
        if kind == "none":
            self.process.join(END_TIMEOUT_S)
            return Outcome(rank, exitcode=self.process.exitcode, at=at, worker=worker)
        return replace(reported(rank, kind, raw, text, at), worker=worker)

    def close(self) -> None:
        """Kill the process if it is running, and close the pipes."""
        if self._closed:
            return
        self._closed = True
        if self.process.is_alive():
            faults.kill(self.pid)
        self.process.join(END_TIMEOUT_S)
        self.process.close()
        self.reports.close()
        self.dumps.close()


def wait_for_ends(children: Sequence[Child], deadline: Deadline, *, reports: bool = False) -> list[Child]:
    """Wait for all children (with `reports`, for their reports); return those late at the deadline."""
    running = {child.process.sentinel: child for child in children}
    for sentinel in [key for key, child in running.items() if reports and child.has_reported()]:
        del running[sentinel]
    while running:
        # A report may exceed the pipe's buffer, so it is read while the process is running.
        waits: list[Any] = [child.reports for child in running.values() if child.report is None]
        waits += running
        ready = connection.wait(waits, deadline.remaining())
        if not ready:
            break
        for child in list(running.values()):
            if child.reports in ready:
                child.read_report()
            if child.process.sentinel in ready:
                child.process.join()
            elif not (reports and child.has_reported()):
                continue
            del running[child.process.sentinel]
    return list(running.values())


def kill_late(late: Sequence[Child]) -> dict[Child, str]:
    """Kill late processes; return their stacks."""
    stacks = {}
    for child in late:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child.pid, DUMP_SIGNAL)
    for child in late:
        stacks[child] = read_stacks(child.dumps) or "(no stacks: it is stopped or does not handle signals)"
        child.close()
    return stacks


def read_stacks(dumps: connection.Connection) -> str:
    """Read the stacks that a rank writes after :data:`DUMP_SIGNAL`, until it stops writing."""
    descriptor, text, pause = dumps.fileno(), b"", STACK_DUMP_TIMEOUT_S
    while select.select([descriptor], [], [], pause)[0]:
        part = os.read(descriptor, 65536)
        if not part:
            break
        text, pause = text + part, 0.5
    return text.decode(errors="replace")


_started: multiprocessing.context.ForkServerContext | None = None
_preloaded: list[str] = []


def preload(*modules: str) -> None:
    """Make the fork server import modules, which must start no threads; call it before the first rank."""
    _preloaded.extend(modules)


def fork_server() -> multiprocessing.context.ForkServerContext:
    """Return the fork server's context; the first call starts the server, which loads torch."""
    global _started
    if _started is None:
        context = multiprocessing.get_context("forkserver")
        # Test modules import pytest, and ranks import the test modules of their functions.
        extra = ["pytest"] if "pytest" in sys.modules else []
        context.set_forkserver_preload(["torch", run_rank.__module__, *extra, *_preloaded])
        with ignoring():  # it runs until this process ends
            ensure_running()
        _started = context
    return _started


# -- a store in a separate process ---------------------------------------------------------------------

_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
MAX_PORT_TRIES = 100
#: ends with the test process (PR_SET_PDEATHSIG), and imports nothing from the working directory
_PROGRAM = (
    "import sys; sys.path[0] or sys.path.pop(0); import ctypes, runpy; "
    "ctypes.CDLL(None).prctl(1, 9); sys.argv[0] = 'shoal'; "
    "runpy.run_module('shoal', run_name='__main__')"
)


class StoreProcess:
    """`shoal store` on a port of 127.0.0.1, which a test can kill; `url`, `host`, `port` are its address."""

    def __init__(self, secret: str, size: int) -> None:
        self.host = "127.0.0.1"
        self.port = _free_port()
        self.url = f"tcp://{self.host}:{self.port}"
        self._secret, self._size = secret, size
        self._process: subprocess.Popen[str] | None = None
        self.start()

    def start(self) -> None:
        """Start serving, with the job's record only; return when clients can connect."""
        if self._process is not None:
            return
        command = [sys.executable, "-c", _PROGRAM, "store", "--listen", f"{self.host}:{self.port}"]
        self._process = subprocess.Popen(
            [*command, "--size", str(self._size)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "SHOAL_SECRET": self._secret},
        )
        assert self._process.stdout is not None
        if not self._process.stdout.readline():
            self.kill()
            raise OutOfResources(f"`shoal store` did not start to serve {self.url}")

    def kill(self) -> None:
        """Kill the process (SIGKILL); the contents of the store are lost."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
            assert self._process.stdout is not None
            self._process.stdout.close()
            self._process = None

    close = kill


def _free_port() -> int:
    """Find a port outside the ephemeral range, so that it stays free while the store is down."""
    first = int(_EPHEMERAL.read_text().split()[0])
    low, high = (10_000, first) if first > 11_000 else (1024, 65_536)
    for _ in range(MAX_PORT_TRIES):
        with socket.socket() as probe:
            port = random.SystemRandom().randrange(low, high)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OutOfResources("found no free port of 127.0.0.1 for a store")
