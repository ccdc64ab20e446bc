"""Groups of the functional API: who gets one, who is in it, how ranks translate."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch

import shoal
import shoal.distributed as dist

from .pool import Pool

SIZE = 4
ABSENT = dist.GroupMember.NON_GROUP_MEMBER


def _sum(pg: object) -> float:
    x = torch.full((1,), 10.0 ** dist.get_rank())
    dist.all_reduce(x, group=pg)
    return x.item()


def _made() -> object:
    rank, before = dist.get_rank(), dist.get_pg_count()
    pg = dist.new_group([2, 0], timeout=timedelta(seconds=7), backend="gloo", group_desc="even")
    again = dist.new_group([2, 0])
    local = dist.new_group([1], use_local_synchronization=True)
    everybody = dist.new_group()
    assert dist.get_pg_count() == before + 4
    assert everybody is not dist.group.WORLD
    assert _sum(everybody) == 1111.0
    if rank in (0, 2):
        assert isinstance(pg, shoal.ProcessGroup)
        assert pg is not again
        assert "even" in pg.name
        assert pg.timeout == 7.0
        assert _sum(pg) == _sum(again) == 101.0
        assert dist.get_process_group_ranks(pg) == [0, 2]
        assert dist.get_rank(pg) == dist.get_group_rank(pg, rank) == rank // 2
        assert dist.get_world_size(pg) == 2
        assert dist.get_global_rank(pg, 1) == 2
        with pytest.raises(shoal.UsageError, match="global_rank=1 is not among"):
            dist.get_group_rank(pg, 1)
        with pytest.raises(shoal.UsageError, match="group_rank must be from 0 to 1, got 2"):
            dist.get_global_rank(pg, 2)
        dist.destroy_process_group(pg)
        assert pg.state == "closed"
        assert _sum(again) == 101.0
    else:
        assert pg == again == ABSENT
        with pytest.raises(shoal.UsageError, match="not in the given group"):
            dist.get_backend(pg)
    assert (local is None) == (rank != 1)
    assert dist.get_process_group_ranks(None) == [0, 1, 2, 3]
    assert dist.get_group_rank(dist.group.WORLD, 3) == dist.get_global_rank(dist.group.WORLD, 3) == 3
    return rank, dist.get_world_size(), dist.get_node_local_rank(), dist.get_backend()


def test_a_new_group_is_for_its_members(ranks: Pool) -> None:
    assert ranks.run(_made) == [(rank, SIZE, rank, "gloo") for rank in range(SIZE)]


def _cut() -> object:
    rank = dist.get_rank()
    mine, all_of_them = dist.new_subgroups(2)
    assert [pg != ABSENT for pg in all_of_them] == [rank < 2, rank >= 2]
    odd, listed = dist.new_subgroups_by_enumeration([[3, 1], [0]])
    assert odd is None if rank == 2 else odd in listed
    half = dist.split_group(split_ranks=[[0, 3], [2, 1]], group_desc="halves", timeout=9)
    inner = dist.split_group(half, [[1]])  # ranks of the parent
    assert half.timeout == 9
    assert (inner is None) == (half.rank == 0)
    return _sum(mine), None if odd is None else _sum(odd), _sum(half), inner and list(inner.ranks)


def test_groups_are_cut_into_subgroups(ranks: Pool) -> None:
    assert ranks.run(_cut) == [
        (11.0, 1.0, 1001.0, None),
        (11.0, 1010.0, 110.0, None),
        (1100.0, None, 110.0, [2]),
        (1100.0, 1010.0, 1001.0, [3]),
    ]


def _refused() -> None:
    rank = dist.get_rank()
    with pytest.raises(shoal.UsageError, match=f"new_group on rank {rank}: ranks must be from 0 to 3, got 4"):
        dist.new_group([0, 4])
    with pytest.raises(shoal.UsageError, match="a rank is listed twice"):
        dist.new_group([0, 0])
    with pytest.raises(shoal.UnsupportedOperation, match="ucc"):
        dist.new_group(backend="ucc")
    with pytest.raises(shoal.UsageError, match="pg_options"):
        dist.new_group(pg_options=3)
    own = dist.new_group(pg_options={"concurrency": 2, "transport": "tcp"})
    assert own._spec.tuning.concurrency == 2
    assert own._backend is not dist.group.WORLD._backend
    assert own.all_reduce(torch.ones(1)).wait().item() == own.size
    own.close()
    with pytest.raises(shoal.UnsupportedOperation, match="device_id"):
        dist.new_group(device_id=torch.device("cuda", 0))
    for size in (None, 0, 3, 8):
        with pytest.raises(shoal.UsageError, match="group_size must divide the size of the group, 4"):
            dist.new_subgroups(size)
    with pytest.raises(shoal.UsageError, match="at least one list"):
        dist.new_subgroups_by_enumeration([])
    with pytest.raises(shoal.UsageError, match="a rank is listed twice"):
        dist.new_subgroups_by_enumeration([[0, 1], [1]])
    with pytest.raises(shoal.UsageError, match="must be non-empty lists of ranks"):
        dist.split_group(split_ranks=[[0], []])
    with pytest.raises(shoal.UsageError, match="this rank is not a member of the group"):
        dist.get_process_group_ranks(ABSENT)
    assert _sum(None) == 1111.0


def test_groups_that_make_no_sense_are_refused(ranks: Pool) -> None:
    ranks.run(_refused)
