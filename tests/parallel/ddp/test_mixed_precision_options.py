"""Mixed precision, with the other options of DistributedDataParallel."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal import MixedPrecision
from shoal.errors import UnusedParameterError
from shoal.future import Future
from shoal.parallel.core import OUTCOME
from shoal.parallel.hooks import GradBucket, allreduce_hook, hook_then_optimizer
from shoal.parallel.reducer.reducer import Reducer
from shoal.testing import run_threads
from tests.parallel.ddp.half import BF16, HALF, by_hand, wrap
from tests.parallel.models import Experts, Words, batches, fixed, loss_of, mlp, part, sentences
from tests.parallel.training import assert_same_bits, gradients, on_ranks, values


def experts() -> Any:
    return fixed(Experts(3))


@on_ranks(2)
def test_unused_parameters_keep_no_gradient(group: shoal.ProcessGroup) -> None:
    x, y = batches(1, dtype=torch.float32)[0]
    own = experts()
    model = wrap(own, group, HALF, find_unused_parameters=True)
    for _ in range(2):
        own.zero_grad()
        ((model(x, (group.rank,)).float() - y) ** 2).mean().backward()
        assert [expert.weight.grad is None for expert in own.experts] == [False, False, True]
        assert own.experts[0].weight.grad.dtype == torch.float32
    strict = wrap(experts(), group, HALF)
    with pytest.raises(UnusedParameterError, match=r"rank 1: 'experts\.0\.weight'"):
        strict(x, (group.rank,)).sum().backward()


def test_a_communication_hook_gets_low_precision() -> None:
    batch = batches(1, dtype=torch.float32)[0]
    seen = []

    def hook(group: shoal.ProcessGroup, bucket: GradBucket) -> Future:
        seen.append((bucket.buffer().dtype, {parameter.dtype for parameter in bucket.parameters()}))
        return group.all_reduce(bucket.buffer(), op="avg")

    def rank(group: shoal.ProcessGroup) -> None:
        own = mlp(torch.float32)
        model = wrap(own, group, HALF)
        model.register_comm_hook(group, hook)
        loss_of(model, part(batch, group)).backward()
        assert_same_bits(gradients(own), by_hand(own, batch, 2, HALF))

    run_threads(rank, 2)
    assert set(map(str, seen)) == {str((BF16, {torch.float32}))}


@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize("reduce_dtype", [None, torch.float32])
@on_ranks(2)
def test_an_optimiser_in_backward_steps_in_full_precision(
    group: shoal.ProcessGroup, reduce_dtype: torch.dtype | None, copies: int
) -> None:
    precision = MixedPrecision(param_dtype=BF16, reduce_dtype=reduce_dtype)
    results = []
    for inside in (True, False):
        own = mlp(torch.float32)
        model = wrap(own, group, precision, copies=copies)
        optimizer = torch.optim.SGD(own.parameters(), lr=0.1, momentum=0.9)
        if inside:
            model.register_comm_hook(None, hook_then_optimizer(allreduce_hook, optimizer))
        for batch in batches(3, dtype=torch.float32):
            optimizer.zero_grad()
            loss_of(model, part(batch, group)).backward()
            if not inside:
                optimizer.step()
        results.append(own)
    assert_same_bits(*map(values, results))


def test_a_gradient_of_an_optimiser_in_backward_outlives_its_place() -> None:
    """Torch would free it before it forgets where it was, and backward reads there from another thread."""
    seen: list[torch.Tensor | None] = []
    watches = []

    class Watching(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            for parameter in self.param_groups[0]["params"]:
                ends = weakref.ref(parameter.grad, lambda _, owner=parameter: seen.append(owner.grad))
                watches.append(ends)
            super().step(closure)

    def rank(group: shoal.ProcessGroup) -> None:
        own = mlp(torch.float32)
        model = wrap(own, group, HALF)
        optimizer = Watching(own.parameters(), lr=0.1)
        model.register_comm_hook(None, hook_then_optimizer(allreduce_hook, optimizer))
        loss_of(model, part(batches(1, dtype=torch.float32)[0], group)).backward()

    run_threads(rank, 2)
    assert len(seen) == len(watches) == 2 * len(list(mlp().parameters()))
    assert all(gradient is None for gradient in seen)


def test_an_optimiser_in_backward_makes_no_parameter_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """While it steps, the whole bucket has gradients; ranks tell each other just then what they used."""
    x, y = batches(1, dtype=torch.float32)[0]
    of_rank = threading.local()
    send = Reducer.send

    def send_during_the_step(reducer: Reducer, number: int) -> None:
        if number == OUTCOME:
            assert of_rank.stepping.wait(20)
        send(reducer, number)
        if number == OUTCOME:
            of_rank.told.set()

    monkeypatch.setattr(Reducer, "send", send_during_the_step)

    def rank(group: shoal.ProcessGroup) -> None:
        stepping = of_rank.stepping = threading.Event()
        told = of_rank.told = threading.Event()

        class Slow(torch.optim.SGD):
            def step(self, closure: Any = None) -> None:
                stepping.set()
                assert told.wait(20)

        own = experts()
        model = wrap(own, group, HALF, find_unused_parameters=True, bucket_cap_mb=1)
        model.register_comm_hook(None, hook_then_optimizer(allreduce_hook, Slow(own.parameters(), lr=0.1)))
        ((model(x, (group.rank,)).float() - y) ** 2).mean().backward()
        assert [expert.weight.grad is None for expert in own.experts] == [False, False, True]

    run_threads(rank, 2)


@pytest.mark.parametrize("reduce_dtype", [None, torch.float32])
@on_ranks(2)
def test_sparse_gradients_come_in_full_precision(
    group: shoal.ProcessGroup, reduce_dtype: torch.dtype | None
) -> None:
    own = fixed(Words())
    batch = sentences(1)[0]
    precision = MixedPrecision(param_dtype=BF16, reduce_dtype=reduce_dtype)
    model = wrap(own, group, precision, find_unused_parameters=True)
    loss_of(model, batch, group.rank == 0).backward()
    low = fixed(Words()).to(BF16)
    loss_of(low, batch, True).backward()
    assert own.table.weight.grad.is_sparse
    assert own.table.weight.grad.dtype == torch.float32
    exact = low.table.weight.grad.to_dense().float() / 2
    torch.testing.assert_close(own.table.weight.grad.to_dense(), exact, rtol=0.02, atol=1e-4)


def test_mixed_precision_within_a_join() -> None:
    data = batches(4, dtype=torch.float32)

    def rank(group: shoal.ProcessGroup) -> nn.Module:
        own = mlp(torch.float32)
        model = wrap(own, group, HALF)
        optimizer = torch.optim.SGD(own.parameters(), lr=0.1)
        with model.join():
            for batch in data[: 2 + 2 * group.rank]:
                optimizer.zero_grad()
                loss_of(model, part(batch, group)).backward()
                optimizer.step()
        return own

    first, second = run_threads(rank, 2)
    assert_same_bits(values(first), values(second))
