"""The pool that the tests of this folder run on."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.distributed as dist

from shoal.errors import RemoteError

from .pool import Pools


@pytest.fixture(scope="module")
def ranks():
    """Pools that may break."""
    pools = Pools()
    yield pools
    pools.close()


def sums(context, factor):
    x = torch.full((2,), float(context.rank))
    y = x.clone()
    dist.all_reduce(x)
    dist.all_reduce(y, group=context.gloo)
    assert torch.equal(x, y)
    return (factor * x).tolist()


def fail(context, rank):
    if context.rank == rank:
        raise ValueError("not today")
    dist.barrier()


def hang(context, rank):
    if context.rank == rank:
        threading.Event().wait()
    dist.barrier()


def scratch(context):
    (context.scratch / str(context.rank)).touch()
    dist.barrier()
    return sorted(path.name for path in context.scratch.iterdir())


@pytest.mark.parametrize("size", [2, 4])
def test_every_rank_runs_the_function(ranks, size):
    assert ranks(size).run(sums, 10) == [[10.0 * sum(range(size))] * 2] * size


def test_every_call_gets_a_new_directory(ranks):
    assert ranks(2).run(scratch) == [["0", "1"]] * 2
    assert ranks(2).run(scratch) == [["0", "1"]] * 2


def test_a_failure_is_reported_with_its_rank_and_the_next_call_meets_new_ranks(ranks):
    before = ranks(2).pids
    with pytest.raises(RemoteError, match=r"(?s)rank 1 raised.*ValueError: not today"):
        ranks(2).run(fail, 1)
    assert not set(before) & set(ranks(2).pids)
    assert ranks(2).run(sums, 1) == [[1.0, 1.0]] * 2


def test_a_hang_shows_the_stacks_of_all_ranks(ranks):
    with pytest.raises(RemoteError, match=r"rank 0 was still running at the deadline(?s:.)*in hang\n"):
        ranks(2).run(hang, 0, limit=5.0)
    assert ranks(2).run(sums, 1) == [[1.0, 1.0]] * 2
