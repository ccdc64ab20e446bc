"""Groups made from groups: who is in them, in which order, and that they are independent."""

from __future__ import annotations

import pytest
import torch

from shoal.errors import GroupAborted, GroupClosed, StoreTimeout, UsageError
from shoal.group import ProcessGroup
from shoal.testing import run_threads
from tests.support.topologies import TOPOLOGIES, topology_options

from .null_backend import NullBackend, null_group
from .worlds import Worlds


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_split_makes_one_group_for_each_color(worlds: Worlds, topology: str) -> None:
    def rows_and_columns(group: ProcessGroup) -> None:
        with group.split(group.rank // 2) as row, group.split(group.rank % 2, key=-group.rank) as column:
            assert row.ranks == ((0, 1) if group.rank < 2 else (2, 3))
            assert column.ranks == ((2, 0) if group.rank % 2 == 0 else (3, 1))
            assert (row.rank, column.rank) == (group.rank % 2, 1 - group.rank // 2)
            assert row.all_gather(torch.tensor(group.rank)).wait() == [torch.tensor(r) for r in row.ranks]
            assert column.all_reduce(torch.tensor(group.rank)).wait() == sum(column.ranks)
            with row.split(0, key=-row.rank) as nested:
                assert nested.ranks == row.ranks[::-1]
                assert nested.broadcast(torch.tensor(group.rank), root=1).wait() == nested.ranks[1]
        assert row.state == column.state == "closed"
        assert group.state == "open"

    worlds(4, **topology_options(topology, 4)).run(rows_and_columns)


def test_a_rank_without_a_color_is_in_no_group(worlds: Worlds) -> None:
    def some(group: ProcessGroup) -> None:
        part = group.split(None if group.rank == 1 else 7)
        assert (part is None) == (group.rank == 1)
        if part is not None:
            assert part.ranks == (0, 2)
            part.close()

    worlds(3).run(some)


def test_names_and_identities_are_equal_on_members_and_never_repeat(worlds: Worlds) -> None:
    def names(group: ProcessGroup) -> list[tuple[str, int]]:
        made = [group.split(0), group.split(0), group.split(group.rank)]
        made += [group.subgroup(range(3)) for _ in range(2)] + [group.subgroup([2, 0, 1], name="tp")]
        found = [(part.name, part._spec.ident) for part in made]
        for part in made:
            part.close()
        return found

    results = worlds(3).run(names)
    for i in (0, 1, 3, 4, 5):
        assert results[0][i] == results[1][i] == results[2][i]
    assert "tp" in results[0][5][0]
    everything = {pair for found in results for pair in found}
    assert len(everything) == len({ident for _, ident in everything}) == 5 + 3


def test_a_subgroup_follows_the_order_of_its_ranks() -> None:
    group, _ = null_group(rank=2)
    part = group.subgroup([3, 2])
    assert (part.rank, part.ranks, part.size) == (1, (3, 2), 2)
    nested = part.subgroup([1])
    assert nested.ranks == (2,)
    group.world.close(1.0)


def test_a_subgroup_has_the_timeout_of_its_parent_or_its_own() -> None:
    group, _ = null_group(rank=3)
    plain, own = group.subgroup([3]), group.subgroup([3, 2], timeout=7)
    nested = own.subgroup([0])
    assert (plain.timeout, own.timeout, nested.timeout) == (group.timeout, 7.0, 7.0)
    with pytest.raises(UsageError, match="positive number of seconds"):
        group.subgroup([3], timeout=0)
    group.world.close(1.0)


def test_members_make_subgroups_without_the_others(worlds: Worlds) -> None:
    def pairs(group: ProcessGroup) -> None:
        if group.rank == 2:
            return
        with group.subgroup([1, 0]) as pair:
            assert pair.rank == 1 - group.rank
            assert pair.all_reduce(torch.ones(1)).wait().item() == 2.0

    worlds(3).run(pairs)


def test_each_group_has_keys_of_its_own_in_the_store(worlds: Worlds) -> None:
    def keys(group: ProcessGroup) -> None:
        with group.split(group.rank) as mine:
            mine.store.set("key", str(group.rank))
            group.barrier().wait()
            assert mine.store.get("key") == str(group.rank).encode()
            with pytest.raises(StoreTimeout):
                group.store.get("key", timeout=0.001)

    worlds(2).run(keys)


def test_the_world_closes_the_newest_group_first_and_the_connections_last() -> None:
    order: list[str] = []
    group, _ = null_group(owner=lambda seconds: order.append("connections"))
    backend = group._backend
    assert isinstance(backend, NullBackend)
    child = group.subgroup([1, 2])
    grandchild = child.subgroup([0])
    for made, name in zip(backend.channels, ("first", "child", "grandchild"), strict=True):
        made.close = lambda timeout, name=name: order.append(name)  # type: ignore[method-assign]
    group.world.close(5.0)
    assert order == ["grandchild", "child", "first", "connections"]
    assert child.state == grandchild.state == group.state == "closed"
    with pytest.raises(GroupClosed):
        child.barrier()


def test_closing_a_group_leaves_its_parent_and_its_children_open() -> None:
    group, _ = null_group()
    child = group.subgroup([1, 2])
    grandchild = child.subgroup([0])
    child.close()
    assert (group.state, child.state, grandchild.state) == ("open", "closed", "open")
    group.world.close(1.0)


def test_aborting_a_group_leaves_the_others_working() -> None:
    def abort_one(group: ProcessGroup) -> None:
        part = group.split(0)
        assert part is not None
        if group.rank == 0:
            part.abort("only this one")
        with pytest.raises(GroupAborted, match="only this one"):
            part.recv(None, 1 - group.rank).wait()
        assert part.state == "aborted"
        part.close()
        assert group.all_reduce(torch.ones(1)).wait().item() == 2.0

    run_threads(abort_one, 2, timeout=30)
