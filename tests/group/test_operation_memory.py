"""Memory that operations between hosts use for a moment: kept for the next one, then returned."""

from __future__ import annotations

import ctypes
import os
import random
import resource
import threading
import time
from pathlib import Path

import pytest
import torch

from shoal import ProcessGroup
from shoal.errors import ShoalError
from shoal.testing.processes import run_processes

PAGE = os.sysconf("SC_PAGE_SIZE")
M_MMAP_THRESHOLD = -3
TWO_HOSTS, FOUR_HOSTS = ("a", "a", "b", "b"), ("a", "b", "c", "d")


def map_every_large_block() -> None:
    """Make malloc() map each block of 64 KB and more, and unmap it when it is freed."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt"):
        pytest.skip("needs mallopt(), which this C library does not have")
    assert libc.mallopt(M_MMAP_THRESHOLD, 64 << 10)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


def count_faults(group: ProcessGroup, elements: int, rounds: int) -> float:
    """The page faults of an all-reduce, after some that have none of their memory yet."""
    map_every_large_block()
    x = torch.zeros(elements)
    for _ in range(3):
        group.all_reduce(x).wait()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(rounds):
        group.all_reduce(x).wait()
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    group.barrier().wait()
    return faults / rounds


@pytest.mark.parametrize("hosts", [TWO_HOSTS, FOUR_HOSTS], ids=["two hosts of two", "four hosts"])
@pytest.mark.parametrize("algorithm", ["direct", "doubling", "halving", "ring"])
def test_repeated_operations_use_the_same_pages(hosts: tuple[str, ...], algorithm: str) -> None:
    elements = 1 << 20
    faults = run_processes(count_faults, 4, elements, 10, hosts=hosts, algorithm=algorithm)
    assert max(faults) < elements * 4 / PAGE / 8, faults


def memory_after_rest(group: ProcessGroup, elements: int) -> tuple[int, int]:
    """Resident bytes after an operation, and the lowest number of the seconds that follow."""
    map_every_large_block()
    x = torch.zeros(elements)
    group.all_reduce(x).wait()
    used = lowest = resident_bytes()
    deadline = time.monotonic() + 30
    while lowest > used - elements * 4 and time.monotonic() < deadline:
        time.sleep(0.1)
        lowest = min(lowest, resident_bytes())
    group.barrier().wait()
    return used, lowest


def test_unused_memory_is_returned_to_the_system() -> None:
    elements = 8 << 20
    for used, lowest in run_processes(memory_after_rest, 4, elements, hosts=FOUR_HOSTS, algorithm="halving"):
        assert used - lowest >= elements * 4


def check_sums(group: ProcessGroup, elements: int, end: float, wrong: list[str]) -> None:
    """All-reduce small integers until ``end``, and append what is wrong."""
    x = torch.empty(elements)
    for number in range(1, 1 << 30):
        over = torch.tensor(float(time.monotonic() > end))
        if group.all_reduce(over, "max").wait():
            return
        x.fill_((group.rank + 1) * (number % 7 + 1))
        group.all_reduce(x).wait()
        expected = group.size * (group.size + 1) / 2 * (number % 7 + 1)
        if not torch.all(x == expected):
            wrong.append(f"operation {number}: {x[x != expected][:3].tolist()} instead of {expected}")


def time_out_beside_others(
    group: ProcessGroup, algorithm: str, elements: int, seconds: float
) -> tuple[int, list[str]]:
    """The number of operations that failed, and wrong results of other groups meanwhile."""
    end = time.monotonic() + seconds
    wrong: list[str] = []
    healthy = [group.split(0, algorithm=algorithm) for _ in range(2)]
    threads = [threading.Thread(target=check_sums, args=(each, elements, end, wrong)) for each in healthy]
    for thread in threads:
        thread.start()
    moments = random.Random(5)
    failed = 0
    while True:
        over = torch.tensor(float(time.monotonic() > end))
        if group.all_reduce(over, "max").wait():
            break
        other = group.split(0, algorithm=algorithm)
        other.barrier().wait()
        try:
            other.all_reduce(torch.full((elements,), 1e6), timeout=moments.uniform(0.0005, 0.02)).wait()
        except ShoalError:
            failed += 1
        other.abort()
    for thread in threads:
        thread.join()
    return failed, wrong


@pytest.mark.stress
@pytest.mark.parametrize("algorithm", ["direct", "doubling", "halving", "ring"])
def test_failed_operations_write_nothing_into_the_memory_of_others(algorithm: str) -> None:
    """Late messages of a failed operation arrived in memory that another one had got."""
    how = {"hosts": ("a", "b"), "timeout": 120}
    for failed, wrong in run_processes(time_out_beside_others, 2, algorithm, 2_000_000, 25.0, **how):
        assert failed > 0
        assert not wrong
