"""Nodes and masters that die: by signals, in processes of their own."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import psutil
import pytest

from shoal.testing.processes import fork_server, preload
from tests.controller import masters
from tests.controller.masters import BACKSTOP

preload("tests.controller.masters", "shoal.controller", "shoal.controller.prediction")


class Program:
    """A master's process, and what it tells."""

    def __init__(self, run: Callable[[Connection], None]) -> None:
        self._told, tell = multiprocessing.Pipe(duplex=False)
        self._process = fork_server().Process(target=run, args=(tell,))
        self._process.start()
        tell.close()
        self.pid: int = self._process.pid

    def told(self) -> Any:
        """The next that it tells."""
        assert self._told.poll(BACKSTOP), "it says nothing"
        return self._told.recv()

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


@pytest.fixture
def start() -> Iterator[Callable[[Callable[[Connection], None]], Program]]:
    """Starts programs."""
    programs: list[Program] = []

    def start(run: Callable[[Connection], None]) -> Program:
        programs.append(Program(run))
        return programs[-1]

    yield start
    for program in programs:
        program.close()


def _wait_until_gone(pids: list[int]) -> None:
    end = time.monotonic() + BACKSTOP
    while left := [pid for pid in pids if psutil.pid_exists(pid)]:
        assert time.monotonic() < end, f"{left} are still there"
        time.sleep(0.01)


Start = Callable[[Callable[[Connection], None]], Program]


def test_a_killed_node_is_an_error_at_the_next_use_and_others_go_on(start: Start) -> None:
    program = start(masters.loses_a_node)
    nodes = program.told()
    assert program.told() == "done"
    assert program.ended() == 0
    _wait_until_gone(nodes)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_is_left_when_the_master_is_killed(start: Start, how: signal.Signals) -> None:
    program = start(masters.works_for_ever)
    nodes = program.told()
    os.kill(program.pid, how)
    assert program.ended() == -how
    _wait_until_gone(nodes)


def test_nothing_is_left_when_the_master_dies_before_its_nodes_have_joined(start: Start) -> None:
    program = start(masters.dies_before_its_nodes_have_joined)
    nodes = program.told()
    assert program.ended() == -signal.SIGKILL
    _wait_until_gone(nodes)


def test_a_process_may_be_a_master_again_and_end_without_closing(start: Start) -> None:
    program = start(masters.fails_unseen_and_begins_again)
    (warned,) = program.told()
    assert "1 operations failed unseen" in warned
    assert "aten.index.Tensor" in warned
    assert all(program.told()), "torch is not as it was"
    assert program.told() == "node 0 is closed: its master was"
    nodes = program.told()
    assert program.told() == 1.0
    assert program.ended() == 0
    _wait_until_gone(nodes)


def test_an_interrupt_ends_a_wait_and_never_the_queue(start: Start) -> None:
    program = start(masters.is_interrupted)
    assert program.told() == [1.5] * 3
    assert program.told() == "done"


def test_a_node_that_cannot_start_is_told(start: Start) -> None:
    assert "the process of node 0 ended with 1 before it joined" in start(masters.cannot_start).told()
