"""``GroupError.last_completed``: up to where a rank got before its group ended."""

from __future__ import annotations

import threading

import pytest
import torch

from shoal import GroupAborted, ProcessGroup
from shoal.testing import run_threads

PATIENCE = 30.0


def test_an_operation_that_overtook_another_does_not_count() -> None:
    over = threading.Event()

    def rank(group: ProcessGroup) -> None:
        if group.rank == 1:
            assert over.wait(PATIENCE)
            return
        first = group.all_reduce(torch.ones(1))  # rank 1 never comes to it
        group.gather(torch.ones(1), root=1).wait(PATIENCE)  # its sender is done as soon as it was sent
        group.abort()
        with pytest.raises(GroupAborted, match="no operation had completed here") as caught:
            first.wait(PATIENCE)
        assert caught.value.last_completed is None
        over.set()

    run_threads(rank, 2, transport="tcp", concurrency=2, timeout=PATIENCE)


@pytest.mark.parametrize("concurrency", [1, 3])
def test_the_error_and_what_a_later_call_raises_have_the_number(concurrency: int) -> None:
    over = threading.Event()

    def rank(group: ProcessGroup) -> None:
        for _ in range(5):
            group.barrier().wait(PATIENCE)
        if group.rank == 0:
            pending = group.all_reduce(torch.ones(1))
            group.abort()
            with pytest.raises(GroupAborted, match=r"last operation completed here: 4\)") as caught:
                pending.wait(PATIENCE)
            assert caught.value.last_completed == 4
            with pytest.raises(GroupAborted) as again:
                group.barrier()
            assert again.value.last_completed == 4
            over.set()
        assert over.wait(PATIENCE)

    run_threads(rank, 2, concurrency=concurrency, timeout=PATIENCE)
