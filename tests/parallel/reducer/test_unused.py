"""Parameters that take no part in the loss: find_unused_parameters, static_graph, and what is not sent."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import shoal
from shoal.errors import UsageError
from tests.parallel.models import SMALL_MB, fixed, on_ranks
from tests.parallel.reducer.test_reducer import Recorder


class Experts(nn.Module):
    """One layer for all, and experts of which a call uses those that it names."""

    def __init__(self, count: int = 4) -> None:
        super().__init__()
        self.common = nn.Linear(4, 4)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(count))
        fixed(self.double())

    def forward(self, x: torch.Tensor, chosen: tuple[int, ...]) -> torch.Tensor:
        x = self.common(x)
        for index in chosen:
            x = torch.tanh(self.experts[index](x))
        return x


#: For each step the experts of each of three ranks.
PLAN = [[(0,), (1,), (0, 1)], [(), (), ()], [(3,), (), (2, 3)], [(0, 1, 2, 3), (0,), ()], [(2,), (2,), (2,)]]


def inputs(step: int, rank: int) -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + rank), dtype=torch.float64)


@pytest.mark.parametrize("as_views", [True, False])
@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_each_rank_may_use_other_parameters_in_each_step(
    as_views: bool, skip: bool, set_to_none: bool
) -> None:
    def rank(group: shoal.ProcessGroup) -> list[dict[str, torch.Tensor | None]]:
        model = shoal.DistributedDataParallel(
            Experts(),
            group=group,
            bucket_cap_mb=SMALL_MB / 5,
            find_unused_parameters=True,
            gradient_as_bucket_view=as_views,
            skip_all_reduce_unused_params=skip,
        )
        seen = []
        for step, plan in enumerate(PLAN):
            model.zero_grad(set_to_none=set_to_none)
            model(inputs(step, group.rank), plan[group.rank]).square().sum().backward()
            seen.append(
                {n: p.grad if p.grad is None else p.grad.clone() for n, p in model.module.named_parameters()}
            )
        return seen

    first, *others = on_ranks(3, rank)
    reference = Experts()
    kept: set[str] = set()  # with set_to_none=False a gradient that was there once stays, as zeros
    for step, plan in enumerate(PLAN):
        reference.zero_grad()
        for number in range(3):
            (reference(inputs(step, number), plan[number]).square().sum() / 3).backward()
        for name, parameter in reference.named_parameters():
            gradient = first[step][name]
            if parameter.grad is None and not (not set_to_none and name in kept):
                assert gradient is None, (step, name)
            else:
                expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                torch.testing.assert_close(gradient, expected)
                kept.add(name)
            for other in others:
                assert (other[step][name] is None) == (gradient is None)
                assert gradient is None or torch.equal(other[step][name], gradient)


def test_unused_parameters_do_not_delay_the_other_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    def rank(group: shoal.ProcessGroup) -> None:
        model = shoal.DistributedDataParallel(
            Experts(), group=group, bucket_cap_mb=SMALL_MB / 5, find_unused_parameters=True
        )
        model(inputs(0, 0), (0, 1, 2, 3)).sum().backward()
        record = Recorder(group, monkeypatch)
        model.module.common.weight.register_post_accumulate_grad_hook(lambda _: record.events.append("last"))
        model(inputs(0, 0), ()).sum().backward()
        assert record.events.index("last") > len(model._reducer.buckets) / 2

    on_ranks(1, rank)


def test_buckets_that_nobody_needs_are_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    def rank(group: shoal.ProcessGroup) -> tuple[int, int]:
        counts = []
        for skip in (True, False):
            model = shoal.DistributedDataParallel(
                Experts(),
                group=group,
                bucket_cap_mb=SMALL_MB / 5,
                find_unused_parameters=True,
                skip_all_reduce_unused_params=skip,
            )
            model(inputs(0, 0), (0,)).sum().backward()
            with monkeypatch.context() as patch:
                record = Recorder(group, patch)
                model(inputs(0, 0), (0,)).sum().backward()
                counts.append(record.events.count("all_reduce"))
        return tuple(counts)

    ((skipping, sending),) = on_ranks(1, rank)
    assert skipping <= sending - 3 + 1  # three experts less, one message more


def test_an_output_that_is_left_out_of_the_loss_is_no_error_when_unused_parameters_are_allowed() -> None:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 2), nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"first": self.first(x), "second": self.second(x)}

    def rank(group: shoal.ProcessGroup) -> None:
        model = shoal.DistributedDataParallel(Heads(), group=group, find_unused_parameters=True)
        for name in ("first", "second", "first"):
            model.zero_grad()
            model(torch.ones(1, 4))[name].sum().backward()
            for head in ("first", "second"):
                gradient = getattr(model.module, head).weight.grad
                assert (gradient is not None) == (head == name)

    on_ranks(2, rank)


def test_a_parameter_that_a_reentrant_checkpoint_hides_is_refused_with_advice() -> None:
    class Hidden(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.second, checkpoint(self.first, x, use_reentrant=True), use_reentrant=True)

    def rank(group: shoal.ProcessGroup) -> None:
        x = torch.ones(1, 4, requires_grad=True)
        model = shoal.DistributedDataParallel(Hidden(), group=group, find_unused_parameters=True)
        with pytest.raises(UsageError, match=r"reentrant checkpoint.*static_graph=True"):
            model(x).sum().backward()
        static = shoal.DistributedDataParallel(Hidden(), group=group, static_graph=True)
        static(x).sum().backward()

    on_ranks(1, rank)


class Recycled(nn.Module):
    """A layer in several reentrant checkpoints, and one that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.spare = nn.Linear(4, 4)
        self.head = nn.Linear(4, 2)
        fixed(self.double())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = torch.tanh(checkpoint(self.layer, x, use_reentrant=True))
        return self.head(x)


@pytest.mark.parametrize("as_views", [True, False])
def test_a_static_graph_is_learned_from_the_first_pass(
    as_views: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rank(group: shoal.ProcessGroup) -> list[torch.Tensor | None]:
        model = shoal.DistributedDataParallel(
            Recycled(),
            group=group,
            static_graph=True,
            bucket_cap_mb=SMALL_MB / 5,
            gradient_as_bucket_view=as_views,
        )
        for step in range(3):
            model.zero_grad()
            with monkeypatch.context() as patch:
                record = Recorder(group, patch)
                model.module.layer.weight.register_hook(lambda _: record.events.append("layer"))  # noqa: B023
                model(inputs(step, group.rank).requires_grad_()).square().sum().backward()
            if step:  # the head's bucket is sent before the layer's last gradient has come
                assert record.events.index("all_reduce") < len(record.events) - record.events[::-1].index(
                    "layer"
                )
        return [parameter.grad for parameter in model.parameters()]

    first, second = on_ranks(2, rank)
    reference = Recycled()
    for number in range(2):
        (reference(inputs(2, number).requires_grad_()).square().sum() / 2).backward()
    for a, b, parameter in zip(first, second, reference.parameters(), strict=True):
        if parameter.grad is None:
            assert a is None
            assert b is None
        else:
            torch.testing.assert_close(a, parameter.grad)
            assert torch.equal(a, b)


def test_with_a_static_graph_ranks_may_use_different_parameters() -> None:
    chosen = [(0,), (1, 2)]

    def rank(group: shoal.ProcessGroup) -> list[torch.Tensor | None]:
        model = shoal.DistributedDataParallel(Experts(), group=group, static_graph=True)
        for step in range(3):
            model.zero_grad()
            model(inputs(step, group.rank), chosen[group.rank]).square().sum().backward()
        return [parameter.grad for parameter in model.parameters()]

    first, second = on_ranks(2, rank)
    reference = Experts()
    for number in range(2):
        (reference(inputs(2, number), chosen[number]).square().sum() / 2).backward()
    for a, b, parameter in zip(first, second, reference.parameters(), strict=True):
        assert (a is None) == (b is None) == (parameter.grad is None)
        if a is not None:
            torch.testing.assert_close(a, parameter.grad)
            assert torch.equal(a, b)


def test_a_graph_that_is_not_static_after_all_is_named() -> None:
    def rank(group: shoal.ProcessGroup) -> None:
        model = shoal.DistributedDataParallel(Experts(), group=group, static_graph=True)
        model(inputs(0, 0), (0,)).sum().backward()
        with pytest.raises(UsageError, match=r"'experts.1.* arrived more often than in the first"):
            model(inputs(0, 0), (1,)).sum().backward()

    on_ranks(1, rank)


def test_options_that_contradict_each_other_are_refused() -> None:
    def rank(group: shoal.ProcessGroup) -> None:
        with pytest.raises(UsageError, match="needs find_unused_parameters"):
            shoal.DistributedDataParallel(Experts(), group=group, skip_all_reduce_unused_params=True)

    on_ranks(1, rank)


def test_gradients_accumulated_without_synchronisation_count_as_used() -> None:
    def rank(group: shoal.ProcessGroup) -> list[torch.Tensor | None]:
        model = shoal.DistributedDataParallel(Experts(), group=group, find_unused_parameters=True)
        with model.no_sync():
            model(inputs(0, group.rank), (group.rank,)).square().sum().backward()
        model(inputs(1, group.rank), ()).square().sum().backward()
        return [copy.deepcopy(parameter.grad) for parameter in model.parameters()]

    first, second = on_ranks(2, rank)
    reference = Experts()
    for number in range(2):
        (reference(inputs(0, number), (number,)).square().sum() / 2).backward()
        (reference(inputs(1, number), ()).square().sum() / 2).backward()
    for a, b, parameter in zip(first, second, reference.parameters(), strict=True):
        assert (a is None) == (parameter.grad is None)
        if a is not None:
            torch.testing.assert_close(a, parameter.grad)
            assert torch.equal(a, b)
