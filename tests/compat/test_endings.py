"""How groups end, and what comes after them."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

from .pool import Pool


@pytest.fixture(scope="module")
def idle():
    """Two ranks without a default group."""
    with Pool(2, backend=None) as pool:
        yield pool


def begin(context, store):
    dist.init_process_group("shoal", store=store, rank=context.rank, world_size=context.size)
    x = torch.ones(3)
    dist.all_reduce(x)
    assert x.tolist() == [context.size] * 3


def after_its_store(context):
    file = context.scratch / "store"
    begin(context, dist.FileStore(str(file), context.size))
    dist.barrier()
    if context.rank == 0:
        os.remove(file)
    dist.barrier()
    dist.destroy_process_group()
    assert not file.exists()


def test_a_group_ends_after_its_store(idle):
    idle.run(after_its_store, limit=20)


def one_after_another(context):
    for _ in range(3):
        begin(context, dist.PrefixStore("same/place", context.store))
        dist.destroy_process_group()


def test_groups_follow_each_other_in_one_store(idle):
    idle.run(one_after_another)
