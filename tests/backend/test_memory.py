"""Registered memory: nothing of it is copied aside, it comes back, and it has a limit."""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.errors import OutOfSharedMemory
from shoal.group import ProcessGroup
from shoal.testing import run_threads
from tests.support.waiting import until

RANKS = 3
PART = 50_000  # elements: far more than travels in a slot
MIB = 2**20


def in_use(group: ProcessGroup) -> int:
    """Bytes of shared memory that this rank has taken, for tensors and for staging buffers alike."""
    used: int = group._backend._context.memory_in_use  # type: ignore[union-attr]
    return used


def _each_collective(group: ProcessGroup, make: Callable[[int], torch.Tensor]) -> dict[str, int]:
    """What every collective takes of shared memory while it works on tensors from ``make``."""
    one, another, whole, out = make(PART), make(PART), make(RANKS * PART), make(RANKS * PART)
    parts, outs = list(whole.split(PART)), list(out.split(PART))
    for tensor in (one, another, whole, out):
        tensor.fill_(group.rank + 1.0)
    operations: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: group.all_reduce(one, op="max"),
        "reduce": lambda: group.reduce(another, root=1),
        "broadcast": lambda: group.broadcast(one, root=2),
        "all_gather": lambda: group.all_gather(outs, one),
        "all_gather_single": lambda: group.all_gather_single(out, one),
        "reduce_scatter": lambda: group.reduce_scatter(one, parts),
        "reduce_scatter_single": lambda: group.reduce_scatter_single(one, whole),
        "gather": lambda: group.gather(one, outs if group.rank == 0 else None),
        "scatter": lambda: group.scatter(one, parts if group.rank == 0 else None),
        "all_to_all": lambda: group.all_to_all(outs, parts),
        "all_to_all_single": lambda: group.all_to_all_single(out, whole),
    }
    taken = {}
    for name, operation in operations.items():
        before = in_use(group)
        operation().wait()
        taken[name] = in_use(group) - before
    return taken


def test_no_collective_makes_a_staging_copy_of_registered_tensors() -> None:
    def body(group: ProcessGroup) -> dict[str, int]:
        return _each_collective(group, group.empty)

    for taken in run_threads(body, RANKS, transport="shm"):
        assert set(taken.values()) == {0}, taken


def test_nor_of_contiguous_views_at_odd_offsets() -> None:
    def body(group: ProcessGroup) -> dict[str, int]:
        return _each_collective(group, lambda count: group.empty(count + 3)[3:])

    for taken in run_threads(body, RANKS, transport="shm"):
        assert set(taken.values()) == {0}, taken


def test_ordinary_tensors_are_staged_and_the_measure_sees_it() -> None:
    def body(group: ProcessGroup) -> int:
        return sum(_each_collective(group, torch.empty).values())

    assert min(run_threads(body, RANKS, transport="shm")) >= MIB


def test_a_registered_tensor_is_not_copied_in_where_another_rank_has_an_ordinary_one() -> None:
    def body(group: ProcessGroup) -> int:
        # A broadcast needs no room of those who only receive; its root is the one that could stage.
        x = group.empty(PART) if group.rank == 0 else torch.empty(PART)
        x.fill_(group.rank)
        before = in_use(group)
        group.broadcast(x, root=0).wait()
        assert x.eq(0).all()
        return in_use(group) - before

    assert run_threads(body, RANKS, transport="shm") == [0] * RANKS


def test_a_reduction_takes_room_only_of_the_ranks_with_ordinary_tensors() -> None:
    def body(group: ProcessGroup) -> int:
        x = group.empty(PART) if group.rank == 0 else torch.empty(PART)
        x.fill_(group.rank)
        before = in_use(group)
        group.all_reduce(x).wait()
        assert x.eq(3).all()
        return in_use(group) - before

    registered, *ordinary = run_threads(body, RANKS, transport="shm")
    assert registered == 0
    assert min(ordinary) > 0


def test_memory_of_dead_tensors_is_used_again() -> None:
    def body(group: ProcessGroup) -> None:
        before = in_use(group)
        for _ in range(20):
            x = group.empty(4 * MIB, dtype=torch.uint8)
            group.all_reduce(x.zero_()).wait()
            assert 4 * MIB <= in_use(group) - before < 5 * MIB
            del x
        assert in_use(group) == before

    run_threads(body, 2, transport="shm", shared_memory_limit=8 * MIB)


def test_the_limit_is_an_error_that_leaves_the_group_usable() -> None:
    def body(group: ProcessGroup) -> None:
        kept = group.empty(3 * MIB, dtype=torch.uint8)
        with pytest.raises(OutOfSharedMemory, match="the limit of 4 MiB of shared memory is reached"):
            group.empty(2 * MIB, dtype=torch.uint8)
        del kept
        x = group.empty(3 * MIB, dtype=torch.uint8).fill_(1)
        group.all_reduce(x).wait()
        assert x.eq(2).all()

    run_threads(body, 2, transport="shm", shared_memory_limit=4 * MIB)


def test_other_threads_run_while_memory_is_made() -> None:
    interval = sys.getswitchinterval()
    count = 0
    stop = threading.Event()

    def counts() -> None:
        nonlocal count
        while not stop.is_set():
            time.sleep(0.0005)  # lets go of the interpreter, and gets it when another one does
            count += 1

    def body(group: ProcessGroup) -> None:
        context = group._backend._context  # type: ignore[union-attr]
        # The other thread may get no processor meanwhile, but not ten times.
        for _ in range(10):
            before = count
            x = group.empty(128 * MIB, dtype=torch.uint8)
            if count > before:
                return
            del x
            context.trim()  # or its pages are there already
        raise AssertionError("the other thread stood still every time")

    counter = threading.Thread(target=counts, daemon=True)
    sys.setswitchinterval(100.0)  # only who lets go of the interpreter lets others run
    try:
        counter.start()
        run_threads(body, 1)
    finally:
        stop.set()
        sys.setswitchinterval(interval)
    counter.join()


def _shared() -> int:
    """Bytes of shared memory that are resident in this process."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(next(line for line in status.splitlines() if line.startswith("RssShmem")).split()[1])


def test_released_memory_goes_back_to_the_system() -> None:
    def body(group: ProcessGroup) -> None:
        context = group._backend._context  # type: ignore[union-attr]
        x = group.empty(64 * MIB, dtype=torch.uint8).fill_(1)
        resident = _shared()
        del x
        until(lambda: context.memory_warm == 0)
        assert _shared() < resident - 60 * MIB

    run_threads(body, 1)


def test_memory_that_is_taken_again_soon_keeps_its_pages() -> None:
    def body(group: ProcessGroup) -> None:
        # Two seconds may pass on a loaded machine between two lines, but not ten times.
        for _ in range(10):
            x = group.empty(8 * MIB, dtype=torch.uint8).fill_(7)
            del x
            y = group.empty(8 * MIB, dtype=torch.uint8)
            if y.eq(7).all():
                return
            del y
        raise AssertionError("every time new pages")

    run_threads(body, 1)


def test_what_is_given_back_and_taken_again_is_nobody_elses() -> None:
    def body(group: ProcessGroup) -> None:
        context = group._backend._context  # type: ignore[union-attr]
        choose = random.Random(group.rank)
        before = in_use(group)
        kept: list[tuple[int, torch.Tensor]] = []
        x: torch.Tensor | None = None
        for step in range(100):
            if kept and choose.random() < 0.5:
                mark, x = kept.pop(choose.randrange(len(kept)))
                assert x.eq(mark).all()
            else:
                kept.append((step, group.empty(choose.randrange(1, MIB), dtype=torch.uint8).fill_(step)))
            if choose.random() < 0.2:
                context.trim()
                assert context.memory_warm == 0
            x = None
        kept.clear()
        assert in_use(group) == before
        # What peers have mapped reads zeros or what is written next, whoever gave it back.
        context.trim()
        y = group.empty(MIB).fill_(group.rank + 1.0)
        group.all_reduce(y).wait()
        assert y.eq(sum(range(1, group.size + 1))).all()

    run_threads(body, 2, transport="shm")
