"""Groups made from the default one, and device meshes of them."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import shoal
from shoal.compat import TorchProcessGroup
from shoal.testing import no_leaks

from ..support import releases
from .pool import Pool
from .values import assert_same


def total(group=None):
    """The members' global ranks, as an all-reduce over the group gives them: bit r is rank r."""
    x = torch.tensor([1 << dist.get_rank()])
    dist.all_reduce(x, group=group)
    return x.item()


def bits(ranks):
    return sum(1 << rank for rank in ranks)


def identity(context):
    group = context.group
    assert dist.get_backend() == "shoal"
    assert dist.get_backend(context.gloo) == "gloo"
    assert (dist.get_rank(), dist.get_world_size()) == (context.rank, context.size)
    assert isinstance(group, TorchProcessGroup)
    assert isinstance(group, dist.ProcessGroup)
    assert isinstance(group.group, shoal.ProcessGroup)
    assert (group.group.rank, group.group.size) == (context.rank, context.size)
    assert dist.get_process_group_ranks(group) == list(range(context.size))
    assert group.rank() == context.rank
    assert group.size() == context.size
    assert group.name() == "shoal"
    assert group.group_name
    assert group.group_desc == "default_pg"
    assert "shoal" in dist.Backend.backend_list
    assert dist.is_backend_available("shoal")
    # The store's keys are for everybody in the group.
    store = group.get_group_store()
    store.set(f"identity/{context.scratch.name}/{context.rank}", b"x")
    store.wait([f"identity/{context.scratch.name}/{rank}" for rank in range(context.size)])


@pytest.mark.parametrize("size", [2, 4])
def test_a_group_knows_who_it_is(ranks, size):
    ranks(size).run(identity)


def new_group(context, members, options):
    rank = context.rank
    group = dist.new_group(members, **options)
    expected = members if options.get("sort_ranks") is False else sorted(members)
    if rank not in members:
        assert group in (dist.GroupMember.NON_GROUP_MEMBER, None)
        assert dist.get_rank(group) in (-1, rank)
        with pytest.warns(UserWarning, match="does not belong to"):
            dist.all_reduce(torch.ones(1), group=dist.GroupMember.NON_GROUP_MEMBER)
        dist.barrier()
        return
    assert dist.get_backend(group) == options.get("backend", "shoal")
    assert dist.get_process_group_ranks(group) == expected
    assert dist.get_rank(group) == expected.index(rank)
    assert dist.get_world_size(group) == len(members)
    assert dist.get_group_rank(group, rank) == expected.index(rank)
    assert dist.get_global_rank(group, expected.index(rank)) == rank
    assert total(group) == bits(members)
    x = torch.tensor([rank])
    dist.broadcast(x, src=expected[-1], group=group)
    assert x.item() == expected[-1]
    x = torch.tensor([rank])
    dist.broadcast(x, group_src=0, group=group)
    assert x.item() == expected[0]
    order = [torch.zeros(1, dtype=torch.int64) for _ in members]
    dist.all_gather(order, torch.tensor([rank]), group=group)
    assert [x.item() for x in order] == expected
    dist.destroy_process_group(group)
    with pytest.raises((ValueError, RuntimeError)):
        dist.all_reduce(x, group=group)
    dist.barrier()


@pytest.mark.parametrize(
    ("members", "options"),
    [
        ([0, 1, 2, 3], {}),
        ([1, 3], {}),
        ([3, 0], {}),
        pytest.param(
            [3, 0, 1],
            {"sort_ranks": False},
            marks=pytest.mark.skipif(not releases.SORT_RANKS, reason="new_group has no sort_ranks"),
        ),
        ([2], {}),
        ([1, 2], {"backend": "shoal", "group_desc": "some"}),
        ([1, 2], {"backend": "cpu:shoal"}),
        ([0, 3], {"pg_options": {"concurrency": 2}}),
    ],
)
def test_new_group(ranks, members, options):
    ranks(4).run(new_group, members, options)


def local(context):
    """Members alone make a group; torch's names of later groups then differ from rank to rank."""
    for _ in range(2):
        if context.rank in (0, 2):
            pair = dist.new_group([0, 2], use_local_synchronization=True)
            assert total(pair) == bits([0, 2])
    for members in ([0, 1, 2, 3], [1, 2, 3], [0, 1], [2, 0]):
        group = dist.new_group(members)
        if context.rank in members:
            assert total(group) == bits(members)
            dist.destroy_process_group(group)
    half, everybody = dist.new_subgroups(2)
    assert total(half) == bits(dist.get_process_group_ranks(everybody[context.rank // 2]))
    mine = [0, 2] if context.rank in (0, 2) else [1, 3]
    assert total(dist.new_group(mine, use_local_synchronization=True)) == bits(mine)
    if context.rank in (0, 2):
        assert total(pair) == bits([0, 2])
    assert total() == 15


def test_groups_after_one_that_only_its_members_make():
    # Groups of Gloo, which find each other by torch's names, cannot be made in this job any more.
    with Pool(4) as pool:
        pool.run(local)


def options_of_gloo(context):
    group = dist.new_group([1, 0], pg_options=dist.ProcessGroupGloo._Options())
    assert total(group) == bits([0, 1])
    dist.destroy_process_group(group)


def test_options_of_another_backend_are_let_be(ranks):
    ranks(2).run(options_of_gloo)


def a_hundred(context):
    """Groups come and go, some at a time, named alike or not."""
    for round_ in range(10):
        groups = [dist.new_group([r for r in range(4) if r != number % 4]) for number in range(10)]
        for number, group in enumerate(groups):
            if context.rank != number % 4:
                assert total(group) == 15 - (1 << number % 4)
        for group in reversed(groups) if round_ % 2 else groups:
            dist.destroy_process_group(group)
    assert total() == 15


def test_a_hundred_groups_come_and_go(ranks):
    ranks(4).run(a_hundred)


def come_and_go(context):
    def once():
        group = dist.new_group()
        dist.all_reduce(torch.ones(3), group=group, async_op=True).get_future().wait()
        dist.destroy_process_group(group)

    once()
    with no_leaks():
        for _ in range(10):
            once()


def test_nothing_is_left_of_destroyed_groups(ranks):
    ranks(2).run(come_and_go)


def subgroups(context):
    mine, everybody = dist.new_subgroups(2)
    pair = [context.rank & 2, context.rank | 1]
    assert dist.get_process_group_ranks(mine) == pair
    assert len(everybody) == 2
    assert total(mine) == bits(pair)
    dist.destroy_process_group(mine)
    mine, everybody = dist.new_subgroups_by_enumeration([[0, 3], [2, 1]])
    pair = [0, 3] if context.rank in (0, 3) else [1, 2]
    assert dist.get_process_group_ranks(mine) == pair
    assert total(mine) == bits(pair)
    dist.destroy_process_group(mine)
    dist.barrier()


def test_new_subgroups(ranks):
    ranks(4).run(subgroups)


def split(context):
    """dist.split_group wants an accelerator; the group's own method does not."""
    pair = [0, 2] if context.rank in (0, 2) else [1, 3]
    group = context.group.split_group(pair, group_name=f"half {pair}", group_desc="half")
    assert group.size() == 2
    assert (group.group_name, group.group_desc) == (f"half {pair}", "half")
    x = torch.tensor([1 << context.rank])
    group.allreduce([x]).wait()
    assert x.item() == bits(pair)
    group.shutdown()
    alone = context.group.split_group([1], group_name="alone")
    assert (alone is None) == (context.rank != 1)
    if alone is not None:
        alone.shutdown()
    dist.barrier()


def test_split_group(ranks):
    ranks(4).run(split)


def mixed(context):
    """Groups of both backends under one default group."""
    for backend in ("gloo", "shoal", "gloo"):
        group = dist.new_group([0, 1], backend=backend)
        if context.rank < 2:
            assert dist.get_backend(group) == backend
            assert total(group) == 3
            dist.destroy_process_group(group)


def test_groups_of_gloo_beside_groups_of_shoal(ranks):
    ranks(4).run(mixed)


def mesh_of_one(context):
    mesh = dist.init_device_mesh("cpu", (context.size,))
    assert total(mesh.get_group()) == bits(range(context.size))
    assert mesh.get_local_rank() == context.rank
    assert mesh.get_group() is context.group or mesh.get_group().size() == context.size


@pytest.mark.parametrize("size", [2, 4])
def test_a_mesh_of_one_dimension(ranks, size):
    ranks(size).run(mesh_of_one)


def mesh_of_two(context):
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    rank = context.rank
    column, row = [rank % 2, rank % 2 + 2], [rank & 2, rank | 1]
    for group, members in (
        (mesh.get_group("outer"), column),
        (mesh.get_group(1), row),
        (mesh["inner"].get_group(), row),
        (mesh["outer"].get_group(), column),
    ):
        assert dist.get_process_group_ranks(group) == members
        assert dist.get_backend(group) == "shoal"
        assert total(group) == bits(members)
    assert list(mesh.get_coordinate()) == [rank // 2, rank % 2]
    flat = mesh["outer", "inner"]._flatten("all")
    assert total(flat.get_group()) == 15
    partly = dist.DeviceMesh.from_group(mesh.get_group("inner"), "cpu")
    assert total(partly.get_group()) == bits(row)


def test_a_mesh_of_two_dimensions_sliced_and_flattened(ranks):
    ranks(4).run(mesh_of_two)


def own_memory(context):
    """Tensors of group.group.empty lie where all ranks of the host see them; they reduce without a copy."""
    x = context.group.group.empty(1000).fill_(1.0)
    dist.all_reduce(x)
    assert_same(x, torch.full((1000,), float(context.size)))


def test_tensors_in_the_groups_memory(ranks):
    ranks(2).run(own_memory)
