"""Post-local SGD: among all ranks first, then among neighbours or not at all."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import shoal
from shoal.parallel import hooks
from tests.parallel.training import on_ranks

from .buckets import Model, gradient


@on_ranks(4)
def test_the_neighbours_average_among_themselves_after_the_first_passes(group: shoal.ProcessGroup) -> None:
    pair = group.split(group.rank // 2)
    state = hooks.PostLocalSGDState(None, pair, start_localSGD_iter=2)
    model = Model(group, count=2)
    for step in range(4):
        own = model.reduce(hooks.post_localSGD_hook, state)
        ranks = range(4) if step < 2 else range(group.rank // 2 * 2, group.rank // 2 * 2 + 2)
        for index, averaged in enumerate(own):
            mean = sum(gradient(other, step, index, averaged.shape) for other in ranks) / len(ranks)
            torch.testing.assert_close(averaged, mean, rtol=1e-6, atol=1e-6)
    assert state.iter == 4


@on_ranks(2)
def test_gradients_may_stay_on_each_rank(group: shoal.ProcessGroup) -> None:
    state = hooks.PostLocalSGDState(group, None, 1, post_local_gradient_allreduce=False)
    model = Model(group, dtype=torch.float64)
    model.reduce(hooks.post_localSGD_hook, state)
    for index, own in enumerate(model.reduce(hooks.post_localSGD_hook, state)):
        assert torch.equal(own, gradient(group.rank, 1, index, own.shape))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((None, None, 3), "needs a subgroup.*after 3 passes"),
        ((3, None, 3), "process_group must be a ProcessGroup or None, got int"),
        ((None, "pair", 3), "subgroup must be a ProcessGroup or None, got str"),
        ((None, None, -1, False), "start_localSGD_iter is a number of backward passes, got -1"),
    ],
)
def test_settings_without_meaning_are_refused(arguments: Any, message: str) -> None:
    with pytest.raises(shoal.UsageError, match=message):
        hooks.PostLocalSGDState(*arguments)
