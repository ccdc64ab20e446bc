"""Object collectives: picklable objects of any and of different sizes."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from .both import both

by_size = pytest.mark.parametrize("size", [2, 4])


def thing(rank):
    """An object whose pickled length grows with the rank."""
    return {"rank": rank, "text": "x" * 1000 * rank, "none": None}


def all_gather_object(context):
    for group in both(context):
        objects = [None] * context.size
        dist.all_gather_object(objects, thing(context.rank), group=group)
        assert objects == [thing(rank) for rank in range(context.size)]


def gather_object(context):
    for group in both(context):
        for dst in range(context.size):
            objects = [None] * context.size if context.rank == dst else None
            if dst % 2:
                dist.gather_object(thing(context.rank), objects, dst, group=group)
            else:
                dist.gather_object(thing(context.rank), objects, group_dst=dst, group=group)
            if context.rank == dst:
                assert objects == [thing(rank) for rank in range(context.size)]


def broadcast_object_list(context):
    for group in both(context):
        for how in ({}, {"src": 1}, {"group_src": 1}, {"src": 1, "device": torch.device("cpu")}):
            root = 1 if how else 0
            objects = [thing(9), "text", None] if context.rank == root else [None] * 3
            dist.broadcast_object_list(objects, group=group, **how)
            assert objects == [thing(9), "text", None]


def scatter_object_list(context):
    for group in both(context):
        for how in ({}, {"src": 1}, {"group_src": 1}):
            root = 1 if how else 0
            objects = [thing(rank) for rank in range(context.size)] if context.rank == root else None
            out = [None]
            dist.scatter_object_list(out, objects, group=group, **how)
            assert out == [thing(context.rank)]


def send_object_list(context):
    last = context.size - 1
    for group in both(context):
        for batch in (False, True):
            for receive, send in (
                ({"src": 0}, {"dst": last}),
                ({"group_src": 0}, {"group_dst": last}),
                ({"src": 0, "device": torch.device("cpu")}, {"dst": last, "device": torch.device("cpu")}),
            ):
                if context.rank == 0:
                    dist.send_object_list([thing(3), 7], group=group, use_batch=batch, **send)
                elif context.rank == last:
                    objects = [None, None]
                    source = dist.recv_object_list(objects, group=group, use_batch=batch, **receive)
                    assert (source, objects) == (0, [thing(3), 7])


CASES = [all_gather_object, gather_object, broadcast_object_list, scatter_object_list, send_object_list]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
@by_size
def test_objects_arrive(ranks, size, case):
    ranks(size).run(case)


def in_a_subgroup(context):
    for backend in ("shoal", "gloo"):
        group = dist.new_group([1, 3], backend=backend)
        if context.rank in (1, 3):
            objects = [None, None]
            dist.all_gather_object(objects, context.rank, group=group)
            assert objects == [1, 3]
            objects = [context.rank]
            dist.broadcast_object_list(objects, src=3, group=group)
            assert objects == [3]
            dist.destroy_process_group(group)


def test_object_collectives_of_a_subgroup_take_global_ranks(ranks):
    ranks(4).run(in_a_subgroup)
