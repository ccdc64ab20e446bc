"""Nodes and masters of the tests, as forks of a process that has imported torch."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import psutil
import torch

import shoal
from shoal.controller import Master
from shoal.controller.node.serving import serve_masters
from shoal.net import Deadline
from shoal.store import TCPStoreServer
from shoal.testing.processes import fork_server, preload
from tests.support import quick_workers

preload("tests.controller.nodes", "tests.controller.masters")

#: of the jobs of tests
SECRET = "of the test"
#: seconds that nothing here may take
BACKSTOP = 120


class _Failed(NamedTuple):
    """A program tells this when it raises an exception."""

    traceback: str


class Program:
    """A process, and what it tells."""

    def __init__(self, run: Callable[..., None], *args: Any) -> None:
        self._told, tell = multiprocessing.Pipe(duplex=False)
        self._process = fork_server().Process(target=_run, args=(quick_workers.nursery(), run, tell, args))
        self._process.start()
        tell.close()
        self.pid: int = self._process.pid

    def told(self) -> Any:
        """The next that it tells."""
        assert self._told.poll(BACKSTOP), "it says nothing"
        told = self._told.recv()
        assert not isinstance(told, _Failed), told.traceback
        return told

    def kill(self) -> None:
        """End it by a signal."""
        os.kill(self.pid, signal.SIGKILL)

    def ended(self) -> int:
        """Its exit code, as soon as it has ended."""
        self._process.join(BACKSTOP)
        code: int | None = self._process.exitcode
        assert code is not None, "it does not end"
        return code

    def close(self) -> None:
        """End it, if a test has not come to its end."""
        if not self._told.closed:
            self._process.kill()
            self._process.join(BACKSTOP)
            self._process.close()
            self._told.close()


def _run(nursery: str, run: Callable[..., None], tell: Connection, args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    quick_workers.start_at(nursery)
    try:
        run(tell, *args)
    except Exception:
        with contextlib.suppress(OSError):  # nobody listens any more
            tell.send(_Failed(traceback.format_exc()))
        raise


def programs() -> Iterator[Callable[..., Program]]:
    """Starts programs, of which none is left afterwards; for fixtures."""
    started: list[Program] = []

    def start(run: Callable[..., None], *args: Any) -> Program:
        started.append(Program(run, *args))
        return started[-1]

    yield start
    for program in started:
        program.close()


def wait_until_gone(pids: list[int]) -> None:
    """Wait until no such process is there."""
    end = time.monotonic() + BACKSTOP
    while left := [pid for pid in pids if psutil.pid_exists(pid)]:
        assert time.monotonic() < end, f"{left} are still there"
        time.sleep(0.01)


def stop(pid: int) -> None:
    """Stop a process, and wait until it does nothing any more."""
    os.kill(pid, signal.SIGSTOP)
    while psutil.Process(pid).status() != psutil.STATUS_STOPPED:
        time.sleep(0.001)


def joins(tell: Connection, url: str, secret: str = "") -> None:
    """``shoal worker URL``."""
    os.environ["SHOAL_SECRET"] = secret
    serve_masters(url, "worker", tell.send)


def is_rank(tell: Connection, environ: Mapping[str, str]) -> None:
    """A program under a launcher, which told it ``environ``."""
    os.environ.update(environ)
    with shoal.init_master_worker(timeout=BACKSTOP) as master:
        sums = [torch.full((2,), 3.0, device=each).sum() for each in master.nodes]
        tell.send([each.item() for each in sums])


def is_master(tell: Connection, url: str, secret: str, count: int) -> None:
    """A master of workers that join, until it is killed."""
    master = shoal.init_master_worker(url=url, secret=secret)
    master.wait_for(count, BACKSTOP)
    tell.send([torch.ones(2, device=each).sum().item() for each in master.nodes])
    signal.pause()


def is_second_master(tell: Connection, url: str, secret: str) -> None:
    """Try to be one."""
    try:
        shoal.init_master_worker(url=url, secret=secret)
    except shoal.ShoalError as error:
        tell.send((type(error).__name__, str(error)))


class Crew:
    """A master whose nodes join, so that a new one takes a moment.

    Attributes:
        master: of them.
    """

    def __init__(self, start: Callable[..., Program], url: str, count: int) -> None:
        self._start = start
        self._url = url
        self.workers: list[Program] = []
        for _ in range(count):
            self.joining()
        self.master = shoal.init_master_worker(url=url, secret=SECRET)
        self.master.wait_for(count, BACKSTOP)

    def joining(self) -> Program:
        """A new worker."""
        self.workers.append(self._start(joins, self._url, SECRET))
        return self.workers[-1]

    def end(self) -> None:
        """End all workers."""
        for worker in self.workers:
            worker.close()

    def kill(self, index: int) -> None:
        """Kill a node, and wait until its loss is known."""
        os.kill(self.master.pids[index], signal.SIGKILL)
        wait_until_lost(self.master, index)


def crews(start: Callable[..., Program], no_master: None) -> Iterator[Crew]:
    """A fixture: a master with three nodes of a test's own."""
    with TCPStoreServer(secret=SECRET.encode()) as server:
        crew = Crew(start, server.url, 3)
        with crew.master:
            yield crew


def wait_until_lost(master: Master, index: int) -> None:
    """Wait until the master knows that a node died."""
    deadline = Deadline(BACKSTOP)
    with contextlib.suppress(shoal.NodeLost):
        while True:
            torch.zeros(1, device=f"node:{index}").item()
            assert not deadline.expired, "its loss is not known"


def works(tell: Connection, url: str, secret: str, count: int) -> None:
    """A master that gives its nodes work of all kinds until it is killed."""
    master = shoal.init_master_worker(url=url, secret=secret)
    nodes = master.wait_for(count, BACKSTOP)
    tell.send("works")
    while True:
        x = torch.ones(1 << 16).to(nodes[0])
        for _ in range(50):
            x = x * 1.0
        nodes.gather(nodes.replicate(x.to(nodes[1]).cpu()))
