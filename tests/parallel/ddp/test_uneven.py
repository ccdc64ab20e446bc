"""DistributedDataParallel within a Join: ranks with different numbers of batches."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.errors import GroupAborted, UnevenInputs, UnusedParameterError, UsageError
from shoal.parallel.hooks import GradBucket
from shoal.testing import run_threads
from tests.parallel.models import Experts, Normed, batches, experts, loss_of
from tests.parallel.training import (
    Program,
    Tensors,
    assert_as_simulated,
    assert_same_bits,
    choosing,
    gradients,
    local,
    on_ranks,
    sgd,
    steps,
    wrapped,
)

#: How many batches each of three ranks has.
COUNTS = [[3, 1, 5], [0, 2, 2], [4, 0, 0], [2, 2, 2]]


def taking(counts: list[int]) -> Program:
    """Training in which each rank takes whole batches of its own, as many as ``counts`` says."""

    def program(model: nn.Module, place: Any) -> Iterator[None]:
        data = batches(max(counts) * place.size)[place.rank :: place.size][: counts[place.rank]]
        return steps(data, whole=True)(model, place)

    return program


@pytest.mark.parametrize(
    ("counts", "option", "by_all"),
    [
        *((counts, "plain", by_all) for counts in COUNTS for by_all in (True, False)),
        (COUNTS[0], "find_unused_parameters", True),
        (COUNTS[0], "copying", False),
        (COUNTS[0], "hook", True),
        (COUNTS[0], "skip", False),
    ],
)
def test_training_goes_on_with_the_ranks_that_have_batches(
    counts: list[int], option: str, by_all: bool
) -> None:
    options = {
        "find_unused_parameters": option in ("find_unused_parameters", "skip"),
        "skip_all_reduce_unused_params": option == "skip",
        "gradient_as_bucket_view": option != "copying",
    }

    def average(_: None, bucket: GradBucket) -> shoal.Future[torch.Tensor]:
        return bucket.group.all_reduce(bucket.buffer(), op="avg")

    assert_as_simulated(
        taking(counts),
        3,
        hook=average if option == "hook" else None,
        by_all=by_all,
        within=lambda model: model.join(divide_by_initial_world_size=by_all),
        **options,
    )


def test_a_rank_without_a_batch_learns_from_the_others_what_a_static_graph_uses() -> None:
    def rank(group: shoal.ProcessGroup) -> Tensors:
        model = wrapped(group, static_graph=True)
        for counts in ([2, 0], [1, 2]):
            with model.join():
                for batch in batches(counts[group.rank]):
                    model.zero_grad()
                    loss_of(model, batch).backward()
        return gradients(model)

    assert_same_bits(*run_threads(rank, 2))


def test_buffers_follow_the_ranks_that_have_batches() -> None:
    def rank(group: shoal.ProcessGroup) -> list[torch.Tensor]:
        model = wrapped(group, Normed().double())
        with shoal.Join([model]):
            for batch in batches(4)[group.rank :][: 1 + 2 * group.rank]:
                loss_of(model, batch).backward()
        assert model.module.norm.num_batches_tracked.item() == 3
        return list(model.state_dict().values())

    assert_same_bits(*run_threads(rank, 2))


@pytest.mark.parametrize("counts", [[1, 0], [2, 1], [0, 2]])
def test_gradients_accumulate_without_synchronisation_in_uneven_numbers_of_steps(counts: list[int]) -> None:
    def program(model: nn.Module, place: Any) -> Iterator[None]:
        data = batches(8)[place.rank :: place.size]
        optimizer = sgd(model)
        for step in range(counts[place.rank]):
            optimizer.zero_grad()
            with local(model):
                loss_of(model, data[2 * step]).backward()
            loss_of(model, data[2 * step + 1]).backward()
            yield
            optimizer.step()

    assert_as_simulated(program, within=lambda model: model.join())


def test_a_rank_without_any_batch_takes_part_in_finding_the_order() -> None:
    def rank(group: shoal.ProcessGroup) -> list[tuple[int, ...]]:
        model = wrapped(group)
        with model.join():
            for batch in batches(3) if group.rank == 1 else []:
                loss_of(model, batch).backward()
        # Together again, after the Join.
        loss_of(model, batches(1)[0]).backward()
        return [bucket.members for bucket in model._reducer.buckets]

    first, second = run_threads(rank, 2)
    assert first == second


def test_experts_that_only_ranks_with_batches_use() -> None:
    def program(model: nn.Module, place: Any) -> Iterator[None]:
        return choosing([[(step,)] * 2 for step in range(1 + place.rank)])(model, place)

    assert_as_simulated(program, make=experts, within=lambda model: model.join(), find_unused_parameters=True)


@on_ranks(2)
def test_the_first_rank_that_runs_out_ends_the_training_of_all_if_asked_to(
    group: shoal.ProcessGroup,
) -> None:
    model = wrapped(group)
    done = []

    def unevenly() -> None:
        with model.join(throw_on_early_termination=True):
            for batch in batches(2 + group.rank):
                loss_of(model, batch).backward()
                done.append(batch)

    with pytest.raises(UnevenInputs, match="rank 0"):
        unevenly()
    assert len(done) == 2
    loss_of(model, batches(1)[0]).backward()  # the group is well


@on_ranks(2)
def test_what_goes_wrong_in_a_step_is_raised_by_ranks_without_a_batch_too(group: shoal.ProcessGroup) -> None:
    model = wrapped(group, Experts())

    def wrongly() -> None:
        with model.join():
            if group.rank == 1:
                model(torch.ones(1, 6), ()).sum().backward()

    with pytest.raises(UnusedParameterError, match=r"rank 1: 'experts\.0\.weight'"):
        wrongly()


@on_ranks(2)
def test_without_a_join_nothing_is_asked_of_the_others(group: shoal.ProcessGroup) -> None:
    model = wrapped(group)
    before = group._shortcut.number
    with model.join(enable=False):
        loss_of(model, batches(1)[0]).backward()
    inside = group._shortcut.number - before
    loss_of(model, batches(1)[0]).backward()
    assert group._shortcut.number - before - inside <= inside


@pytest.mark.parametrize("synchronised", [True, False])
def test_forward_does_not_wait_for_the_other_ranks(synchronised: bool) -> None:
    forward_returned = threading.Event()

    def rank(group: shoal.ProcessGroup) -> None:
        model = wrapped(group)
        with model.join(), contextlib.nullcontext() if synchronised else model.no_sync():
            if group.rank == 1:
                assert forward_returned.wait(30), "rank 0 waits in forward for this rank's"
            loss = loss_of(model, batches(1)[0])
            if group.rank == 0:
                forward_returned.set()
            loss.backward()

    run_threads(rank, 2)


@pytest.mark.parametrize("passes", [0, 2])
@on_ranks(2)
def test_ranks_that_treat_a_batch_differently_are_named(group: shoal.ProcessGroup, passes: int) -> None:
    """At the end of the Join, or in backward."""
    model = wrapped(group)

    def differently() -> None:
        with model.join(), model.no_sync() if group.rank else contextlib.nullcontext():
            for batch in batches(max(passes, 1)):
                loss = loss_of(model, batch)
                if passes:
                    loss.backward()

    errors = (UsageError, GroupAborted) if passes else UsageError
    with pytest.raises(errors, match=r"rank 0: reduce_after_buffers(\n|\\n)  rank 1: local"):
        differently()
