"""Several copies of a model in one process, with the other options of DistributedDataParallel."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.errors import OutOfStep, UnusedParameterError
from shoal.future import Future
from shoal.parallel.hooks import GradBucket
from shoal.parallel.reducer import Reducer
from shoal.parallel.reducer.gradients import ReducerOptions
from shoal.testing import run_threads
from tests.parallel.models import Checkpointed, batches, experts, loss_of, mlp, part, sentences, words
from tests.parallel.training import (
    assert_as_simulated,
    assert_gradients,
    choosing,
    local,
    on_ranks,
    steps,
    wrapped,
)


def test_unused_parameters_are_left_out_in_all_copies() -> None:
    plan = [((0,), (1,)), ((), (2,)), ((2,), (2,))]
    options = {"find_unused_parameters": True, "skip_all_reduce_unused_params": True}
    assert_as_simulated(choosing(plan), make=experts, copies=2, **options)


@on_ranks(2)
def test_an_unused_parameter_is_named_although_copies_hide_nothing(group: shoal.ProcessGroup) -> None:
    (batch,) = batches(1)
    model = wrapped(group, experts(), copies=2)
    with pytest.raises(UnusedParameterError, match=r"rank 0: 'experts\.1\.weight'"):
        loss_of(model, batch, (0,)).backward()
    loss_of(model, batch, (0,))
    with pytest.raises((UnusedParameterError, OutOfStep)):
        loss_of(model, batch, (0,)).backward()


def test_a_static_graph_first_seen_by_some_of_the_copies() -> None:
    def program(model: nn.Module, place: Any) -> Iterator[None]:
        for rows, (x, y) in zip((1, 12, 2), batches(3), strict=True):
            model.zero_grad()
            loss_of(model, (x[:rows], y[:rows]), (1,)).backward()
            yield

    assert_as_simulated(program, 1, make=experts, copies=2, static_graph=True)


@on_ranks(2)
def test_a_communication_hook_gets_the_sum_of_the_copies(group: shoal.ProcessGroup) -> None:
    (batch,) = batches(1)

    def doubled(group: shoal.ProcessGroup, bucket: GradBucket) -> Future:
        return group.all_reduce(bucket.buffer(), op="avg").then(lambda f: f.value() * 2)

    model = wrapped(group, copies=2)
    model.register_comm_hook(group, doubled)
    loss_of(model, part(batch, group)).backward()
    assert_gradients(model, batch, batch)


@pytest.mark.parametrize("accumulated", [True, False])
def test_sparse_gradients_of_copies_are_added_up(accumulated: bool) -> None:
    def program(model: nn.Module, place: Any) -> Iterator[None]:
        batch = part(sentences(1)[0], place)
        if accumulated:
            with local(model):
                loss_of(model, batch).backward()
        loss_of(model, batch).backward()
        if hasattr(model, "module"):
            assert model.module.table.weight.grad.is_sparse
        yield

    assert_as_simulated(program, make=words, copies=3)


def test_copies_within_a_join() -> None:
    def program(model: nn.Module, place: Any) -> Iterator[None]:
        yield from steps(batches(4)[: 2 + 2 * place.rank])(model, place)

    assert_as_simulated(program, copies=2, within=lambda model: model.join())


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("whole", [True, False])
@on_ranks(1)
def test_checkpoints_within_and_around_copies(
    group: shoal.ProcessGroup, reentrant: bool, whole: bool
) -> None:
    x, y = batches(1)[0]
    x.requires_grad_()
    loss_of(mlp(), (x, y)).backward()
    expected, x.grad = x.grad, None
    model = wrapped(group, mlp() if whole else Checkpointed(mlp(), reentrant), copies=2)
    for _ in range(2):
        model.zero_grad()
        x.grad = None
        loss_of(Checkpointed(model, reentrant) if whole else model, (x, y)).backward()
        if not (whole and reentrant):  # whose forward pass runs without gradients
            assert_gradients(model, (x.detach(), y))
        torch.testing.assert_close(x.grad, expected)


def test_gradients_of_copies_may_arrive_in_any_order() -> None:
    """The bits are the same, and the buckets go out in order, whatever comes first."""
    values = torch.randn(2, 3, 8, 5, generator=torch.Generator().manual_seed(1))

    def rank(group: shoal.ProcessGroup) -> list[torch.Tensor]:
        results = []
        for seed in range(5):
            copies = [[torch.zeros(5, requires_grad=True) for _ in range(8)] for _ in range(3)]
            reducer = Reducer(group, [f"p{i}" for i in range(8)], copies, ReducerOptions(max_bytes=64))
            for _ in range(2):
                order = [(c, i) for c in range(3) for i in range(8)]
                random.Random(10 * seed + group.rank).shuffle(order)
                for own in copies[0]:
                    own.grad = None
                total = torch.zeros(())
                for c, i in order:  # autograd goes the way back
                    total = total + (copies[c][i] * values[group.rank, c, i]).sum()
                reducer.reduce_backward(total)
                total.backward()
                results.append(torch.stack([own.grad for own in copies[0]]))
        return results

    results = [result for results in run_threads(rank, 2) for result in results]
    torch.testing.assert_close(results[0], values.sum(1).mean(0))
    assert all(torch.equal(result, results[0]) for result in results)
