"""Messages: tags, any source, batches, and what two ranks at odds see."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import shoal

from .both import both, layouts
from .values import DTYPES, assert_same, value

by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
by_size = pytest.mark.parametrize("size", [2, 4])


def around(context, dtype):
    """Everybody sends to the next rank, the even ones first."""
    size, rank = context.size, context.rank
    after, before = (rank + 1) % size, (rank - 1) % size
    for group in both(context):  # Gloo sends messages of any dtype
        for shape in ((3, 5), (), (2, 0)):
            for layout in layouts(context, group):
                x, out = layout(value(rank, dtype, shape)), layout(torch.zeros(shape).to(dtype))
                if rank % 2:
                    assert dist.recv(out, before, group=group) == before
                    dist.send(x, group_dst=after, group=group)
                else:
                    dist.send(x, after, group=group)
                    assert dist.recv(out, group_src=before, group=group) in (before, None)
                assert_same(out, value(before, dtype, shape))


@by_dtype
@by_size
def test_send_and_recv(ranks, size, dtype):
    ranks(size).run(around, dtype)


def tags(context):
    for group in both(context):
        if context.rank == 0:
            works = [dist.isend(torch.full((2,), float(tag)), 1, group=group, tag=tag) for tag in (5, 7, 9)]
        elif context.rank == 1:
            outs = {tag: torch.zeros(2) for tag in (9, 5, 7)}
            works = [dist.irecv(out, 0, group=group, tag=tag) for tag, out in outs.items()]
        else:
            works = []
        for work in works:
            work.wait()
        if context.rank == 1:
            assert {tag: out.tolist() for tag, out in outs.items()} == {t: [t, t] for t in (9, 5, 7)}


@by_size
def test_tags_tell_messages_apart_in_any_order(ranks, size):
    ranks(size).run(tags)


def in_order(context):
    for group in both(context):
        if context.rank == 0:
            for work in [dist.isend(torch.tensor([i]), 1, group=group) for i in range(50)]:
                work.wait()
        else:
            outs = [torch.zeros(1, dtype=torch.int64) for _ in range(50)]
            for work in [dist.irecv(out, 0, group=group) for out in outs]:
                work.wait()
            assert torch.cat(outs).tolist() == list(range(50))


def test_messages_of_one_tag_stay_in_order(ranks):
    ranks(2).run(in_order)


def any_source(context):
    size, rank = context.size, context.rank
    for group in both(context):
        if rank:
            dist.send(torch.full((2,), rank), 0, group=group, tag=4)
        else:
            senders = []
            for _ in range(1, size):
                out = torch.zeros(2, dtype=torch.int64)
                senders.append(dist.recv(out, group=group, tag=4))
                assert out.tolist() == [senders[-1]] * 2
            assert sorted(senders) == list(range(1, size))
        dist.barrier(group=group)
        if rank == size - 1:
            dist.send(torch.ones(1), 0, group=group)
        elif rank == 0:
            work = dist.irecv(torch.zeros(1), group=group)
            work.wait()
            assert work._source_rank() == size - 1
    backend = context.group._get_backend(torch.device("cpu"))
    if rank == size - 1:
        backend.send([torch.ones(1)], 0, 5).wait()
    elif rank == 0:
        work = backend.recv([torch.zeros(1)], -1, 5)
        work.wait()
        assert work.source_rank() == size - 1
    with pytest.raises(shoal.UsageError, match="only a receive has a source"):
        dist.all_reduce(torch.ones(1), group=context.group, async_op=True).source_rank()


@by_size
def test_a_receiver_from_anybody_learns_who_sent(ranks, size):
    ranks(size).run(any_source)


def batch(context, dtype):
    size, rank = context.size, context.rank
    after, before = (rank + 1) % size, (rank - 1) % size
    for group in both(context):
        outs = [torch.zeros(4).to(dtype) for _ in range(2)]
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, value(rank, dtype, (4,)), after, group=group),
                dist.P2POp(dist.irecv, outs[0], before, group=group),
                dist.P2POp(
                    dist.isend, value(rank, dtype, (4,), seed=1), group=group, group_peer=after, tag=1
                ),
                dist.P2POp(dist.irecv, outs[1], group=group, group_peer=before, tag=1),
            ]
        )
        for work in works:
            work.wait()
        for seed, out in enumerate(outs):
            assert_same(out, value(before, dtype, (4,), seed=seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn, torch.complex64])
@by_size
def test_a_batch_of_messages_around_a_ring(ranks, size, dtype):
    ranks(size).run(batch, dtype)


def large(context):
    """Both send first: larger messages than any buffer holds."""
    other = 1 - context.rank
    for group in both(context):
        x, out = value(context.rank, torch.float32, (3_000_001,)), torch.zeros(3_000_001)
        works = [dist.isend(x, other, group=group), dist.irecv(out, other, group=group)]
        for work in works:
            work.wait()
        assert_same(out, value(other, torch.float32, (3_000_001,)))


def test_two_ranks_exchange_large_messages(ranks):
    ranks(2).run(large)


def subgroup(context):
    for backend in ("shoal", "gloo"):
        group = dist.new_group([1, 3], backend=backend)
        if context.rank == 1:
            dist.send(torch.tensor([5]), 3, group=group)
            dist.send(torch.tensor([6]), group_dst=1, group=group)
        elif context.rank == 3:
            x = torch.zeros(1, dtype=torch.int64)
            assert dist.recv(x, 1, group=group) == 1
            assert x.item() == 5
            assert dist.recv(x, group=group) == 1
            assert x.item() == 6
        if context.rank in (1, 3):
            dist.destroy_process_group(group)


def test_messages_in_a_subgroup_take_and_give_global_ranks(ranks):
    ranks(4).run(subgroup)


def wrong(context):
    x = torch.zeros(2)
    with pytest.raises(ValueError, match="rank"):
        dist.send(x, context.rank)
    with pytest.raises(ValueError, match="rank"):
        dist.send(x, 17)
    dist.barrier()


def test_a_message_to_itself_or_to_nobody_is_refused(ranks):
    ranks(2).run(wrong)
