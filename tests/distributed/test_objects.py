"""Object collectives of the functional API: lists are filled in place, as in torch."""

from __future__ import annotations

import pytest

import shoal
import shoal.distributed as dist

from .pool import Pool

SIZE = 4


def _every_form() -> list[object]:
    rank = dist.get_rank()
    mine = {"rank": rank, "text": "x" * rank * 100}
    everything: list[object] = [None] * SIZE
    dist.all_gather_object(everything, mine)
    gathered: list[object] | None = [None] * SIZE if rank == 2 else None
    dist.gather_object(mine, gathered, dst=2)
    told: list[object] = [mine, 1, None] if rank == 1 else [None, None, None]
    dist.broadcast_object_list(told, src=1, device=None)
    handed: list[object] = [None]
    # torch lets ranks that are not the source give whatever they have
    dist.scatter_object_list(handed, [f"for {r}" for r in range(SIZE)], src=0)
    got: list[object] = [None, None]
    if rank == 0:
        dist.send_object_list([mine, "second"], 3)
        sender = None
    elif rank == 3:
        sender = dist.recv_object_list(got)
    else:
        sender = None
    return [everything, gathered, told, handed, got if rank == 3 else None, sender]


def test_every_form_fills_the_callers_lists(ranks: Pool) -> None:
    each = [{"rank": r, "text": "x" * r * 100} for r in range(SIZE)]
    for rank, found in enumerate(ranks.run(_every_form)):
        assert found == [
            each,
            each if rank == 2 else None,
            [each[1], 1, None],
            [f"for {rank}"],
            [each[0], "second"] if rank == 3 else None,
            0 if rank == 3 else None,
        ]


def _refused() -> None:
    rank = dist.get_rank()
    with pytest.raises(
        shoal.UsageError, match=f"all_gather_object on rank {rank}.*each of 4 ranks, got 2 el"
    ):
        dist.all_gather_object([None, None], 1)
    with pytest.raises(shoal.UsageError, match=r"object_gather_list must be a list .* got None"):
        dist.gather_object(1, None, dst=rank)
    with pytest.raises(shoal.UsageError, match=r"only the destination, rank .*, passes a list"):
        dist.gather_object(1, [None] * SIZE, dst=(rank + 1) % SIZE)
    with pytest.raises(shoal.UsageError, match="scatter_object_output_list must be a non-empty list"):
        dist.scatter_object_list([])
    if rank == 0:
        dist.broadcast_object_list([1, 2])
    else:
        with pytest.raises(
            shoal.UsageError, match="object_list has 1 elements, but the sender sent 2 objects"
        ):
            dist.broadcast_object_list([None])
    if rank == 1:
        dist.send_object_list([1], 2)
    if rank == 2:
        with pytest.raises(
            shoal.UsageError, match="object_list has 2 elements, but the sender sent 1 objects"
        ):
            dist.recv_object_list([None, None], 1)
    dist.barrier()


def test_lists_that_do_not_fit_are_refused_and_leave_the_group_usable(ranks: Pool) -> None:
    ranks.run(_refused)
