"""A rank that stood still and was given up by one of the others goes on while a third one still waits for it.

The third one was stopped itself, so it does not trust its own look at the others.  What one rank has seen
counts for all: the rank that stood still goes, and no other.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import time

import psutil
import pytest
import torch

from shoal import Evicted, PeerLost, ProcessGroup
from shoal.errors import StoreTimeout
from shoal.testing import Ranks, no_leaks, processes

from .ranks import PATIENCE


def outlive(group: ProcessGroup) -> tuple[int, int, tuple[int, ...]] | str:
    """Work until a rank is given up, go on with the others, and tell where."""
    x = torch.ones(1000)
    for _ in range(10):
        group.all_reduce(x).wait()
    group.store.set(f"ready/{group.rank}", b"")
    try:
        while True:
            group.all_reduce(x.fill_(1)).wait()
    except PeerLost:
        group.store.set(f"lost/{group.rank}", b"")
    try:
        new = group.rebuild(timeout=PATIENCE)
    except Evicted:
        return "evicted"
    assert new is not None
    assert new.rebuilt is not None
    assert new.all_reduce(x.fill_(1)).wait().eq(new.size).all()
    new.close()
    return new.rank, new.size, new.rebuilt.lost


def stop(ranks: Ranks, *which: int) -> None:
    for rank in which:
        ranks.stop(rank)
    for rank in which:
        while psutil.Process(ranks.pids[rank]).status() != psutil.STATUS_STOPPED:
            time.sleep(0.001)


def given_up_and_continued(ranks: Ranks, still: int, sees: int, excused: int | None = None) -> None:
    """Rank ``still`` is stopped until ``sees`` has given it up, and goes on at once; it is who goes."""
    ranks.store.wait([f"ready/{rank}" for rank in range(3)], PATIENCE)
    stop(ranks, *(rank for rank in (still, excused) if rank is not None))
    if excused is not None:
        time.sleep(0.15)  # what is tested is that it was stopped itself
        ranks.resume(excused)
    with contextlib.suppress(StoreTimeout):  # the outcomes say more
        ranks.store.wait([f"lost/{sees}"], PATIENCE)
    with contextlib.suppress(ProcessLookupError):  # the others have ended it already
        os.kill(ranks.pids[still], signal.SIGCONT)
    outcomes = ranks.join()
    goes = outcomes.pop(still)
    assert goes.exitcode == -signal.SIGKILL or goes.value == "evicted", goes.describe()
    for each in outcomes:
        assert each.ok, each.describe()
        assert each.value[1:] == (2, (still,))


@pytest.mark.parametrize(("still", "excused", "sees"), [*itertools.permutations(range(3))])
def test_a_rank_that_one_of_the_others_has_given_up_is_the_one_that_goes(
    still: int, excused: int, sees: int
) -> None:
    with no_leaks(), processes(outlive, 3, timeout=PATIENCE) as ranks:
        given_up_and_continued(ranks, still, sees, excused)


@pytest.mark.parametrize("hosts", ["abb", "bba"])
def test_also_where_the_third_rank_is_on_another_host(hosts: str) -> None:
    still, sees = (rank for rank in range(3) if hosts[rank] == "b")
    with (
        no_leaks(),
        processes(outlive, 3, hosts=list(hosts), timeout=PATIENCE, heartbeat_timeout=PATIENCE) as ranks,
    ):
        given_up_and_continued(ranks, still, sees)
