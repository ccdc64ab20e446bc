"""The threads that run operations for which no thread waits."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

import shoal
from shoal import ProcessGroup
from shoal.errors import ConfigurationError, UsageError
from shoal.testing.processes import run_processes

LANES = 3


def progress_threads() -> list[Path]:
    """The progress threads of this process, as folders in /proc."""
    found = []
    for task in Path("/proc/self/task").iterdir():
        try:
            if (task / "comm").read_text().strip() == "shoal-progress":
                found.append(task)
        except FileNotFoundError:  # it has just ended
            continue
    return found


def running_time(task: Path) -> int:
    """Nanoseconds that a thread has run."""
    return int((task / "schedstat").read_text().split()[0])


def share_of_the_least_busy(group: ProcessGroup) -> tuple[int, float]:
    """The number of progress threads, and what the least busy one ran, as a share of the busiest."""
    tasks = progress_threads()
    before = [running_time(task) for task in tasks]
    xs = [torch.ones(1 << 20) for _ in range(LANES)]
    deadline = time.monotonic() + 60
    enough = torch.zeros(1)
    while True:
        for _ in range(10):
            futures = [group.all_reduce(x) for x in xs]
            # Not wait(): threads in it would run the operations.
            while not all(future.done() for future in futures):
                time.sleep(0.001)
        ran = [running_time(task) - start for task, start in zip(tasks, before, strict=True)]
        share = min(ran) / max(ran)
        enough.fill_(share >= 0.25 or time.monotonic() > deadline)
        if group.all_reduce(enough, "min").wait().item():
            return len(tasks), share


def test_each_thread_runs_operations() -> None:
    options = {"concurrency": LANES, "progress_threads": LANES}
    for count, share in run_processes(share_of_the_least_busy, 2, timeout=120, **options):
        assert count == LANES
        assert share >= 0.25


def wakes_of_the_progress_thread(group: ProcessGroup) -> float:
    """How often the progress thread begins to run, per message that a thread waits for; the lowest of
    several rounds."""
    (task,) = progress_threads()
    other, x = 1 - group.rank, torch.ones(2)
    deadline = time.monotonic() + 30
    enough = torch.zeros(1)
    while True:
        before = int((task / "schedstat").read_text().split()[2])
        for _ in range(300):
            if group.rank == 0:
                group.send(x, other).wait()
                group.recv(x, other).wait()
            else:
                group.recv(x, other).wait()
                group.send(x, other).wait()
        share = (int((task / "schedstat").read_text().split()[2]) - before) / 300
        enough.fill_(share < 0.5 or time.monotonic() > deadline)
        if group.all_reduce(enough, "min").wait().item():
            return share


def test_a_progress_thread_leaves_messages_to_threads_that_wait_for_them() -> None:
    assert max(run_processes(wakes_of_the_progress_thread, 2, timeout=120)) < 0.5


def count_after_split(group: ProcessGroup) -> tuple[int, int, int, int]:
    before = len(progress_threads())
    other = group.split(0, transport="tcp", progress_threads=4)
    x = other.all_reduce(torch.ones(10)).wait()
    during = len(progress_threads())
    other.close()
    return before, during, len(progress_threads()), int(x[0])


def test_connections_have_threads_of_their_own_until_they_are_closed() -> None:
    environment = {"SHOAL_PROGRESS_THREADS": "2"}
    for before, during, after, result in run_processes(count_after_split, 2, env=environment):
        assert (before, during, after, result) == (2, 6, 2, 2)


@pytest.mark.parametrize("number", [0, 65, True, "2", 1.0])
def test_an_impossible_number_is_refused(number: object) -> None:
    with pytest.raises(UsageError, match="progress_threads="):
        shoal.init("file:///nowhere", progress_threads=number)


@pytest.mark.parametrize("text", ["0", "65", "two"])
def test_an_impossible_number_in_the_environment_is_refused(
    monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv("SHOAL_PROGRESS_THREADS", text)
    with pytest.raises(ConfigurationError, match=r"SHOAL_PROGRESS_THREADS.*from 1 to 64"):
        shoal.init()
