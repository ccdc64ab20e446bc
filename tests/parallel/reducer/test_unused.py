"""Parameters that take no part in the loss: find_unused_parameters, static_graph, and what is not sent."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.errors import UsageError
from tests.parallel.models import Checkpointed, Experts, batches, fixed, loss_of, part
from tests.parallel.reducer.test_reducer import Recorder
from tests.parallel.training import SMALL_MB, Program, assert_as_simulated, on_ranks, wrapped


def experts() -> Any:
    return fixed(Experts().double())


#: For each step the experts of each of three ranks.
PLAN = [[(0,), (1,), (0, 1)], [(), (), ()], [(3,), (), (2, 3)], [(0, 1, 2, 3), (0,), ()], [(2,), (2,), (2,)]]


def passes(plan: Any = PLAN, *, set_to_none: bool = True) -> Program:
    """In each step each rank uses the experts that ``plan`` says."""

    def program(model: nn.Module, place: Any) -> Iterator[None]:
        for batch, chosen in zip(batches(len(plan)), plan, strict=True):
            model.zero_grad(set_to_none=set_to_none)
            loss_of(model, part(batch, place), chosen[place.rank]).backward()
            yield

    return program


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize(("as_views", "skip"), [(True, True), (True, False), (False, True)])
def test_each_rank_may_use_other_parameters_in_each_step(
    as_views: bool, skip: bool, set_to_none: bool
) -> None:
    assert_as_simulated(
        passes(set_to_none=set_to_none),
        3,
        make=experts,
        bucket_cap_mb=SMALL_MB / 5,
        find_unused_parameters=True,
        gradient_as_bucket_view=as_views,
        skip_all_reduce_unused_params=skip,
    )


def backward(model: nn.Module, *chosen: int) -> None:
    loss_of(model, batches(1)[0], chosen).backward()


@on_ranks(1)
def test_unused_parameters_do_not_delay_the_other_buckets(
    group: shoal.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = wrapped(group, experts(), bucket_cap_mb=SMALL_MB / 5, find_unused_parameters=True)
    backward(model, 0, 1, 2, 3)
    record = Recorder(group, monkeypatch)
    model.module.common.weight.register_post_accumulate_grad_hook(lambda _: record.events.append("last"))
    backward(model)
    assert record.events.index("last") > len(model._reducer.buckets) / 2


@on_ranks(1)
def test_buckets_that_nobody_needs_are_not_sent(
    group: shoal.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = []
    options = {"bucket_cap_mb": SMALL_MB / 5, "find_unused_parameters": True}
    for skip in (True, False):
        model = wrapped(group, experts(), skip_all_reduce_unused_params=skip, **options)
        backward(model, 0)
        with monkeypatch.context() as patch:
            record = Recorder(group, patch)
            backward(model, 0)
            counts.append(record.events.count("all_reduce"))
    skipping, sending = counts
    assert skipping <= sending - 3 + 1  # three experts less, one message more


@on_ranks(1)
def test_a_parameter_that_a_reentrant_checkpoint_hides_is_refused_with_advice(
    group: shoal.ProcessGroup,
) -> None:
    def hidden() -> nn.Module:
        return nn.Sequential(*(Checkpointed(nn.Linear(4, 4), reentrant=True) for _ in range(2)))

    x = torch.ones(1, 4, requires_grad=True)
    model = wrapped(group, hidden(), find_unused_parameters=True)
    with pytest.raises(UsageError, match=r"reentrant checkpoint.*static_graph=True"):
        model(x).sum().backward()
    wrapped(group, hidden(), static_graph=True)(x).sum().backward()


class Recycled(nn.Module):
    """A layer in several reentrant checkpoints, and one that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Checkpointed(nn.Sequential(nn.Linear(6, 6), nn.Tanh()), reentrant=True, times=3)
        self.spare, self.head = nn.Linear(6, 6), nn.Linear(6, 3)
        fixed(self.double())

    def forward(self, x: torch.Tensor, _: Any) -> torch.Tensor:
        return self.head(self.layer(x.clone().requires_grad_()))


@pytest.mark.parametrize("as_views", [True, False])
def test_a_static_graph_is_learned_from_the_first_pass(as_views: bool) -> None:
    nothing = [[()] * 2] * 3
    options = {"bucket_cap_mb": SMALL_MB / 5, "gradient_as_bucket_view": as_views}
    assert_as_simulated(passes(nothing), make=Recycled, static_graph=True, **options)


@on_ranks(2)
def test_with_a_static_graph_buckets_are_sent_while_a_layer_is_still_expected(
    group: shoal.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = wrapped(group, Recycled(), static_graph=True, bucket_cap_mb=SMALL_MB / 5)
    backward(model)
    record = Recorder(group, monkeypatch)
    model.module.layer.inner[0].weight.register_hook(lambda _: record.events.append("layer"))
    for _ in range(2):
        record.events.clear()
        backward(model)
        # the head's bucket is sent before the layer's last gradient has come
        assert "layer" in record.events[record.events.index("all_reduce") :]


def test_with_a_static_graph_ranks_may_use_different_parameters() -> None:
    assert_as_simulated(passes([[(0,), (1, 2)]] * 3), make=experts, static_graph=True)


@on_ranks(1)
def test_a_graph_that_is_not_static_after_all_is_named(group: shoal.ProcessGroup) -> None:
    model = wrapped(group, experts(), static_graph=True)
    backward(model, 0)
    with pytest.raises(UsageError, match=r"'experts.1.* arrived more often than in the first"):
        backward(model, 1)


@on_ranks(1)
def test_options_that_contradict_each_other_are_refused(group: shoal.ProcessGroup) -> None:
    with pytest.raises(UsageError, match="needs find_unused_parameters"):
        wrapped(group, skip_all_reduce_unused_params=True)
