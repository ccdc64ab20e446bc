"""The default group is made anew of the ranks that live."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
from torch import nn

import shoal
import shoal.distributed as dist
from shoal.testing import no_leaks, processes

from .pool import begin

PATIENCE = 60.0


def train(group: shoal.ProcessGroup, scratch: str) -> tuple[int, int, float]:
    """Rank 1 dies in a backward pass of the default group."""
    begin(group.rank, group.size, f"{scratch}/meeting")
    victim = dist.get_rank() == 1
    pair = dist.new_group([0, 2])
    torch.manual_seed(0)
    net = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model = shoal.DistributedDataParallel(net, group=dist.group.WORLD)
    step = lost = 0
    while step < 6:
        try:
            loss = model(torch.full((2, 4), float(step))).square().mean()
            if victim and step == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            loss.backward()
        except shoal.PeerLost:
            lost += 1
            dist.rebuild(min_size=2)
            optimizer.zero_grad()
            model = shoal.DistributedDataParallel(net, group=dist.group.WORLD)
            continue
        optimizer.step()
        optimizer.zero_grad()
        step += 1
    assert lost == 1
    dist.barrier(pair)  # it has no dead member
    rank, size = dist.get_rank(), dist.get_world_size()
    assert dist.get_process_group_ranks(dist.group.WORLD) == [0, 1]
    both = dist.new_group([1, 0])  # ranks of the new default group
    x = torch.tensor([float(rank)])
    dist.all_reduce(x, group=both)
    assert x.item() == 1.0
    if rank == 0:
        dist.send(x + 6, dst=1)
    else:
        assert dist.recv(x, src=0) == 0
        assert x.item() == 7.0
    dist.destroy_process_group()
    return rank, size, float(sum(each.sum() for each in net.parameters()))


def test_training_goes_on_after_a_death(tmp_path: Path) -> None:
    with no_leaks(), processes(train, 3, str(tmp_path), timeout=PATIENCE) as ranks:
        first, dead, last = ranks.join()
    assert not dead.ok
    assert [each.ok for each in (first, last)] == [True, True], [first.describe(), last.describe()]
    assert (first.value[:2], last.value[:2]) == ((0, 2), (1, 2))
    assert first.value[2] == last.value[2]


def leave(group: shoal.ProcessGroup, scratch: str) -> bool:
    begin(group.rank, group.size, f"{scratch}/meeting")
    dist.rebuild(leave=dist.get_rank() == 0)
    return dist.is_initialized() and dist.get_world_size() == 1


def test_a_rank_leaves(tmp_path: Path) -> None:
    with processes(leave, 2, str(tmp_path), timeout=PATIENCE) as ranks:
        assert [each.value for each in ranks.join()] == [False, True]


def without(group: shoal.ProcessGroup, scratch: str) -> int | None:
    begin(group.rank, group.size, f"{scratch}/meeting")
    dist.rebuild(without=[1], note=b"step %d" % group.rank, fence=False)
    if dist.is_initialized():
        assert dist.group.WORLD.rebuilt.notes == {0: b"step 0", 1: b"step 1", 2: b"step 2"}
    return dist.get_world_size() if dist.is_initialized() else None


def test_a_rank_that_lives_is_left_out(tmp_path: Path) -> None:
    with processes(without, 3, str(tmp_path), timeout=PATIENCE) as ranks:
        assert [each.value for each in ranks.join()] == [2, None, 2]


def test_there_must_be_a_default_group() -> None:
    with pytest.raises(shoal.UsageError, match="rebuild"):
        dist.rebuild()
