"""Ranks as real processes, with torch loaded once.

A fork server (of :mod:`multiprocessing`) imports torch and shoal, and forks a rank in a few
milliseconds; nothing of the test's own process is inherited.  The ranks meet at a TCP store in the
test's process, as under a launcher.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import secrets
import select
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from multiprocessing import connection
from multiprocessing.forkserver import ensure_running
from types import TracebackType
from typing import Any, TypeVar

from ..common.wording import counted
from ..errors import UsageError
from ..net import Deadline
from ..rendezvous import job_record
from ..rendezvous.record import room_of, root_of
from ..store import PrefixStore, Store, TCPStore, TCPStoreServer
from . import faults
from .leaks import ignoring
from .network import STORE, Network, entering
from .outcome import Outcome, reported, values
from .store_process import StoreProcess
from .worker import DUMP_SIGNAL, run_newcomer, run_rank

T = TypeVar("T")

#: seconds that a rank gets for writing its stacks, and for ending once it was killed
_DUMP_TIME = 2.0
_END_TIME = 10.0


def run_processes(fn: Callable[..., T], size: int, *args: Any, **how: Any) -> list[T]:
    """Run ``fn(group, *args)`` on ``size`` ranks that are processes, and collect what it returns.

    Args:
        fn, size, args, how: as for :class:`Ranks`.

    Returns:
        The results in rank order.

    Raises:
        RemoteError: at least one rank raised, ended, or did not return in time; it holds every such
            rank's traceback, exit code or stacks, the first one first.
    """
    with Ranks(fn, size, *args, **how) as ranks:
        results: list[T] = values(ranks.join())
        return results


class Ranks:
    """Ranks that run as processes while a test does things to them.

        with processes(fn, 3) as ranks:
            ranks.store.wait(["ready"])      # fn did group.store.set("ready", b"")
            ranks.kill(1)
            outcomes = ranks.join()

    At the end of the block the ranks that still run are killed.

    Args:
        fn: called as ``fn(group, *args)`` with the world group, which is closed (or, if ``fn`` raises,
            aborted) afterwards.  Found by its name in its module, so no lambda and no inner function.
        size: number of ranks.
        args: picklable arguments of ``fn``.
        backend: name of the backend.
        timeout: seconds until all must have ended; then every rank's stacks are collected and it is killed.
        hosts: identity of each rank's host, to treat this machine as several; None: one host.
        network: of which these are the hosts; a test can cut it.
        env: environment variables that the ranks get in addition.
        prepare: called in each rank before ``init``, to register a backend for example.
        mortal_store: the store is a process, `shoal store`, which :meth:`kill_store` ends.
        op_timeout: default timeout of operations and of ``init`` in seconds; None: ``timeout``.
        options: further ones for ``init``.

    Attributes:
        store: the same keys as the ranks' ``group.store``.
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
        self.store: Store = PrefixStore("store", room_of(root_of(self._client, "default", 0), 0))
        options = {"backend": backend, "timeout": timeout if op_timeout is None else op_timeout, **options}
        self._ranks: list[Child] = []
        try:
            for rank in range(size):
                environment = {
                    "SHOAL_STORE": self._server.url,
                    "SHOAL_SECRET": secret,
                    "SHOAL_RANK": str(rank),
                    "SHOAL_SIZE": str(size),
                    "SHOAL_LOCAL_RANK": str(rank),
                    "SHOAL_LOCAL_SIZE": str(size),
                    **(env or {}),
                }
                if hosts is not None:
                    environment["SHOAL_HOST_ID"] = hosts[rank]
                    environment["SHOAL_LOCAL_RANK"] = str(hosts[:rank].count(hosts[rank]))
                    environment["SHOAL_LOCAL_SIZE"] = str(hosts.count(hosts[rank]))
                    if network is not None:
                        payload = pickled_work(fn, args, entering(network.entrance(hosts[rank]), prepare))
                self._ranks.append(Child(f"rank {rank}", run_rank, payload, environment, options))
        except BaseException:
            self.close()
            raise
        self.pids = [rank.pid for rank in self._ranks]
        # Not before: the first rank of all waits until the fork server has loaded torch.
        self._deadline = Deadline(timeout)

    def newcomer(self, fn: Callable[..., Any], *args: Any, **environment: str) -> int:
        """Start one more process, which can join the session of :mod:`shoal.elastic` that the ranks run.

        Args:
            fn: called as ``fn(*args)``, with ``SHOAL_JOIN=1`` in the environment.
            environment: further variables; with a network, ``SHOAL_HOST_ID`` must be one of its hosts.

        Returns:
            Its place in ``pids``, and in what :meth:`join` returns.
        """
        variables = {
            "SHOAL_STORE": self._server.url,
            "SHOAL_SECRET": self._secret,
            "SHOAL_JOIN": "1",
            **environment,
        }
        number = len(self._ranks)
        enters = None
        if self._network is not None:
            enters = entering(self._network.entrance(environment["SHOAL_HOST_ID"]), None)
        child = Child(f"newcomer {number}", run_newcomer, pickled_work(fn, args, enters), variables)
        self._ranks.append(child)
        self.pids.append(child.pid)
        return number

    def kill(self, rank: int) -> None:
        """End a rank at once (SIGKILL)."""
        faults.kill(self.pids[rank])

    def stop(self, rank: int) -> None:
        """Bring a rank to a standstill (SIGSTOP), and return when it stands still."""
        faults.stop(self.pids[rank])

    def resume(self, rank: int) -> None:
        """Let a stopped rank go on."""
        faults.resume(self.pids[rank])

    def delay(self, rank: int, seconds: float) -> None:
        """Bring a rank to a standstill for ``seconds``; returns at once."""
        faults.delay(self.pids[rank], seconds)

    def cut(self, rank: int, other: int) -> int:
        """Break all TCP connections between two ranks; returns their number."""
        return faults.cut(self.pids[rank], self.pids[other])

    def kill_store(self) -> None:
        """End the store at once (SIGKILL): ``mortal_store=True``.  What it held is lost."""
        self._mortal_store().kill()

    def restore_store(self) -> None:
        """Serve the store again, at the same address; returns when clients can connect."""
        self._mortal_store().start()

    def _mortal_store(self) -> StoreProcess:
        if not isinstance(self._server, StoreProcess):
            raise UsageError("the store is in the test's process: Ranks(..., mortal_store=True)")
        return self._server

    def ended(self, within: float = 0.0) -> bool:
        """Whether every rank has ended, or does so in so many seconds."""
        running = [rank for number, rank in enumerate(self._ranks) if number not in self._outcomes]
        return not await_ends(running, Deadline(within))

    def join(self) -> list[Outcome]:
        """Wait until every rank ended, at most until the deadline.

        Returns:
            each rank's :class:`Outcome`, in rank order.
        """
        running = [rank for number, rank in enumerate(self._ranks) if number not in self._outcomes]
        late = await_ends(running, self._deadline)
        stacks = give_up(late)
        for number, rank in enumerate(self._ranks):
            if rank in stacks:
                self._outcomes[number] = Outcome(number, stacks=stacks[rank], at=time.monotonic())
            elif number not in self._outcomes:
                self._outcomes[number] = rank.outcome(number)
        return [self._outcomes[number] for number in range(len(self._ranks))]

    def close(self) -> None:
        """Kill the ranks that still run, and release everything."""
        for rank in self._ranks:
            rank.close()
        self._client.close()
        self._server.close()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def processes(fn: Callable[..., Any], size: int, *args: Any, **how: Any) -> Ranks:
    """Start ``fn(group, *args)`` on ``size`` ranks that are processes; see :class:`Ranks`."""
    return Ranks(fn, size, *args, **how)


def pickled_work(
    fn: Callable[..., Any] | None, args: tuple[Any, ...], prepare: Callable[[], None] | None
) -> bytes:
    """The work of a process, pickled.

    Raises:
        UsageError: it cannot be sent there.
    """
    try:
        return pickle.dumps((fn, args, prepare))
    except Exception as error:
        raise UsageError(
            f"{fn!r} and its arguments cannot be pickled ({error}); the function must stand at the top "
            "level of a module"
        ) from error


class Child:
    """A process of a test, which the fork server makes, and the pipes that lead from it.

    Args:
        name: of the process.
        target: called there with ``args``, a pipe for its one report ``(kind, pickled value or exception,
            traceback, moment)``, and one for the stacks that ``DUMP_SIGNAL`` asks for.
    """

    def __init__(self, name: str, target: Callable[..., None], *args: Any) -> None:
        self.report: tuple[str, bytes, str, float] | None = None
        self.reports, reports = connection.Pipe(duplex=False)
        self._dumps, dumps = connection.Pipe(duplex=False)
        self.process = fork_server().Process(target=target, args=(*args, reports, dumps), name=name)
        try:
            self.process.start()
        finally:
            # Only the process holds these ends now, so that its end shows.
            reports.close()
            dumps.close()
        self.pid = self.process.pid or 0
        self._closed = False

    def read_report(self) -> None:
        """Take the report, or the end of a process that sends none."""
        try:
            self.report = self.reports.recv()
        except (EOFError, OSError):
            self.report = ("none", b"", "", time.monotonic())

    def has_reported(self) -> bool:
        """Whether its report has been taken."""
        return self.report is not None and self.report[0] != "none"

    def outcome(self, rank: int = -1, worker: str = "") -> Outcome:
        """The outcome of the rank or worker, which has reported or ended."""
        if self.report is None:
            self.read_report()
        kind, raw, text, at = self.report or ("none", b"", "", 0.0)
        if kind == "none":
            self.process.join(_END_TIME)
            return Outcome(rank, exitcode=self.process.exitcode, at=at, worker=worker)
        return replace(reported(rank, kind, raw, text, at), worker=worker)

    def read_stacks(self) -> str:
        """The stacks that the process writes, until it has been silent for a while."""
        return read_stacks(self._dumps)

    def close(self) -> None:
        """Kill the process if it still runs, and close the pipes."""
        if self._closed:
            return
        self._closed = True
        if self.process.is_alive():
            faults.kill(self.pid)
        self.process.join(_END_TIME)
        self.process.close()
        self.reports.close()
        self._dumps.close()


def await_ends(children: Sequence[Child], deadline: Deadline, *, reports: bool = False) -> list[Child]:
    """Wait until all have ended; those that have not when time is up.

    Args:
        reports: a process that has reported counts as ended.
    """
    running = {child.process.sentinel: child for child in children}
    for sentinel in [key for key, child in running.items() if reports and child.has_reported()]:
        del running[sentinel]
    while running:
        # A report may be longer than the pipe holds: it has to be taken while the process still runs.
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


def give_up(late: Sequence[Child]) -> dict[Child, str]:
    """Kill processes that are late; where each one was."""
    stacks = {}
    for child in late:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child.pid, DUMP_SIGNAL)
    for child in late:
        stacks[child] = child.read_stacks() or "(no stacks: it is stopped, or does not answer signals)"
        child.close()
    return stacks


def read_stacks(dumps: connection.Connection) -> str:
    """The stacks that a rank writes after :data:`DUMP_SIGNAL`, until it has been silent for a while."""
    descriptor, text, pause = dumps.fileno(), b"", _DUMP_TIME
    while select.select([descriptor], [], [], pause)[0]:
        part = os.read(descriptor, 65536)
        if not part:
            break
        text, pause = text + part, 0.5
    return text.decode(errors="replace")


_started: multiprocessing.context.ForkServerContext | None = None
_preloaded: list[str] = []


def preload(*modules: str) -> None:
    """Have the fork server import modules too, so that ranks need not; before the first rank starts.

    Args:
        modules: their names.  Importing them must start no thread.
    """
    _preloaded.extend(modules)


def fork_server() -> multiprocessing.context.ForkServerContext:
    """The fork server's context; the first call starts it, which loads torch."""
    global _started
    if _started is None:
        context = multiprocessing.get_context("forkserver")
        # Test modules import pytest, and ranks import the modules of their functions.
        extra = ["pytest"] if "pytest" in sys.modules else []
        context.set_forkserver_preload(["torch", run_rank.__module__, *extra, *_preloaded])
        with ignoring():  # it lives as long as this process
            ensure_running()
        _started = context
    return _started
