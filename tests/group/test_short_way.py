"""The short way of the commonest calls gives what the long way gives, and leaves to it what it cannot do."""

from __future__ import annotations

import threading

import pytest
import torch

from shoal.errors import UsageError
from shoal.group import ProcessGroup

from .worlds import TOPOLOGIES, Worlds, topology_options

SIZE = 3


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_lazily_negated_tensors_are_reduced_as_they_read(worlds: Worlds, topology: str) -> None:
    def collective(group: ProcessGroup) -> None:
        x = torch.full((4,), complex(0, group.rank + 1)).conj().imag
        assert x.is_neg()
        group.all_reduce(x).wait()
        assert x.tolist() == [-6.0] * 4

    worlds(SIZE, **topology_options(topology, SIZE)).run(collective)


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_overlapping_buffers_are_gathered_as_if_they_were_apart(worlds: Worlds, topology: str) -> None:
    def collective(group: ProcessGroup) -> None:
        out = torch.zeros(SIZE * 4)
        mine = out[group.rank * 4 : group.rank * 4 + 4]
        mine.fill_(float(group.rank))
        group.all_gather_single(out, mine).wait()
        assert out.tolist() == [0.0] * 4 + [1.0] * 4 + [2.0] * 4

    worlds(SIZE, **topology_options(topology, SIZE)).run(collective)


def test_wrong_arguments_are_refused_as_ever_and_leave_the_group_usable(worlds: Worlds) -> None:
    def collective(group: ProcessGroup) -> None:
        x = torch.ones(6)
        for wrong in (
            lambda: group.broadcast(x, SIZE),
            lambda: group.broadcast(x, -1),
            lambda: group.broadcast(x, True),
            lambda: group.all_gather_single(torch.ones(6), x),
            lambda: group.all_gather_single(torch.ones(18, dtype=torch.int32), x),
            lambda: group.reduce_scatter_single(torch.ones(6), x),
            lambda: group.all_to_all_single(torch.ones(2, 3), x),
            lambda: group.all_to_all_single(torch.ones(4), torch.ones(4)),
            lambda: group.all_reduce([1.0]),  # type: ignore[arg-type]
            lambda: group.all_reduce(x.to_sparse()),
            lambda: group.all_reduce(x, timeout=-1),
        ):
            with pytest.raises(UsageError):
                wrong()
        assert group.all_reduce(x).wait().tolist() == [SIZE] * 6

    worlds(SIZE).run(collective)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("registered", [(0, 1, 2), (0,), (1,), ()])
@pytest.mark.parametrize("count", [2**18 + 3, 2**18 - 64])
def test_large_broadcasts_arrive_whole_whoever_registered(
    worlds: Worlds, size: int, registered: tuple[int, ...], count: int
) -> None:
    def collective(group: ProcessGroup) -> None:
        for root in range(group.size):
            x = group.empty(count + 1)[1:] if group.rank in registered else torch.empty(count)
            x.fill_(-1.0)
            if group.rank == root:
                x.copy_(torch.arange(count) + root)
            group.broadcast(x, root).wait()
            assert torch.equal(x, torch.arange(count, dtype=torch.float32) + root)
            group.barrier().wait()

    worlds(size).run(collective)


@pytest.mark.concurrency
def test_threads_that_wait_for_one_future_all_see_its_value(worlds: Worlds) -> None:
    def collective(group: ProcessGroup) -> None:
        for _ in range(200):
            x = torch.ones(3)
            future = group.all_reduce(x)
            follower = future.then(lambda done: done.value().sum().item())
            seen: list[torch.Tensor] = []
            threads = [threading.Thread(target=lambda f=future, s=seen: s.append(f.wait())) for _ in range(3)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert all(y is x for y in seen)
            assert len(seen) == 3
            assert follower.wait() == 3.0 * group.size

    worlds(2).run(collective)
