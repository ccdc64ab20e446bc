"""Memory that operations between hosts use for a moment: kept for the next one, then returned."""

from __future__ import annotations

import ctypes
import os
import resource
import time
from pathlib import Path

import pytest
import torch

from shoal import ProcessGroup
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
