"""The threads that run operations for which no thread waits."""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from random import Random

import pytest
import torch

import shoal
from shoal import ProcessGroup
from shoal.errors import ConfigurationError, UsageError, WaitTimeout
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


def median_time_to_poll(group: ProcessGroup) -> float:
    """Seconds until messages are done that no thread waits for, posted after a wait; the lowest of several
    rounds."""
    other, x, y = 1 - group.rank, torch.ones(1 << 16), torch.ones(1 << 16)
    deadline = time.monotonic() + 30
    enough = torch.zeros(1)
    while True:
        times = []
        for _ in range(100):
            group.barrier().wait()
            start = time.monotonic()
            futures = [group.recv(y, other), group.send(x, other)]
            while not all(future.done() for future in futures):
                time.sleep(0.0001)
            times.append(time.monotonic() - start)
        median = statistics.median(times)
        enough.fill_(median < 0.0008 or time.monotonic() > deadline)
        if group.all_reduce(enough, "min").wait().item():
            return median


@pytest.mark.stress
def test_polling_wakes_a_progress_thread_that_left_messages_to_waiters() -> None:
    assert max(run_processes(median_time_to_poll, 2, timeout=120)) < 0.0008


def wakes_per_second_of_waiting(group: ProcessGroup) -> float:
    """How often the progress thread begins to run while a thread waits for a late message."""
    (task,) = progress_threads()
    x = torch.ones(2)
    for _ in range(2):
        (group.send(x, 1) if group.rank == 0 else group.recv(x, 0)).wait()
    group.barrier().wait()
    before = int((task / "schedstat").read_text().split()[2])
    if group.rank == 0:
        time.sleep(1)
        group.send(x, 1).wait()
        return 0.0
    start = time.monotonic()
    group.recv(x, 0).wait()
    return (int((task / "schedstat").read_text().split()[2]) - before) / (time.monotonic() - start)


def test_a_long_wait_for_a_message_seldom_wakes_the_progress_thread() -> None:
    assert max(run_processes(wakes_per_second_of_waiting, 2, timeout=60)) < 120


def longest_delays(group: ProcessGroup) -> list[float]:
    """The seconds until messages are done for which a thread had stopped to wait, the longest first."""
    x, y, z = torch.ones(2), torch.ones(2), torch.ones(2)
    delays = [0.0]
    if group.rank == 0:
        random = Random(1)
        for _ in range(2500):
            group.recv(y, 1, tag=2).wait()
            start = time.perf_counter()
            pause = random.uniform(0.001, 0.00125)
            while time.perf_counter() < start + pause:
                pass
            group.send(x, 1, tag=1).wait()
        group.send(x, 1, tag=3).wait()
        return delays
    other = group.recv(z, 0, tag=3)  # for it the progress thread sleeps until something happens
    for _ in range(2500):
        future = group.recv(y, 0, tag=1)
        group.send(x, 0, tag=2).wait()
        try:
            future.wait(0.0001)
        except WaitTimeout:
            start = time.monotonic()
            while not future.done():
                time.sleep(0.00002)
            delays.append(time.monotonic() - start)
    other.wait()
    return sorted(delays, reverse=True)


@pytest.mark.stress
def test_a_message_that_arrives_when_its_waiter_stops_waiting_is_seen() -> None:
    delays = run_processes(longest_delays, 2, timeout=120)[1]
    assert sum(delay > 0.045 for delay in delays) < 2, delays[:9]


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
