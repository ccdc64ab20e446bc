"""The collectives of the functional API: torch's arguments, on the default group and on others."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch

import shoal
import shoal.distributed as dist
from shoal.group.validation import overlap
from shoal.torch_terms.aliased_outputs import with_distinct_outputs

from .pool import Pool

SIZE = 4


def _mine(count: int = 3) -> torch.Tensor:
    return torch.arange(count, dtype=torch.float32) + 10 * dist.get_rank()


def _every_collective(async_op: bool) -> dict[str, object]:
    rank, found = dist.get_rank(), {}

    def note(name: str, work: dist.Work | None, *tensors: torch.Tensor) -> None:
        assert async_op == isinstance(work, dist.Work)
        assert async_op or work is None or name.startswith("all_reduce")
        if work is not None:
            assert work.wait() is True
            assert work.is_completed()
            assert work.is_success()
            assert work.exception() is None
        found[name] = [x.tolist() for x in tensors]

    x = _mine()
    note("all_reduce", dist.all_reduce(x, async_op=async_op), x)
    x = _mine()
    note("all_reduce max", dist.all_reduce(x, op=dist.ReduceOp.MAX, async_op=async_op), x)
    x = _mine()
    note("broadcast", dist.broadcast(x, 2, async_op=async_op), x)
    x = _mine()
    note("reduce", dist.reduce(x, 1, async_op=async_op), *([x] if rank == 1 else []))
    xs = [torch.empty(3) for _ in range(SIZE)]
    note("all_gather", dist.all_gather(xs, _mine(), async_op=async_op), *xs)
    xs = [torch.empty(r + 1) for r in range(SIZE)]
    note("all_gather uneven", dist.all_gather(xs, _mine(rank + 1), async_op=async_op), *xs)
    x = torch.empty(3 * SIZE)
    note("all_gather_single", dist.all_gather_single(x, _mine(), async_op=async_op), x)
    x = torch.empty(SIZE, 3)
    note("all_gather_into_tensor", dist.all_gather_into_tensor(x, _mine(), async_op=async_op), x)
    xs = [torch.empty(3) for _ in range(SIZE)] if rank == 0 else None
    note("gather", dist.gather(_mine(), xs, async_op=async_op), *(xs or []))
    xs = [torch.full((2,), float(r)) for r in range(SIZE)] if rank == 3 else None
    x = torch.empty(2)
    note("scatter", dist.scatter(x, xs, src=3, async_op=async_op), x)
    x = torch.empty(2)
    inputs = [torch.full((2,), float(r + rank)) for r in range(SIZE)]
    note("reduce_scatter", dist.reduce_scatter(x, inputs, async_op=async_op), x)
    x = torch.empty(2)
    note("reduce_scatter_single", dist.reduce_scatter_single(x, torch.cat(inputs), async_op=async_op), x)
    x = torch.empty(2)
    note("reduce_scatter_tensor", dist.reduce_scatter_tensor(x, torch.cat(inputs), async_op=async_op), x)
    xs = [torch.empty(2) for _ in range(SIZE)]
    note("all_to_all", dist.all_to_all(xs, inputs, async_op=async_op), *xs)
    x = torch.empty(SIZE)
    note("all_to_all_single", dist.all_to_all_single(x, _mine(SIZE), async_op=async_op), x)
    sent, got = [(rank + r) % 2 for r in range(SIZE)], [(rank + r) % 2 for r in range(SIZE)]
    x = torch.empty(sum(got))
    note(
        "all_to_all_single uneven",
        dist.all_to_all_single(x, _mine(sum(sent)), got, sent, async_op=async_op),
        x,
    )
    note("barrier", dist.barrier(async_op=async_op, device_ids=[0], timeout=20))
    return found


def _expected(rank: int) -> dict[str, object]:
    each = [[10.0 * r, 10.0 * r + 1, 10.0 * r + 2] for r in range(SIZE)]
    total = [60.0, 64.0, 68.0]
    part = [4.0 * rank + 6] * 2
    flat = [v for x in each for v in x]
    # ranks of unlike parity send each other one element: the first and second of what they have
    uneven = [10.0 * r + (rank // 2) for r in range(SIZE) if (r + rank) % 2]
    return {
        "all_reduce": [total],
        "all_reduce max": [each[3]],
        "broadcast": [each[2]],
        "reduce": [total] if rank == 1 else [],
        "all_gather": each,
        "all_gather uneven": [[10.0 * r + i for i in range(r + 1)] for r in range(SIZE)],
        "all_gather_single": [flat],
        "all_gather_into_tensor": [each],
        "gather": each if rank == 0 else [],
        "scatter": [[float(rank)] * 2],
        "reduce_scatter": [part],
        "reduce_scatter_single": [part],
        "reduce_scatter_tensor": [part],
        "all_to_all": [[float(r + rank)] * 2 for r in range(SIZE)],
        "all_to_all_single": [[10.0 * r + rank for r in range(SIZE)]],
        "all_to_all_single uneven": [uneven],
        "barrier": [],
    }


@pytest.mark.parametrize("async_op", [False, True], ids=["waited", "async"])
def test_every_collective_gives_what_torch_says(ranks: Pool, async_op: bool) -> None:
    for rank, found in enumerate(ranks.run(_every_collective, async_op)):
        assert found == _expected(rank)


def _on_a_group() -> list[object]:
    """On ranks 3 and 1, in that order: sources and destinations are global unless they say group_."""
    pg = dist.new_group([3, 1], sort_ranks=False)
    if dist.get_rank() not in (1, 3):
        assert pg == dist.GroupMember.NON_GROUP_MEMBER
        return []
    x = _mine(1)
    dist.broadcast(x, src=1, group=pg)
    y = _mine(1)
    dist.broadcast(y, group=pg, group_src=0)
    z = _mine(1)
    dist.reduce(z, group=pg, group_dst=1)
    xs = [torch.empty(1), torch.empty(1)]
    dist.all_gather(xs, _mine(1), pg)
    with pytest.raises(shoal.UsageError, match=r"broadcast on rank \d: src=2 is not among .* \[3, 1\]"):
        dist.broadcast(x, src=2, group=pg)
    with pytest.raises(shoal.UsageError, match=r"pass src \(a global rank\) or group_src, not both"):
        dist.broadcast(x, src=1, group=pg, group_src=0)
    with pytest.raises(shoal.UsageError, match="must be given"):
        dist.broadcast(x, group=pg)
    with pytest.raises(shoal.UsageError, match="group_dst must be a rank in the group, from 0 to 1, got 2"):
        dist.reduce(x, group=pg, group_dst=2)
    return [x.item(), y.item(), z.item(), [part.item() for part in xs]]


def test_roots_are_global_ranks_or_ranks_of_the_group(ranks: Pool) -> None:
    results = ranks.run(_on_a_group)
    assert results[0] == results[2] == []
    assert results[1] == [10.0, 30.0, 40.0, [30.0, 10.0]]
    assert results[3] == [10.0, 30.0, 30.0, [30.0, 10.0]]


def _outside() -> list[str]:
    """Every operation on a group that this rank is not in."""
    x, absent = torch.ones(1), dist.GroupMember.NON_GROUP_MEMBER
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        results = [
            dist.all_reduce(x, group=absent),
            dist.broadcast(x, 0, absent, async_op=True),
            dist.reduce(x, 0, group=absent),
            dist.all_gather([x], x, absent),
            dist.all_gather_single(x, x, absent),
            dist.gather(x, [x], group=absent),
            dist.scatter(x, [x], group=absent),
            dist.reduce_scatter(x, [x], group=absent),
            dist.reduce_scatter_single(x, x, group=absent),
            dist.all_to_all([x], [x], absent),
            dist.all_to_all_single(x, x, group=absent),
            dist.barrier(absent),
            dist.monitored_barrier(absent),
            dist.isend(x, 0, absent),
            dist.irecv(x, 0, absent),
            dist.send(x, 0, absent),
            dist.all_gather_object([None], 1, absent),
            dist.gather_object(1, [None], group=absent),
            dist.broadcast_object_list([1], group=absent),
            dist.scatter_object_list([1], [1], group=absent),
            dist.send_object_list([1], 0, absent),
            dist.destroy_process_group(absent),
        ]
        assert results == [None] * len(results)
        assert dist.recv(x, 0, absent) == dist.recv_object_list([1], 0, absent) == -1
        assert dist.get_rank(absent) == dist.get_world_size(absent) == -1
        assert dist.batch_isend_irecv([dist.P2POp(dist.isend, x, 0, absent)]) == []
    return [str(warning.message).partition(" ")[0] for warning in caught]


def test_a_rank_that_is_not_in_the_group_is_warned_and_does_nothing(ranks: Pool) -> None:
    names = (
        "all_reduce broadcast reduce all_gather all_gather_single gather scatter reduce_scatter "
        "reduce_scatter_single all_to_all all_to_all_single barrier monitored_barrier isend irecv isend "
        "all_gather_object gather_object broadcast_object_list scatter_object_list send_object_list recv "
        "recv_object_list batch_isend_irecv"
    )
    assert ranks.run(_outside) == [names.split()] * SIZE


def _refused() -> None:
    x = torch.ones(2)
    rank = dist.get_rank()
    with pytest.raises(shoal.UsageError, match=f"gather on rank {rank}: gather_list must be given"):
        dist.gather(x, None, dst=rank)
    nothing: Any = None
    with pytest.raises(shoal.UsageError, match=f"all_gather on rank {rank}: tensor_list must be given"):
        dist.all_gather(nothing, x)
    with pytest.raises(shoal.UsageError, match=f"all_to_all on rank {rank}: out must be a list of 4 tensors"):
        dist.all_to_all(nothing, [x] * 4)
    with pytest.raises(shoal.UsageError, match=f"gather on rank {rank}: out must be a list of 4 tensors"):
        dist.gather(x, cast(Any, 5), dst=rank)
    with pytest.raises(shoal.UsageError, match=f"all_reduce on rank {rank}: group must be"):
        dist.all_reduce(x, group="everybody")
    with pytest.raises(shoal.UsageError, match=r"expected a reduction such as ReduceOp\.SUM"):
        dist.all_reduce(x, op=3)
    dist.barrier()


def test_what_makes_no_sense_is_refused_and_leaves_the_group_usable(ranks: Pool) -> None:
    ranks.run(_refused)


def _old_names() -> list[object]:
    rank = dist.get_rank()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        xs = [_mine(1), _mine(2)]
        assert dist.all_reduce_coalesced(xs) is None
        ys = [_mine(1)]
        future = dist.all_reduce_coalesced(ys, async_op=True)
        assert future.wait() is not None
        outputs = [[torch.empty(1), torch.empty(2)] for _ in range(SIZE)]
        dist.all_gather_coalesced(outputs, [_mine(1), _mine(2)])
        z = torch.empty(SIZE)
        dist._all_gather_base(z, _mine(1))
        s = torch.empty(1)
        dist._reduce_scatter_base(s, torch.arange(SIZE).float())
        assert dist.reduce_op.MAX is dist.ReduceOp.MAX
    assert [(warning.category, warning.filename) for warning in caught] == [(FutureWarning, __file__)] * 6
    with pytest.warns(FutureWarning), pytest.raises(shoal.UsageError, match="expected 4 lists of 1 output"):
        dist.all_gather_coalesced([], [_mine(1)])
    assert s.item() == SIZE * rank
    return [[x.tolist() for x in [*xs, *ys]], [[x.tolist() for x in part] for part in outputs], z.tolist()]


def test_old_names_work_and_warn(ranks: Pool) -> None:
    gathered = [[[10.0 * r], [10.0 * r, 10.0 * r + 1]] for r in range(SIZE)]
    expected = [[[60.0], [60.0, 64.0], [60.0]], gathered, [0.0, 10.0, 20.0, 30.0]]
    assert ranks.run(_old_names) == [expected] * SIZE


def _who_was_late() -> object:
    pg = dist.new_group()
    dist.barrier()  # so that nobody but rank 2 is late
    if dist.get_rank() == 2:
        with pytest.raises(shoal.GroupError):
            dist.barrier(pg, timeout=30)
        return (2,)
    try:
        dist.monitored_barrier(pg, timeout=5.0)
    except shoal.OperationTimeout as error:
        return error.ranks
    return None


def test_a_monitored_barrier_names_who_is_late(ranks: Pool) -> None:
    assert ranks.run(_who_was_late) == [(2,)] * SIZE


def _outputs_that_share_memory() -> None:
    rank, last = dist.get_rank(), SIZE - 1
    x = _mine()

    def buffer_of(fill: Callable[[list[torch.Tensor]], object]) -> list[float]:
        buffer = torch.zeros(3)
        fill([buffer] * SIZE)
        return buffer.tolist()

    expected = [10.0 * last + i for i in range(3)]
    assert buffer_of(lambda out: dist.all_gather(out, x)) == expected
    assert buffer_of(lambda out: dist.all_gather(out, x, async_op=True).wait()) == expected
    got = buffer_of(lambda out: dist.gather(x, out if rank == 1 else None, 1))
    assert got == (expected if rank == 1 else [0.0] * 3)
    assert buffer_of(lambda out: dist.all_to_all(out, [x + r for r in range(SIZE)])) == [
        value + rank for value in expected
    ]
    with pytest.warns(FutureWarning):
        assert buffer_of(lambda out: dist.all_gather_coalesced([out[:1]] * SIZE, [x])) == expected
    buffer = torch.zeros(SIZE + 2)
    dist.all_gather([buffer[r : r + 3] for r in range(SIZE)], x)
    assert buffer.tolist() == [0.0, 10.0, 20.0, *expected]
    y, z = torch.ones(2), torch.ones(1)
    with pytest.warns(FutureWarning):
        dist.all_reduce_coalesced([y, z, y, y[1:]])
    assert (y.tolist(), z.tolist()) == ([SIZE, SIZE], [SIZE])
    with pytest.raises(shoal.UsageError, match="several elements at one address"):
        dist.all_gather([torch.zeros(1).expand(3)] * SIZE, x)
    with pytest.raises(shoal.UsageError, match=r"out\[1\] must be a torch.Tensor, got NoneType"):
        dist.all_gather([x, None, x, x], x)
    dist.barrier()


def test_the_last_rank_stays_in_outputs_that_share_memory(ranks: Pool) -> None:
    ranks.run(_outputs_that_share_memory)


def test_an_output_that_nobody_can_judge_is_left_to_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.zeros(20).as_strided((5, 2), (2, 3))
    monkeypatch.setattr(overlap.dims_overlap, "__defaults__", (0,))
    given: list[torch.Tensor] = []
    future = with_distinct_outputs([x, x], lambda out: (given.extend(out), shoal.Future())[1])
    assert [each is x for each in given] == [True, True]
    assert not future.done()
