"""Ranks that run on one core although each could have its own."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from shoal import ProcessGroup
from shoal.testing.processes import run_processes

TURNS = 200


def quickest(turn: Callable[[], object]) -> tuple[float, float]:
    """The seconds of a turn in the quickest of several rounds, and this process's share of the core."""
    rounds = []
    for _ in range(10):
        start, computed = time.perf_counter(), time.process_time()
        for _ in range(TURNS):
            turn()
        rounds.append((time.perf_counter() - start, time.process_time() - computed))
    taken, computed = min(rounds)
    return taken / TURNS, computed / taken


def time_of_messages_and_of_pipes(group: ProcessGroup, folder: Path) -> tuple[float, float, float]:
    """The time in which both ranks, on one core, send each other a message; this rank's share of the core
    meanwhile; the time in which they do the same by two pipes.
    """
    core = min(os.sched_getaffinity(0))
    for task in Path("/proc/self/task").iterdir():
        with suppress(ProcessLookupError):  # it has just ended
            os.sched_setaffinity(int(task.name), {core})
    other, x = 1 - group.rank, torch.ones(2)
    # A FIFO is opened when the other side opens it, too.
    ways = [os.open(folder / str(i), os.O_RDONLY if i == group.rank else os.O_WRONLY) for i in range(2)]
    own, others = ways[group.rank], ways[other]

    def messages() -> None:
        for action in [group.send, group.recv] if group.rank == 0 else [group.recv, group.send]:
            action(x, other).wait()

    def pipes() -> None:
        if group.rank == 0:
            os.write(others, b"x")
        os.read(own, 1)
        if group.rank == 1:
            os.write(others, b"x")

    return *quickest(messages), quickest(pipes)[0]


@pytest.mark.stress  # compares times
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs a core for each rank")
def test_ranks_on_one_core_leave_it_to_each_other(tmp_path: Path) -> None:
    for i in range(2):
        os.mkfifo(tmp_path / str(i))
    outcomes = run_processes(time_of_messages_and_of_pipes, 2, tmp_path)
    if (shares := sum(share for _, share, _ in outcomes)) < 0.9:
        pytest.skip(f"other processes compute on this core: the ranks had {shares:.0%} of it")
    for messages, _, pipes in outcomes:
        assert messages < 16 * pipes
