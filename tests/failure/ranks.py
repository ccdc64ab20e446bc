"""What the ranks of these tests do: work at random until the group ends, then say how it was.

A rank that is a process cannot show the test what it holds, so it looks itself, after closing its group.
"""

from __future__ import annotations

import contextlib
import gc
import os
import random
import signal
import sys
import threading
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from shoal import Future, PeerLost, ProcessGroup

#: elements: in a slot, in one message, in several windows, in several strides of the fused pass
SIZES = (1, 700, 30_000, 400_000, 3_000_000)
#: seconds until a rank that nothing happens to gives up
PATIENCE = 40.0
#: seconds in which threads that were joined must be gone
THREADS_END = 2.0


@dataclass
class Report:
    """What a survivor saw.  ``at`` is a moment on the machine's monotonic clock."""

    lost: tuple[int, ...]
    at: float
    message: str
    state: str
    again: tuple[int, ...]
    known: frozenset[int]
    completed: int | None
    closed_within: float = 0.0
    left: list[str] = field(default_factory=list)


def begin(group: ProcessGroup) -> None:
    """Wait for all ranks; one that is through the barrier may die before it has ended here."""
    with contextlib.suppress(PeerLost):
        group.barrier().wait()


def work_until_lost(group: ProcessGroup, seed: int, workers: bool) -> Report:
    """Collectives at random until one fails; ``workers``: beside a forked child, as a DataLoader's."""
    worker = fork_worker(group) if workers else 0
    try:
        choose = random.Random(seed)  # the same on all ranks
        memory = {n: group.empty(n * group.size) for n in SIZES}
        group.barrier().wait()
        group.store.set(f"ready/{group.rank}", b"")
        end = time.monotonic() + PATIENCE
        report = None
        try:
            while time.monotonic() < end:
                some_operations(group, choose, memory)
        except PeerLost as error:
            report = seen(group, error)
        del memory
        return closed(group, report)
    finally:
        if worker:
            os.kill(worker, signal.SIGKILL)
            os.waitpid(worker, 0)


def work_until_killed_at(group: ProcessGroup, point: str, victim: int, registered: Sequence[int]) -> Report:
    """One operation after another; ``victim`` dies when it gets to ``point`` in the tenth.

    The tensors of the ranks in ``registered`` lie in memory of ``group.empty``.
    """
    count = 6_000_000 if point == "writing" else 100_000  # several strides of the fused pass
    x = group.empty(count) if group.rank in registered else torch.empty(count)
    report = None
    try:
        for i in range(1000):
            if i == 10 and group.rank == victim:
                group.store.get("watched", PATIENCE)  # or the test would come too late to see it die
                group._backend.die_at(point)  # type: ignore[attr-defined]
            x.fill_(1.0)
            group.all_reduce(x).wait()
            assert bool((x == group.size).all()), f"operation {i} gave a wrong result"
    except PeerLost as error:
        report = seen(group, error)
    del x
    return closed(group, report)


def some_operations(group: ProcessGroup, choose: random.Random, memory: dict[int, torch.Tensor]) -> None:
    """One to three collectives in flight together, and whether they are right."""
    futures: list[tuple[Future[Any], torch.Tensor, float]] = []
    used = []
    for _ in range(choose.choice((1, 1, 3))):
        n = choose.choice(SIZES)
        registered = choose.random() < 0.5 and n not in used
        used.append(n)
        x = memory[n] if registered else torch.empty(n * group.size)
        part = x[: n // group.size * group.size] if n >= group.size else x[: group.size]
        x.fill_(1.0)
        size = float(group.size)
        root = choose.randrange(group.size)
        kind = choose.randrange(7)
        if kind == 0:
            futures.append((group.all_reduce(x), x, size))
        elif kind == 1:
            futures.append((group.reduce(x, root), x, size if group.rank == root else 1.0))
        elif kind == 2:
            futures.append((group.broadcast(x, root), x, 1.0))
        elif kind == 3:
            out = torch.empty(x.numel() * group.size if n < SIZES[-1] else group.size)
            futures.append((group.all_gather_single(out, x if n < SIZES[-1] else x[:1]), out, 1.0))
        elif kind == 4:
            out = torch.empty(part.numel() // group.size)
            futures.append((group.reduce_scatter_single(out, part), out, size))
        elif kind == 5:
            out = torch.empty_like(part)
            futures.append((group.all_to_all_single(out, part), out, 1.0))
        else:
            futures.append((group.barrier(), x, 1.0))
    for future, result, expected in futures:
        future.wait()
        assert bool((result == expected).all()), f"expected {expected}, got {result}"


def seen(group: ProcessGroup, error: PeerLost) -> Report:
    """What a survivor sees at first."""
    at = time.monotonic()
    again: tuple[int, ...] = ()
    try:
        group.barrier()
    except PeerLost as second:
        again = second.ranks
    return Report(
        error.ranks, at, str(error), group.state, again, group._backend.lost(), error.last_completed
    )


def closed(group: ProcessGroup, report: Report | None) -> Report:
    """The report, with how closing the group went and what of it was left."""
    assert report is not None, "nothing happened"
    group.store.set(f"lost/{group.rank}", b"")
    before = time.monotonic()
    group.close()
    report.closed_within = time.monotonic() - before
    report.left = left_behind()
    return report


def left_behind() -> list[str]:
    """What a process without groups should not have: shoal's threads, its memory, sockets and the like."""
    gc.collect()
    # The kernel lists a thread for a moment after it was joined.
    end = time.monotonic() + THREADS_END
    while threads() and time.monotonic() < end:
        time.sleep(0.005)
    return [*threads(), *descriptors(), *mappings()]


def threads() -> list[str]:
    """Native threads of groups and Python threads that the program did not start."""
    found = [t.name for t in threading.enumerate() if t.name.startswith("shoal")]
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has just ended
            name = (task / "comm").read_text().strip()
            if name.startswith("shoal"):
                found.append(name)
    return [f"thread {name}" for name in found]


def descriptors() -> list[str]:
    """Open sockets, memory files, and what the watch thread polls."""
    kinds = ("socket:", "/memfd:", "anon_inode:[eventpoll]", "anon_inode:[eventfd]", "anon_inode:[pidfd]")
    found = []
    for entry in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{entry}")
        except OSError:
            continue
        if target.startswith(kinds):
            found.append(f"descriptor {entry} -> {target}")
    return found


def mappings() -> list[str]:
    """Shared memory that is mapped."""
    with open("/proc/self/maps") as maps:
        return [line.strip() for line in maps if "memfd:shoal" in line]


def fork_worker(group: ProcessGroup) -> int:
    """A forked child that sleeps, as a DataLoader's worker does; it outlives its parent for a while."""
    parent = os.getpid()
    child = quiet_fork()
    if child == 0:
        while os.getppid() == parent:
            time.sleep(0.02)
        time.sleep(5.0)  # longer than its parent's death may go unnoticed
        os._exit(0)
    group.store.set(f"worker/{group.rank}", str(child).encode())
    return child


_forking = threading.Lock()


def quiet_fork() -> int:
    """``os.fork``, which Python 3.12 warns of when there are threads: here that is the point."""
    sys.stdout.flush()
    with _forking, warnings.catch_warnings():  # filelock refuses a fork while another thread forks
        warnings.simplefilter("ignore")
        return os.fork()
