"""Workers that are killed before they are nodes: while a master starts them, and while they join one."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import shoal
from shoal.controller.start import processes as node_processes
from shoal.errors import LaunchError
from shoal.testing import no_leaks
from tests.controller import nodes
from tests.controller.nodes import BACKSTOP, SECRET, Program, programs, wait_until_gone, wait_until_lost

start = pytest.fixture(programs)
Start = Callable[..., Program]
SHORT = os.environ.get("STRESS") == "short"

pytestmark = pytest.mark.usefixtures("no_master")


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The processes that masters start, as they do."""
    processes: list[Any] = []
    popen = node_processes.subprocess.Popen

    def noted(*args: Any, **how: Any) -> Any:
        processes.append(popen(*args, **how))
        return processes[-1]

    monkeypatch.setattr(node_processes.subprocess, "Popen", noted)
    return processes


def test_the_end_of_a_process_is_told_while_another_one_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And the other one, which hears nothing, is not waited for at the end."""
    popen, pids = node_processes.subprocess.Popen, list[int]()

    def hindered(*args: Any, **how: Any) -> Any:
        made = popen(*args, **how)
        pids.append(made.pid)
        os.kill(made.pid, signal.SIGKILL if len(pids) == 2 else signal.SIGSTOP)
        return made

    monkeypatch.setattr(node_processes.subprocess, "Popen", hindered)
    with (
        no_leaks(),
        pytest.raises(LaunchError, match="the process of node 1 ended with -9 before it joined"),
    ):
        shoal.init_master_worker(workers=2, timeout=BACKSTOP)
    wait_until_gone(pids)


def _kill_in_starts(started: list[Any], trials: int) -> None:
    choose = random.Random(trials)
    for _ in range(trials):
        started.clear()
        killed: list[int] = []

        def kill(which: int = choose.randrange(2), killed: list[int] = killed) -> None:
            if which < len(started) and started[which].poll() is None:
                killed.append(started[which].pid)
                started[which].kill()

        killing = threading.Timer(choose.random() * 0.4, kill)
        killing.start()
        with (
            no_leaks(),
            contextlib.suppress(LaunchError),
            shoal.init_master_worker(workers=2, timeout=BACKSTOP) as master,
        ):
            killing.join()
            for dead in map(master.pids.index, killed):
                wait_until_lost(master, dead)
                master.replace(dead, BACKSTOP)
            assert [torch.ones(2, device=f"node:{i}").tolist() for i in (0, 1)] == [[1, 1]] * 2
        killing.join()
        wait_until_gone([each.pid for each in started])


def test_a_start_in_which_a_process_is_killed_ends_or_its_node_is_lost(started: list[Any]) -> None:
    _kill_in_starts(started, 3)


@pytest.mark.stress
def test_many_starts_in_which_a_process_is_killed(started: list[Any]) -> None:
    _kill_in_starts(started, 20 if SHORT else 100)


def _kill_who_joins(start: Start, url: str, trials: int) -> None:
    choose = random.Random(trials)
    for _ in range(trials):
        with no_leaks():
            workers = [start(nodes.joins, url, SECRET) for _ in range(3)]
            with shoal.init_master_worker(url=url, secret=SECRET) as master:
                killing = threading.Timer(choose.random() * 0.15, workers[0].kill)
                killing.start()
                master.wait_for(2, BACKSTOP)
                killing.join()
                workers[0].ended()
                for index in range(2):
                    if master.pids[index] == workers[0].pid:
                        wait_until_lost(master, index)
                        master.replace(index, BACKSTOP)
                    assert torch.ones(2, device=f"node:{index}").tolist() == [1, 1]
            for worker in workers:
                worker.close()


def test_workers_that_are_killed_while_they_join_hold_nobody_up(start: Start, url: str) -> None:
    _kill_who_joins(start, url, 2)


@pytest.mark.stress
def test_many_workers_that_are_killed_while_they_join_hold_nobody_up(start: Start, url: str) -> None:
    _kill_who_joins(start, url, 20 if SHORT else 100)
