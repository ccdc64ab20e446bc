"""Several copies of a model in one process, with the other options of DistributedDataParallel."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import shoal
from shoal.errors import OutOfStep, UnusedParameterError
from shoal.future import Future
from shoal.parallel.hooks import GradBucket
from shoal.parallel.reducer import Reducer
from shoal.parallel.reducer.gradients import ReducerOptions
from shoal.testing import run_threads
from tests.parallel.ddp.test_copies import wrap
from tests.parallel.models import (
    assert_all_equal,
    assert_same_gradients,
    assert_same_parameters,
    batches,
    fixed,
    loss_of,
    mlp,
    on_ranks,
    part,
    sgd,
    train,
)


class Gated(nn.Module):
    """Uses one of its experts, or none."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(6, 3) for _ in range(3))
        self.shared = nn.Linear(6, 3)
        fixed(self.double())

    def forward(self, x: torch.Tensor, expert: int | None) -> torch.Tensor:
        return self.shared(x) + (0 if expert is None else self.experts[expert](x))


@pytest.mark.parametrize("options", [{}, {"skip_all_reduce_unused_params": True}])
def test_unused_parameters_are_found_in_all_copies(options: dict[str, bool]) -> None:
    data = batches(3)
    choices = [(0, 1), (None, 2), (2, 2)]

    def rank(group: shoal.ProcessGroup) -> None:
        model = wrap(Gated(), group, 2, find_unused_parameters=True, **options)
        for (x, y), chosen in zip(data, choices, strict=True):
            model.zero_grad()
            x, y = part((x, y), group)
            ((model(x, chosen[group.rank]) - y) ** 2).mean().backward()
            reference = Gated()
            for other in range(2):
                x, y = (tensor[other::2] for tensor in data[choices.index(chosen)])
                (((reference(x, chosen[other]) - y) ** 2).mean() / 2).backward()
            assert_same_gradients(model, reference)

    on_ranks(2, rank)


def test_an_unused_parameter_is_named_although_copies_hide_nothing() -> None:
    x = batches(1)[0][0]

    def rank(group: shoal.ProcessGroup) -> None:
        model = wrap(Gated(), group, 2)
        with pytest.raises(UnusedParameterError, match=r"rank 0: 'experts\.1\.weight'"):
            model(x, 0).sum().backward()
        model(x, 0)
        with pytest.raises((UnusedParameterError, OutOfStep)):
            model(x, 0).sum().backward()

    on_ranks(2, rank)


def test_a_static_graph_first_seen_by_some_of_the_copies() -> None:
    data = [(x[:rows], y[:rows]) for rows, (x, y) in zip((1, 12, 2), batches(3), strict=True)]
    reference = Gated()

    def rank(group: shoal.ProcessGroup) -> None:
        model = wrap(Gated(), group, 2, static_graph=True)
        for x, y in data:
            model.zero_grad()
            reference.zero_grad()
            ((model(x, 1) - y) ** 2).mean().backward()
            ((reference(x, 1) - y) ** 2).mean().backward()
            assert_same_gradients(model, reference)

    on_ranks(1, rank)


def test_a_communication_hook_gets_the_sum_of_the_copies() -> None:
    batch = batches(1)[0]
    reference = mlp()
    loss_of(reference, batch).backward()

    def doubled(group: shoal.ProcessGroup, bucket: GradBucket) -> Future:
        return group.all_reduce(bucket.buffer(), op="avg").then(lambda f: f.value() * 2)

    def rank(group: shoal.ProcessGroup) -> None:
        model = wrap(mlp(), group, 2)
        model.register_comm_hook(group, doubled)
        loss_of(model, part(batch, group)).backward()
        for a, b in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(a.grad, 2 * b.grad)

    on_ranks(2, rank)


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 4, sparse=True)
        self.head = nn.Linear(4, 2)
        fixed(self.double())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(x).mean(1))


@pytest.mark.parametrize("local", [True, False])
def test_sparse_gradients_of_copies_are_added_up(local: bool) -> None:
    words = torch.randint(0, 20, (2, 6, 5), generator=torch.Generator().manual_seed(3))
    reference = Words()
    for _ in range(1 + local):
        for mine in words:
            (reference(mine).square().sum() / 2).backward()

    def rank(group: shoal.ProcessGroup) -> None:
        model = wrap(Words(), group, 3)
        if local:
            with model.no_sync():
                model(words[group.rank]).square().sum().backward()
        model(words[group.rank]).square().sum().backward()
        for a, b in zip(model.module.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(a.grad.to_dense(), b.grad.to_dense())
        assert model.module.table.weight.grad.is_sparse

    on_ranks(2, rank)


def test_copies_within_a_join() -> None:
    data = batches(4)
    taken = (2, 4)

    def rank(group: shoal.ProcessGroup) -> nn.Module:
        own = mlp()
        model = wrap(own, group, 2)
        with model.join():
            train(model, [part(batch, group) for batch in data[: taken[group.rank]]])
        return own

    results = run_threads(rank, 2, timeout=60)
    assert_all_equal(results)
    reference = mlp()
    optimizer = sgd(reference)
    for step, batch in enumerate(data):
        optimizer.zero_grad()
        for number in range(2):
            if step < taken[number]:
                share = batch[0][number::2], batch[1][number::2]
                (loss_of(reference, share) / 2).backward()
        optimizer.step()
    assert_same_parameters(results[1], reference)


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.body = mlp()
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.body, x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("whole", [True, False])
def test_checkpoints_within_and_around_copies(reentrant: bool, whole: bool) -> None:
    x, y = batches(1)[0]
    x.requires_grad_()
    reference = mlp()
    ((reference(x) - y) ** 2).mean().backward()
    expected, x.grad = x.grad, None

    def rank(group: shoal.ProcessGroup) -> None:
        model = wrap(mlp() if whole else Checkpointed(reentrant), group, 2)
        for _ in range(2):
            model.zero_grad()
            x.grad = None
            output = checkpoint(model, x, use_reentrant=reentrant) if whole else model(x)
            ((output - y) ** 2).mean().backward()
            if not (whole and reentrant):  # whose forward pass runs without gradients
                assert_same_gradients(model, reference)
            torch.testing.assert_close(x.grad, expected)

    on_ranks(1, rank)


def test_gradients_of_copies_may_arrive_in_any_order() -> None:
    """The bits are the same, and the buckets go out in order, whatever comes first."""
    values = torch.randn(2, 3, 8, 5, generator=torch.Generator().manual_seed(1))

    def rank(group: shoal.ProcessGroup) -> list[torch.Tensor]:
        results = []
        for seed in range(5):
            copies = [[torch.zeros(5, requires_grad=True) for _ in range(8)] for _ in range(3)]
            reducer = Reducer(group, [f"p{i}" for i in range(8)], copies, ReducerOptions(cap=64))
            for _ in range(2):
                order = [(c, i) for c in range(3) for i in range(8)]
                random.Random(10 * seed + group.rank).shuffle(order)
                for own in copies[0]:
                    own.grad = None
                total = torch.zeros(())
                for c, i in order:  # autograd goes the way back
                    total = total + (copies[c][i] * values[group.rank, c, i]).sum()
                reducer.expect(total)
                total.backward()
                results.append(torch.stack([own.grad for own in copies[0]]))
        return results

    results = [result for results in run_threads(rank, 2, timeout=60) for result in results]
    torch.testing.assert_close(results[0], values.sum(1).mean(0))
    assert all(torch.equal(result, results[0]) for result in results)
