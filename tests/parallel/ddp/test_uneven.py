"""DistributedDataParallel within a Join: ranks with different numbers of batches."""

from __future__ import annotations

import contextlib
import copy
import threading

import pytest
import torch
from torch import nn

import shoal
from shoal.errors import GroupAborted, UnevenInputs, UnusedParameterError, UsageError
from shoal.parallel.hooks import GradBucket
from tests.parallel.models import (
    SMALL_MB,
    assert_same_parameters,
    batches,
    gradients,
    loss_of,
    mlp,
    on_ranks,
    sgd,
    wrapped,
)
from tests.parallel.reducer.test_unused import Experts

#: How many batches each of three ranks has.
COUNTS = [[3, 1, 5], [0, 2, 2], [4, 0, 0], [2, 2, 2]]


def expected_model(model: nn.Module, counts: list[int], *, by_all: bool) -> nn.Module:
    """Trained in one process: in every step the sum over the ranks with a batch, divided."""
    reference = copy.deepcopy(model)
    data = batches(max(counts) * len(counts))
    optimizer = sgd(reference)
    for step in range(max(counts)):
        active = [rank for rank, count in enumerate(counts) if step < count]
        optimizer.zero_grad()
        for rank in active:
            loss = loss_of(reference, data[step * len(counts) + rank])
            (loss / (len(counts) if by_all else len(active))).backward()
        optimizer.step()
    return reference


OPTIONS = ["find_unused_parameters", "copying", "hook", "skip"]


@pytest.mark.parametrize("by_all", [True, False])
@pytest.mark.parametrize(
    ("counts", "option"),
    [*((counts, "plain") for counts in COUNTS), *((COUNTS[0], option) for option in OPTIONS)],
)
def test_training_goes_on_with_the_ranks_that_have_batches(
    counts: list[int], by_all: bool, option: str
) -> None:
    options = {
        "find_unused_parameters": option in ("find_unused_parameters", "skip"),
        "skip_all_reduce_unused_params": option == "skip",
        "gradient_as_bucket_view": option != "copying",
    }

    def average(_: None, bucket: GradBucket) -> shoal.Future[torch.Tensor]:
        return bucket.group.all_reduce(bucket.buffer(), op="avg")

    def rank(group: shoal.ProcessGroup) -> nn.Module:
        data = batches(max(counts) * group.size)
        model = shoal.DistributedDataParallel(mlp(), group=group, bucket_cap_mb=SMALL_MB, **options)
        if option == "hook":
            model.register_comm_hook(None, average)
        optimizer = sgd(model)
        with model.join(divide_by_initial_world_size=by_all):
            for step in range(counts[group.rank]):
                optimizer.zero_grad()
                loss_of(model, data[step * group.size + group.rank]).backward()
                optimizer.step()
        return model.module

    expected = expected_model(mlp(), counts, by_all=by_all)
    first, *others = on_ranks(3, rank)
    assert_same_parameters(first, expected)
    for other in others:
        for a, b in zip(first.parameters(), other.parameters(), strict=True):
            assert torch.equal(a, b)


def test_a_rank_without_a_batch_learns_from_the_others_what_a_static_graph_uses() -> None:
    def rank(group: shoal.ProcessGroup) -> list[torch.Tensor]:
        model = wrapped(group, static_graph=True)
        for counts in ([2, 0], [1, 2]):
            with model.join():
                for batch in batches(counts[group.rank]):
                    model.zero_grad()
                    loss_of(model, batch).backward()
        return gradients(model)

    first, second = on_ranks(2, rank)
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)


def test_buffers_follow_the_ranks_that_have_batches() -> None:
    counts = [1, 3]

    def rank(group: shoal.ProcessGroup) -> nn.Module:
        random = torch.Generator().manual_seed(group.rank)
        model = shoal.DistributedDataParallel(
            nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).double(), group=group
        )
        with shoal.Join([model]):
            for _ in range(counts[group.rank]):
                model(torch.randn(8, 4, generator=random, dtype=torch.float64)).square().sum().backward()
        return model.module

    first, second = on_ranks(2, rank)
    assert first[1].num_batches_tracked.item() == 3
    for a, b in zip(first.state_dict().values(), second.state_dict().values(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("counts", [[2, 0], [4, 2], [0, 4]])
def test_gradients_accumulate_without_synchronisation_in_uneven_numbers_of_steps(counts: list[int]) -> None:
    data = batches(12)

    def rank(group: shoal.ProcessGroup) -> nn.Module:
        model = shoal.DistributedDataParallel(mlp(), group=group, bucket_cap_mb=SMALL_MB)
        optimizer = sgd(model)
        with model.join():
            for step in range(0, counts[group.rank], 2):
                optimizer.zero_grad()
                with model.no_sync():
                    loss_of(model, data[2 * step + group.rank]).backward()
                loss_of(model, data[2 * step + 2 + group.rank]).backward()
                optimizer.step()
        return model.module

    reference = mlp()
    optimizer = sgd(reference)
    for step in range(0, max(counts), 2):
        optimizer.zero_grad()
        for number in range(2):
            if step < counts[number]:
                (loss_of(reference, data[2 * step + number]) / 2).backward()
                (loss_of(reference, data[2 * step + 2 + number]) / 2).backward()
        optimizer.step()
    for module in on_ranks(2, rank):
        assert_same_parameters(module, reference)


def test_a_rank_without_any_batch_takes_part_in_finding_the_order() -> None:
    def rank(group: shoal.ProcessGroup) -> list[tuple[int, ...]]:
        model = shoal.DistributedDataParallel(mlp(), group=group, bucket_cap_mb=SMALL_MB)
        with model.join():
            for batch in batches(3) if group.rank == 1 else []:
                loss_of(model, batch).backward()
        # Together again, after the Join.
        loss_of(model, batches(1)[0]).backward()
        return [bucket.members for bucket in model._reducer.buckets]

    first, second = on_ranks(2, rank)
    assert first == second


def test_experts_that_only_ranks_with_batches_use() -> None:
    def rank(group: shoal.ProcessGroup) -> list[torch.Tensor | None]:
        model = shoal.DistributedDataParallel(Experts(), group=group, find_unused_parameters=True)
        with model.join():
            for step in range(1 + group.rank):
                model.zero_grad()
                model(torch.ones(1, 4, dtype=torch.float64), (step,)).sum().backward()
        return [parameter.grad for parameter in model.parameters()]

    _, second = on_ranks(2, rank)
    names = [name for name, _ in Experts().named_parameters()]
    assert {name for name, gradient in zip(names, second, strict=True) if gradient is not None} == {
        "common.weight",
        "common.bias",
        "experts.1.weight",
        "experts.1.bias",
    }


def test_the_first_rank_that_runs_out_ends_the_training_of_all_if_asked_to() -> None:
    def rank(group: shoal.ProcessGroup) -> int:
        model = shoal.DistributedDataParallel(mlp(), group=group)
        steps = 0

        def unevenly() -> None:
            nonlocal steps
            with model.join(throw_on_early_termination=True):
                for batch in batches(2 + group.rank):
                    loss_of(model, batch).backward()
                    steps += 1

        with pytest.raises(UnevenInputs, match="rank 0"):
            unevenly()
        loss_of(model, batches(1)[0]).backward()  # the group is well
        return steps

    assert on_ranks(2, rank) == [2, 2]


def test_ranks_that_treat_a_batch_differently_are_named() -> None:
    def rank(group: shoal.ProcessGroup) -> None:
        model = shoal.DistributedDataParallel(mlp(), group=group)

        def differently() -> None:
            with model.join(), model.no_sync() if group.rank else contextlib.nullcontext():
                loss_of(model, batches(1)[0])

        with pytest.raises(UsageError, match=r"rank 0: reduce_after_buffers\n  rank 1: local"):
            differently()

    on_ranks(2, rank)


def test_what_goes_wrong_in_a_step_is_raised_by_ranks_without_a_batch_too() -> None:
    def rank(group: shoal.ProcessGroup) -> None:
        model = shoal.DistributedDataParallel(Experts(), group=group)

        def wrongly() -> None:
            with model.join():
                if group.rank == 1:
                    model(torch.ones(1, 4, dtype=torch.float64), ()).sum().backward()

        with pytest.raises(UnusedParameterError, match=r"rank 1: 'experts\.0\.weight'"):
            wrongly()

    on_ranks(2, rank)


def test_without_a_join_nothing_is_asked_of_the_others() -> None:
    def rank(group: shoal.ProcessGroup) -> None:
        model = shoal.DistributedDataParallel(mlp(), group=group)
        before = group._number
        with model.join(enable=False):
            loss_of(model, batches(1)[0]).backward()
        inside = group._number - before
        loss_of(model, batches(1)[0]).backward()
        assert group._number - before - inside <= inside

    on_ranks(2, rank)


@pytest.mark.parametrize("synchronised", [True, False])
def test_forward_does_not_wait_for_the_other_ranks(synchronised: bool) -> None:
    forward_returned = threading.Event()

    def rank(group: shoal.ProcessGroup) -> None:
        model = shoal.DistributedDataParallel(mlp(), group=group)
        with model.join(), contextlib.nullcontext() if synchronised else model.no_sync():
            if group.rank == 1:
                assert forward_returned.wait(30), "rank 0 waits in forward for this rank's"
            loss = loss_of(model, batches(1)[0])
            if group.rank == 0:
                forward_returned.set()
            loss.backward()

    on_ranks(2, rank)


def test_ranks_that_treat_a_batch_differently_are_named_in_backward() -> None:
    def rank(group: shoal.ProcessGroup) -> None:
        model = shoal.DistributedDataParallel(mlp(), group=group)

        def differently() -> None:
            with model.join(), model.no_sync() if group.rank else contextlib.nullcontext():
                for batch in batches(2):
                    loss_of(model, batch).backward()

        with pytest.raises(
            (UsageError, GroupAborted), match=r"rank 0: reduce_after_buffers(\n|\\n)  rank 1: local"
        ):
            differently()

    on_ranks(2, rank)
