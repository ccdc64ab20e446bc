"""Messages in the functional API: by tag, from anybody, in batches, in groups."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch

import shoal
import shoal.distributed as dist

from .pool import Pool

SIZE = 4


def _around() -> list[float]:
    """Each rank sends to its right, by each of the ways."""
    rank = dist.get_rank()
    right, left = (rank + 1) % SIZE, (rank - 1) % SIZE
    mine, got = torch.full((2,), float(rank)), []

    x = torch.empty(2)
    if rank % 2:
        dist.send(mine, right)
        assert dist.recv(x, left) == left
    else:
        assert dist.recv(x, left) == left
        dist.send(mine, right)
    got.append(x[0].item())

    x = torch.empty(2)
    works = [dist.isend(mine, right, tag=7), dist.irecv(x, left, tag=7)]
    assert all(work.wait(timedelta(seconds=20)) for work in works)
    assert works[1].source_rank() == left
    assert [y.tolist() for y in works[1].result()] == [x.tolist()]
    got.append(x[0].item())

    x = torch.empty(2)
    batch = [dist.P2POp(dist.irecv, x, left), dist.P2POp(dist.isend, mine, right)]
    works = dist.batch_isend_irecv(batch)
    for work in works:
        work.wait()
    assert works[0].source_rank() == left
    got.append(x[0].item())
    return got


def test_messages_go_around_in_every_way(ranks: Pool) -> None:
    assert ranks.run(_around) == [[float((rank - 1) % SIZE)] * 3 for rank in range(SIZE)]


def _by_tag() -> object:
    if dist.get_rank() == 0:
        first, second = dist.isend(torch.tensor([1.0]), 1, tag=1), dist.isend(torch.tensor([2.0]), 1, tag=2)
        first.wait(), second.wait()
    if dist.get_rank() == 1:
        x, y = torch.empty(1), torch.empty(1)
        dist.recv(y, 0, tag=2)
        dist.recv(x, 0, tag=1)
        return x.item(), y.item()
    return None


def test_tags_tell_messages_apart(ranks: Pool) -> None:
    assert ranks.run(_by_tag)[1] == (1.0, 2.0)


def _to_the_last() -> object:
    rank = dist.get_rank()
    if rank != SIZE - 1:
        dist.send(torch.full((1,), float(rank)), SIZE - 1)
        return None
    x, senders = torch.empty(1), []
    for _ in range(SIZE - 2):
        senders.append(dist.recv(x))
        assert x.item() == senders[-1]
    work = dist.irecv(x)
    work.wait()
    assert x.item() == work.source_rank()
    return sorted([*senders, work.source_rank()])


def test_a_receive_without_a_source_tells_who_sent(ranks: Pool) -> None:
    assert ranks.run(_to_the_last)[-1] == [0, 1, 2]


def _in_a_group() -> object:
    pg = dist.new_group([1, 3])
    rank = dist.get_rank()
    if rank == 1:
        dist.send(torch.tensor([5.0]), group=pg, group_dst=1)
        dist.send(torch.tensor([6.0]), 3, pg)
        dist.batch_isend_irecv([dist.P2POp(dist.isend, torch.tensor([7.0]), group=pg, group_peer=1)])[
            0
        ].wait()
    if rank != 3:
        return None
    x, y, z = torch.empty(1), torch.empty(1), torch.empty(1)
    op = dist.P2POp(dist.irecv, z, 1, pg)
    assert (op.peer, op.group_peer) == (1, 0)
    assert "irecv, peer=1" in repr(op)
    senders = dist.recv(x, group=pg), dist.recv(y, 1, pg)
    (work,) = dist.batch_isend_irecv([op])
    work.wait()
    return senders, work.source_rank(), [x.item(), y.item(), z.item()]


def test_senders_are_global_ranks_and_those_of_works_ranks_of_the_group(ranks: Pool) -> None:
    assert ranks.run(_in_a_group)[3] == ((1, 1), 0, [5.0, 6.0, 7.0])


def _refused() -> None:
    rank, x = dist.get_rank(), torch.ones(1)
    with pytest.raises(shoal.UsageError, match=f"send on rank {rank}"):
        dist.send(x, rank)
    with pytest.raises(shoal.UsageError, match="op must be isend or irecv"):
        dist.P2POp(dist.send, x, 0)
    with pytest.raises(shoal.UsageError, match=r"peer \(a global rank\) or group_peer must be given"):
        dist.P2POp(dist.isend, x)
    pg = dist.new_group()
    with pytest.raises(shoal.UsageError, match="for the same group"):
        dist.batch_isend_irecv([dist.P2POp(dist.isend, x, 0), dist.P2POp(dist.isend, x, 0, pg)])
    with pytest.raises(shoal.UsageError, match="a list of P2POp"):
        dist.batch_isend_irecv([x])
    assert dist.batch_isend_irecv([]) == []
    work = dist.barrier(async_op=True)
    with pytest.raises(shoal.UsageError, match="only a receive has a source"):
        (work.wait(), work.source_rank())


def test_messages_that_make_no_sense_are_refused(ranks: Pool) -> None:
    ranks.run(_refused)
