"""What nobody reads is bounded: messages by a window for each peer, groups by their members' goodbyes."""

from __future__ import annotations

from typing import Any

import psutil
import pytest
import torch

from shoal import ProcessGroup
from shoal.future import wait_all
from shoal.testing import run_threads
from tests.support.waiting import until

PATIENCE = 60.0
WINDOW = 8 << 20
LENGTH = 50_000  # elements, 200 KB
NUMBERS = torch.arange(LENGTH + 1000, dtype=torch.float32)

TRANSPORTS = pytest.mark.parametrize("transport", ["shm", "tcp"])


def held(group: ProcessGroup) -> tuple[int, int, int, int]:
    backend: Any = group._backend
    return tuple(backend.held())  # type: ignore[return-value]


def meet(group: ProcessGroup) -> None:
    """Everything that the others sent before has arrived; in shared memory a barrier would not say that."""
    others = [rank for rank in range(group.size) if rank != group.rank]
    sends = [group.send(NUMBERS[:1], rank, tag=99) for rank in others]
    wait_all([group.recv(None, rank, tag=99) for rank in others])
    wait_all(sends)


def resident() -> int:
    return int(psutil.Process().memory_info().rss)


@TRANSPORTS
def test_a_sender_waits_for_a_peer_that_does_not_read(transport: str) -> None:
    count = 1000

    def flood(group: ProcessGroup) -> None:
        group.barrier().wait()
        before = resident()
        sends = []
        if group.rank == 0:
            sends = [group.send(NUMBERS[i : i + LENGTH], 1, tag=3) for i in range(count)]
        meet(group)  # these messages pass those that wait
        if group.rank == 0:
            fitting = WINDOW // (4 * LENGTH)
            # On a loaded machine, the thread that completes them may be late.
            until(lambda: sum(future.done() for future in sends) >= fitting - 2)
            assert sum(future.done() for future in sends) <= fitting
        assert resident() - before < WINDOW + (64 << 20)  # without a window, it would be 200 MB
        group.barrier().wait()
        if group.rank == 1:
            for i in range(count):
                assert group.recv(None, 0, tag=3).wait()[0] == i
        wait_all(sends)
        meet(group)
        assert held(group)[1] == 0
        assert held(group)[3] <= WINDOW // 2  # the rest was given back

    run_threads(flood, 2, transport=transport, timeout=PATIENCE)


@TRANSPORTS
def test_empty_messages_are_bounded_as_well(transport: str) -> None:
    full, count = WINDOW // (4 * LENGTH), 1000  # at 256 bytes each, more than the rest of the window

    def flood(group: ProcessGroup) -> None:
        sends = []
        if group.rank == 0:
            wait_all([group.send(NUMBERS[:LENGTH], 1, tag=1) for _ in range(full)])
            sends = [group.send(NUMBERS[:0], 1) for _ in range(count)]
        meet(group)
        assert not sends or (sends[0].done() and not sends[-1].done())
        group.barrier().wait()
        if group.rank == 1:
            for _ in range(count):
                assert group.recv(None, 0).wait().shape == (0,)
        wait_all(sends)

    run_threads(flood, 2, transport=transport, timeout=PATIENCE)


@TRANSPORTS
def test_what_a_closed_group_leaves_unread_frees_its_part_of_the_window(transport: str) -> None:
    def leave(group: ProcessGroup) -> None:
        for _ in range(20):  # 40 MB, of which nothing is read
            with group.subgroup([0, 1]) as inner:
                if inner.rank == 0:
                    wait_all([inner.send(NUMBERS[:LENGTH], 1, tag=i) for i in range(10)])
                inner.barrier().wait()
        meet(group)
        assert held(group)[1] == 0
        assert held(group)[3] <= WINDOW // 2

    run_threads(leave, 2, transport=transport, timeout=PATIENCE)


@TRANSPORTS
def test_nothing_is_remembered_of_groups_that_all_have_closed(transport: str) -> None:
    def come_and_go(group: ProcessGroup) -> None:
        for i in range(150):
            inner = group.subgroup([0, 1] if i % 2 else [0, 1, 2]) if group.rank < 2 or i % 2 == 0 else None
            if inner is not None:
                if i % 5 == 0:
                    inner.abort("as a test")
                else:
                    inner.barrier()
                inner.close(PATIENCE)
        meet(group)
        assert held(group)[:3] == (1, 0, 0)

    run_threads(come_and_go, 3, transport=transport, timeout=PATIENCE)
