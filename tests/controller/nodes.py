"""Nodes and masters of the tests, as forks of a process that has imported torch."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection
from typing import Any

import psutil
import torch

import shoal
from shoal.controller.serving import serve_masters
from shoal.testing.processes import fork_server, preload

preload("tests.controller.nodes", "tests.controller.masters", "shoal.controller.prediction")

#: seconds that nothing here may take
BACKSTOP = 120


class Program:
    """A process, and what it tells."""

    def __init__(self, run: Callable[..., None], *args: Any) -> None:
        self._told, tell = multiprocessing.Pipe(duplex=False)
        self._process = fork_server().Process(target=_run, args=(run, tell, args))
        self._process.start()
        tell.close()
        self.pid: int = self._process.pid

    def told(self) -> Any:
        """The next that it tells."""
        assert self._told.poll(BACKSTOP), "it says nothing"
        return self._told.recv()

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
        if self._process.is_alive():
            self._process.kill()
        self._process.join(BACKSTOP)
        self._told.close()


def _run(run: Callable[..., None], tell: Connection, args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    run(tell, *args)


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
