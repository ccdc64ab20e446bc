"""What ``async_op=True`` returns."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
import torch

import shoal
import shoal.distributed as dist

from .pool import Pool

SIZE = 4


def _callbacks() -> object:
    x, y = torch.ones(2), torch.ones(2)
    work = dist.all_reduce(x, async_op=True)
    future = work.get_future()
    assert isinstance(future, shoal.Future)
    assert work.get_future() is future

    def again(done: shoal.Future[list[torch.Tensor]]) -> float:
        (z,) = done.value()
        assert z is x
        dist.all_reduce(y)  # issued in a callback: matched by its place in it
        return (z + y).sum().item()

    result = future.then(again).wait()
    work.synchronize()
    barrier = dist.barrier(async_op=True)
    assert barrier.get_future().wait() == []
    assert barrier.result() == []
    return result, "Work" in repr(work)


def test_a_works_future_has_the_tensors_and_takes_callbacks(ranks: Pool) -> None:
    assert ranks.run(_callbacks) == [(16.0, True)] * SIZE


def _waiting() -> object:
    rank = dist.get_rank()
    x = torch.empty(1)
    if rank == 0:
        work = dist.irecv(x, 1)
        assert not work.is_completed()
        assert not work.is_success()
        assert work.exception() is None
        with pytest.raises(shoal.InvalidFutureState):
            work.result()
        with pytest.raises(shoal.WaitTimeout):
            work.wait(timedelta(milliseconds=5))
        dist.send(x, 1)
        return work.wait(timedelta(0)), x.item()  # zero means no limit, as in torch
    if rank == 1:
        dist.recv(x, 0)
        dist.send(torch.tensor([3.0]), 0)
    return None


def test_a_wait_that_was_given_up_can_be_done_again(ranks: Pool) -> None:
    assert ranks.run(_waiting)[0] == (True, 3.0)


def _failing() -> object:
    pg = dist.new_group(timeout=0.2)
    if dist.get_rank() == 3:
        dist.barrier()
        return None
    work = dist.all_reduce(torch.ones(1), group=pg, async_op=True)
    with pytest.raises(shoal.GroupError) as caught:
        work.wait()
    assert work.is_completed()
    assert not work.is_success()
    dist.barrier()  # the default group is none the worse
    return work.exception() is caught.value


def test_a_failure_is_told_by_wait_and_by_exception(ranks: Pool) -> None:
    assert ranks.run(_failing) == [True, True, True, None]


def _from_threads() -> object:
    """Each thread on a group of its own; all see one default group."""
    groups, sums = [dist.new_group() for _ in range(3)], [0.0] * 3

    def reduce(i: int) -> None:
        for _ in range(20):
            x = torch.ones(1)
            dist.all_reduce(x, group=groups[i])
            sums[i] += x.item()
        assert dist.get_world_size() == SIZE

    threads = [threading.Thread(target=reduce, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sums


def test_several_threads_use_the_functions(ranks: Pool) -> None:
    assert ranks.run(_from_threads) == [[80.0] * 3] * SIZE
