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
from multiprocessing import connection
from multiprocessing.forkserver import ensure_running
from types import TracebackType
from typing import Any, TypeVar

from ..errors import UsageError
from ..rendezvous import job_record
from ..rendezvous.record import room_of, root_of
from ..store import PrefixStore, Store, TCPStore, TCPStoreServer
from ..wire import Deadline
from ..wording import counted
from . import faults
from .leaks import ignoring
from .outcome import Outcome, reported, values
from .worker import DUMP_SIGNAL, run_rank

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
        env: environment variables that the ranks get in addition.
        prepare: called in each rank before ``init``, to register a backend for example.
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
        env: Mapping[str, str] | None = None,
        prepare: Callable[[], None] | None = None,
        op_timeout: float | None = None,
        **options: Any,
    ) -> None:
        if hosts is not None and len(hosts) != size:
            raise UsageError(f"hosts={list(hosts)!r}: expected one for each of {counted(size, 'rank')}")
        try:
            payload = pickle.dumps((fn, args, prepare))
        except Exception as error:
            raise UsageError(
                f"{fn!r} and its arguments cannot be pickled ({error}); the function must stand at the top "
                "level of a module"
            ) from error
        self._outcomes: dict[int, Outcome] = {}
        secret = secrets.token_hex(16)
        self._server = TCPStoreServer(secret=secret.encode(), records=job_record(size)).start()
        self._client = TCPStore(self._server.host, self._server.port, secret.encode(), timeout=timeout)
        self.store: Store = PrefixStore("store", room_of(root_of(self._client, "default", 0), 0))
        options = {"backend": backend, "timeout": timeout if op_timeout is None else op_timeout, **options}
        self._ranks: list[_Rank] = []
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
                self._ranks.append(_Rank(rank, payload, environment, options))
        except BaseException:
            self.close()
            raise
        self.pids = [rank.pid for rank in self._ranks]
        # Not before: the first rank of all waits until the fork server has loaded torch.
        self._deadline = Deadline(timeout)

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

    def join(self) -> list[Outcome]:
        """Wait until every rank ended, at most until the deadline.

        Returns:
            each rank's :class:`Outcome`, in rank order.
        """
        running = {rank.process.sentinel: rank for rank in self._ranks if rank.rank not in self._outcomes}
        while running:
            # A report may be longer than the pipe holds: it has to be taken while the rank still runs.
            waits: list[Any] = [rank.reports for rank in running.values() if rank.report is None]
            waits += running
            ready = connection.wait(waits, self._deadline.remaining())
            if not ready:
                break
            for rank in list(running.values()):
                if rank.reports in ready:
                    rank.read_report()
                if rank.process.sentinel in ready:
                    rank.process.join()
                    self._outcomes[rank.rank] = rank.outcome()
                    del running[rank.process.sentinel]
        self._give_up(list(running.values()))
        return [self._outcomes[rank.rank] for rank in self._ranks]

    def close(self) -> None:
        """Kill the ranks that still run, and release everything."""
        for rank in self._ranks:
            rank.end()
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

    def _give_up(self, late: Sequence[_Rank]) -> None:
        for rank in late:
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank.pid, DUMP_SIGNAL)
        for rank in late:
            stacks = rank.read_stacks() or "(no stacks: it is stopped, or does not answer signals)"
            self._outcomes[rank.rank] = Outcome(rank.rank, stacks=stacks, at=time.monotonic())
            rank.end()


def processes(fn: Callable[..., Any], size: int, *args: Any, **how: Any) -> Ranks:
    """Start ``fn(group, *args)`` on ``size`` ranks that are processes; see :class:`Ranks`."""
    return Ranks(fn, size, *args, **how)


class _Rank:
    """One rank's process and the pipes that lead to it."""

    def __init__(
        self, rank: int, payload: bytes, environment: Mapping[str, str], options: Mapping[str, Any]
    ) -> None:
        self.rank = rank
        self.report: tuple[str, bytes, str, float] | None = None
        self.reports, reports = connection.Pipe(duplex=False)
        self._dumps, dumps = connection.Pipe(duplex=False)
        self.process = fork_server().Process(
            target=run_rank, args=(payload, environment, options, reports, dumps), name=f"rank {rank}"
        )
        try:
            self.process.start()
        finally:
            # Only the rank holds these ends now, so that its end shows.
            reports.close()
            dumps.close()
        self.pid = self.process.pid or 0
        self._ended = False

    def read_report(self) -> None:
        """Take the report, or the end of a rank that sends none."""
        try:
            self.report = self.reports.recv()
        except (EOFError, OSError):
            self.report = ("none", b"", "", time.monotonic())

    def outcome(self) -> Outcome:
        """The outcome of the rank, which has ended."""
        if self.report is None:
            self.read_report()
        kind, raw, text, at = self.report or ("none", b"", "", 0.0)
        if kind == "none":
            return Outcome(self.rank, exitcode=self.process.exitcode, at=at)
        return reported(self.rank, kind, raw, text, at)

    def read_stacks(self) -> str:
        """The stacks that the rank writes, until it has been silent for a while."""
        return read_stacks(self._dumps)

    def end(self) -> None:
        """Kill the rank if it still runs, and close the pipes."""
        if self._ended:
            return
        self._ended = True
        if self.process.is_alive():
            faults.kill(self.pid)
        self.process.join(_END_TIME)
        self.process.close()
        self.reports.close()
        self._dumps.close()


def read_stacks(dumps: connection.Connection) -> str:
    """The stacks that a rank writes after :data:`DUMP_SIGNAL`, until it has been silent for a while."""
    descriptor, text, pause = dumps.fileno(), b"", _DUMP_TIME
    while select.select([descriptor], [], [], pause)[0]:
        part = os.read(descriptor, 65536)
        if not part:
            break
        text, pause = text + part, 0.1
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
