"""ZeroRedundancyOptimizer within a Join: a rank that has run out still updates what it owns."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal import Join, Joinable, JoinHook
from shoal.testing import run_threads
from tests.parallel.models import batches, loss_of, mlp

from .training import STEPS, assert_bitwise, gradients, mixed, train, values, zero


class Gradients(Joinable):
    """Gives every rank the gradients of each step, also those that have run out."""

    def __init__(self, model: nn.Module, group: shoal.ProcessGroup) -> None:
        Joinable.__init__(self)
        self.model, self.group, self.step = model, group, 0

    def __call__(self) -> None:
        Join.notify_join_context(self)
        self.model.zero_grad()
        gradients(self.model, self.step)
        self.step += 1

    def join_hook(self, **kwargs: Any) -> JoinHook:
        hook = JoinHook()
        hook.main_hook = self.__call__  # type: ignore[method-assign]
        return hook

    @property
    def join_device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def join_process_group(self) -> shoal.ProcessGroup:
        return self.group


@pytest.mark.parametrize("first", ["gradients", "optimizer"])
@pytest.mark.parametrize("steps", [(4, 1), (0, 2, 4)])
def test_all_parameters_are_updated_until_the_last_rank_has_run_out(
    first: str, steps: tuple[int, ...]
) -> None:
    alone = mixed()
    train(alone, torch.optim.Adam(alone.parameters(), lr=0.01), range(max(steps)))

    def rank(group: shoal.ProcessGroup) -> list[torch.Tensor]:
        own = mixed()
        optimizer = zero(own, group)
        source = Gradients(own, group)
        if first == "gradients":
            with Join([source, optimizer]):
                for _ in range(steps[group.rank]):
                    source()
                    optimizer.step()
        else:  # it speaks for the ranks, and its hook runs the step that would speak
            with Join([optimizer]):
                for _ in range(steps[group.rank]):
                    source()
                    optimizer.step()
                own.zero_grad()
        return values(own)

    trained = run_threads(rank, len(steps))
    for other in trained[1:]:
        assert_bitwise(other, trained[0])
    if first == "gradients":
        assert_bitwise(trained[0], values(alone))


@pytest.mark.parametrize("as_views", [False, True], ids=["copies", "views"])
@pytest.mark.parametrize("divide_by_initial", [False, True])
def test_a_model_and_its_optimiser_join_together(divide_by_initial: bool, as_views: bool) -> None:
    """Rank 0 has one batch, rank 1 all: as one rank that adds up the gradients would train."""
    data = batches(STEPS)
    alone = mlp()
    optimizer = torch.optim.Adam(alone.parameters(), lr=0.01)
    for step, batch in enumerate(data):
        optimizer.zero_grad()
        present = [data[0], batch] if step == 0 else [batch]
        for one in present:
            (loss_of(alone, one) / (2 if divide_by_initial else len(present))).backward()
        optimizer.step()

    def rank(group: shoal.ProcessGroup) -> list[torch.Tensor]:
        own = mlp()
        model = shoal.DistributedDataParallel(own, group=group, bucket_cap_mb=0.0005)
        distributed = zero(model, group, parameters_as_bucket_view=as_views)
        with Join([model, distributed], divide_by_initial_world_size=divide_by_initial):
            for batch in data[: 1 if group.rank == 0 else STEPS]:
                distributed.zero_grad()
                loss_of(model, batch).backward()
                distributed.step()
        return values(own)

    first, second = run_threads(rank, 2)
    assert_bitwise(first, second)
    for a, b in zip(first, values(alone), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
