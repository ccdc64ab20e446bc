"""The barrier that names who is missing, on every rank that came."""

from __future__ import annotations

import threading

import pytest
import torch

from shoal.errors import GroupAborted, GroupError, OperationTimeout
from shoal.group import ProcessGroup
from shoal.testing import run_threads
from tests.support.topologies import TOPOLOGIES, topology_options

from .worlds import Worlds

PATIENCE = 20.0


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_all_pass_when_all_have_come(worlds: Worlds, size: int, topology: str) -> None:
    def meet(group: ProcessGroup) -> None:
        # Several in flight match in the order of the calls.
        barriers = [group.monitored_barrier() for _ in range(5)]
        for barrier in reversed(barriers):
            assert barrier.wait() is None

    worlds(size, **topology_options(topology, size)).run(meet)


def test_every_rank_that_came_learns_who_did_not() -> None:
    reported, here = threading.Barrier(4), threading.Barrier(2)

    def meet(group: ProcessGroup) -> None:
        if group.rank in (1, 3):
            reported.wait(PATIENCE)
            with pytest.raises(GroupAborted, match=r"ranks 1, 3 did not come within 5 s"):
                group.recv(None, 0).wait()
            return
        here.wait(PATIENCE)  # or rank 2 might be late, too
        with pytest.raises(OperationTimeout, match=r"ranks 1, 3 did not come within 5 s") as caught:
            group.monitored_barrier(timeout=5.0).wait()
        assert caught.value.ranks == (1, 3)
        assert group.state == "aborted"
        reported.wait(PATIENCE)

    run_threads(meet, 4, timeout=60)


def test_the_absence_of_rank_0_is_reported_too() -> None:
    reported = threading.Event()

    def meet(group: ProcessGroup) -> None:
        if group.rank == 0:
            assert reported.wait(PATIENCE)
            with pytest.raises(GroupError):
                group.barrier().wait()
            return
        with pytest.raises(OperationTimeout, match=r"rank 0 did not come within 0\.1 s") as caught:
            group.monitored_barrier(timeout=0.1).wait()
        assert caught.value.ranks == (0,)
        reported.set()

    run_threads(meet, 2, timeout=60)


def test_an_early_rank_waits_for_the_answer_of_a_late_rank_0() -> None:
    early = threading.Event()

    def meet(group: ProcessGroup) -> None:
        if group.rank == 0:
            assert early.wait(PATIENCE)
        barrier = group.monitored_barrier(timeout=5)
        early.set()
        barrier.wait()
        assert group.all_reduce(torch.ones(1)).wait().item() == 2.0

    run_threads(meet, 2, timeout=60)
