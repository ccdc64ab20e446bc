"""Shared memory of groups that failed comes back once nobody can write to it any more, and not before."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from typing import Any

import pytest
import torch

from shoal import GroupError, PeerLost, ProcessGroup
from shoal.testing import processes, run_threads
from tests.support.waiting import until

from .ranks import PATIENCE, begin

MIB = 2**20


def in_use(group: ProcessGroup) -> int:
    """Bytes of shared memory that this rank has taken."""
    used: int = group._backend._context.memory_in_use  # type: ignore[union-attr]
    return used


def unused(group: ProcessGroup) -> int:
    """The same once tensors are gone that frames of an error hold.  Nothing, if another thread collects."""
    gc.collect()
    return in_use(group)


def works(group: ProcessGroup) -> None:
    x = group.empty(300_000).fill_(group.rank + 1.0)
    group.all_reduce(x).wait()
    assert x.eq(sum(range(1, group.size + 1))).all()
    group.all_reduce(x.clone()).wait()  # staged


def reduce_until_it_fails(group: ProcessGroup, operand: torch.Tensor) -> None:
    while True:
        group.all_reduce(operand).wait()


def test_memory_of_an_aborted_group_comes_back_when_all_have_closed_it() -> None:
    seen = [threading.Event() for _ in range(3)]  # in each round: rank 0 has looked, and rank 2 may close

    def rank(group: ProcessGroup) -> None:
        group.barrier().wait()
        before = in_use(group)
        for looked in seen:
            part = group.split(0)
            assert part is not None
            mine, operand = part.empty(4 * MIB, dtype=torch.uint8), group.empty(4 * MIB, dtype=torch.uint8)
            works(part)
            if group.rank == 1:
                part.abort("on purpose")
            with pytest.raises(GroupError, match="on purpose"):
                reduce_until_it_fails(part, operand)
            del mine, operand
            if group.rank == 2:
                assert looked.wait(PATIENCE)
            part.close()
            if group.rank == 0:  # rank 2 may still write to it
                time.sleep(0.05)
                assert in_use(group) - before > 4 * MIB
                looked.set()
            until(lambda: unused(group) == before, lambda: in_use(group) - before)
            group.barrier().wait()

    run_threads(rank, 3, timeout=PATIENCE, transport="shm")


def outlive(group: ProcessGroup) -> None:
    """Ranks die one after another, while the others hold more than the limit leaves room for twice."""
    while group.size > 2:
        works(group)
        bucket, operand = group.empty(10 * MIB, dtype=torch.uint8), group.empty(2 * MIB)
        begin(group)  # all are through works()
        if group.rank == group.size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(PeerLost):
            reduce_until_it_fails(group, operand)
        del bucket, operand
        older = group
        new = group.rebuild()
        assert new is not None
        group = new
        works(group)
        until(lambda: unused(group) < 10 * MIB)  # noqa: B023
        assert older.state == "closed"
    group.close()


@pytest.mark.parametrize("how", [{}, {"transport": "tcp"}, {"hosts": "aaabb"}])
def test_memory_comes_back_after_each_death(how: dict[str, Any]) -> None:
    with processes(outlive, 5, shared_memory_limit=30 * MIB, timeout=PATIENCE, **how) as ranks:
        outcomes = ranks.join()
    assert all(each.ok for each in outcomes[:2]), [each.describe() for each in outcomes]
