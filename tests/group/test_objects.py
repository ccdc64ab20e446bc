"""Objects of any kind and size, in any number at once."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch

from shoal.errors import UsageError
from shoal.future import wait_all
from shoal.group import ProcessGroup
from tests.support.topologies import TOPOLOGIES, topology_options

from .worlds import Worlds

SIZE = 3


def of(rank: int) -> Any:
    return {"rank": rank, "long": "x" * 10_000 * rank, "tensor": torch.arange(rank)}


def same(x: Any, y: Any) -> bool:
    return x["rank"] == y["rank"] and x["long"] == y["long"] and torch.equal(x["tensor"], y["tensor"])


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_objects_go_where_tensors_go(worlds: Worlds, topology: str) -> None:
    def exchange(group: ProcessGroup) -> None:
        rank = group.rank
        everybody = group.all_gather_object(of(rank)).wait()
        assert all(same(obj, of(i)) for i, obj in enumerate(everybody))
        gathered = group.gather_object(of(rank), root=1).wait()
        assert (gathered is None) == (rank != 1)
        assert gathered is None or all(same(obj, of(i)) for i, obj in enumerate(gathered))
        assert same(group.broadcast_object(of(2) if rank == 2 else None, root=2).wait(), of(2))
        objs = [of(i) for i in range(SIZE)] if rank == 0 else None
        assert same(group.scatter_object(objs).wait(), of(rank))
        if rank:
            group.send_object(of(rank), 0, tag=2).wait()
        else:
            arrived = wait_all([group.recv_object(tag=2) for _ in range(SIZE - 1)])
            assert sorted(obj["rank"] for obj in arrived) == [1, 2]

    worlds(SIZE, **topology_options(topology, SIZE)).run(exchange)


def test_a_group_of_one_exchanges_objects_with_itself(worlds: Worlds) -> None:
    def alone(group: ProcessGroup) -> None:
        assert group.all_gather_object("a").wait() == ["a"]
        assert group.gather_object("b").wait() == ["b"]
        assert group.broadcast_object("c").wait() == "c"
        assert group.scatter_object(["d"]).wait() == "d"

    worlds(1).run(alone)


@pytest.mark.concurrency
def test_object_operations_run_beside_others_without_order_between_them(worlds: Worlds) -> None:
    def crowd(group: ProcessGroup) -> None:
        gathered = [group.all_gather_object((group.rank, i)) for i in range(30)]
        sums = [group.all_reduce(torch.tensor([i])) for i in range(30)]
        chained = [future.then(lambda f: len(f.value())) for future in gathered]
        for i in range(30):
            assert sums[i].wait().item() == i * SIZE
            assert gathered[i].wait() == [(rank, i) for rank in range(SIZE)]
        assert wait_all(chained) == [SIZE] * 30

    worlds(SIZE).run(crowd)


def test_what_cannot_be_pickled_raises_at_the_call(worlds: Worlds) -> None:
    def attempt(group: ProcessGroup) -> None:
        with pytest.raises((pickle.PicklingError, AttributeError, TypeError)):
            group.all_gather_object(lambda: None)
        assert group.all_gather_object(group.rank).wait() == [0, 1]

    worlds(2).run(attempt)


class Unloadable:
    def __reduce__(self) -> Any:
        return int, ("not a number",)


def test_what_cannot_be_loaded_raises_where_it_is_loaded_and_leaves_the_group_usable(worlds: Worlds) -> None:
    def attempt(group: ProcessGroup) -> None:
        future = group.broadcast_object(Unloadable() if group.rank == 0 else None)
        if group.rank == 0:
            future.wait()
        else:
            with pytest.raises(ValueError, match="not a number"):
                future.wait()
        assert group.all_gather_object(group.rank).wait() == [0, 1]

    worlds(2).run(attempt)


def test_a_tensor_is_not_taken_for_an_object(worlds: Worlds) -> None:
    def exchange(group: ProcessGroup) -> None:
        if group.rank == 0:
            group.send(torch.ones(3), 1).wait()
        else:
            with pytest.raises(UsageError, match=r"torch.float32 and shape \(3,\) arrived, not an object"):
                group.recv_object(0).wait()

    worlds(2).run(exchange)
