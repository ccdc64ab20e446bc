"""ZeroRedundancyOptimizer within a Join: a rank that has run out still updates what it owns."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal import Join, Joinable, JoinHook
from shoal.testing import run_threads
from tests.parallel.models import batches
from tests.parallel.training import Place, assert_as_simulated, assert_same_bits, steps, values

from .training import STEPS, adam, gradients, mixed, train, zero


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
@pytest.mark.parametrize("counts", [(4, 1), (0, 2, 4)])
def test_all_parameters_are_updated_until_the_last_rank_has_run_out(
    first: str, counts: tuple[int, ...]
) -> None:
    alone = mixed()
    train(alone, torch.optim.Adam(alone.parameters(), lr=0.01), range(max(counts)))

    def rank(group: shoal.ProcessGroup) -> list[torch.Tensor]:
        own = mixed()
        optimizer = zero(own, group)
        source = Gradients(own, group)
        # Alone it speaks for the ranks, and its hook runs the step that would speak.
        with Join([source, optimizer] if first == "gradients" else [optimizer]):
            for _ in range(counts[group.rank]):
                source()
                optimizer.step()
            if first == "optimizer":
                own.zero_grad()
        return values(own)

    trained = run_threads(rank, len(counts))
    for other in trained[1:]:
        assert_same_bits(other, trained[0])
    if first == "gradients":
        assert_same_bits(trained[0], values(alone))


@pytest.mark.parametrize(("divide_by_initial", "as_views"), [(False, True), (True, False)])
def test_a_model_and_its_optimiser_join_together(divide_by_initial: bool, as_views: bool) -> None:
    """Rank 0 has one batch, rank 1 all."""

    def program(model: nn.Module, place: Any) -> Iterator[None]:
        optimizer = adam(model, place, as_views)
        data = batches(STEPS if place.rank else 1)
        options = {"divide_by_initial_world_size": divide_by_initial}
        with nullcontext() if isinstance(place, Place) else Join([model, optimizer], **options):
            yield from steps(data, whole=True, optimizer=lambda _: optimizer)(model, place)

    assert_as_simulated(program, by_all=divide_by_initial)
