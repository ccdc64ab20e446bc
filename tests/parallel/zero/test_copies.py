"""Several owners of each parameter: the division, equality with the optimiser inside, memory, checkpoints."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import shoal
from shoal import UsageError
from shoal.parallel.zero.partition import Partition
from shoal.testing import run_threads
from tests.parallel.models import fixed
from tests.parallel.training import assert_same_bits, on_ranks, pairwise, values

from .training import STEPS, groups_of, mixed, train, zero


def parameters_of(sizes: Sequence[int]) -> list[torch.Tensor]:
    return [torch.empty(size, requires_grad=True) for size in sizes]


def deep() -> nn.Module:
    """Many parameters of like sizes."""
    return fixed(nn.Sequential(*[nn.Linear(32, 32, dtype=torch.float64) for _ in range(24)]))


def bytes_of(state: dict[Any, Any]) -> int:
    return sum(value.nbytes for each in state.values() for value in each.values() if value.dim())


@given(st.lists(st.integers(0, 50), min_size=1, max_size=30), st.integers(1, 6), st.data())
def test_copies_are_on_different_ranks_and_evenly_shared_out(sizes: list[int], size: int, data: Any) -> None:
    copies = data.draw(st.integers(1, size))
    hosts = data.draw(st.lists(st.integers(0, 2), min_size=size, max_size=size))
    parameters = parameters_of(sizes)
    partition = Partition(size, copies, hosts)
    partition.add(parameters)
    loads, sends = [0] * size, [0] * size
    for parameter in parameters:
        owners = partition.owners(parameter)
        assert len(set(owners)) == len(owners) == copies
        assert partition.owner(parameter) == owners[0]
        sends[owners[0]] += parameter.nbytes
        for rank in owners:
            loads[rank] += parameter.nbytes
    largest = max(parameter.nbytes for parameter in parameters)
    assert max(loads) <= 4 / 3 * sum(loads) / size + largest
    if copies == 1:
        assert loads == sends


def test_copies_are_on_different_hosts_unless_that_fills_one() -> None:
    parameters = parameters_of([7, 5, 5, 4, 3, 3, 2, 1] * 4)
    for hosts in ([0, 0, 1, 1], [0, 1, 0, 1, 2], [3, 5]):
        partition = Partition(len(hosts), 2, hosts)
        partition.add(parameters)
        for parameter in parameters:
            one, other = partition.owners(parameter)
            assert hosts[one] != hosts[other]
    lopsided = Partition(5, 2, [0, 0, 0, 0, 1])
    lopsided.add(parameters)
    alone = sum(parameter.nbytes for parameter in parameters if 4 in lopsided.owners(parameter))
    even = 2 / 5 * sum(parameter.nbytes for parameter in parameters)
    assert even < alone <= 4 / 3 * even


@given(st.lists(st.integers(1, 50), min_size=1, max_size=20), st.integers(2, 5), st.data())
def test_who_has_state_keeps_it_and_the_emptiest_take_what_is_missing(
    sizes: list[int], size: int, data: Any
) -> None:
    some = st.sets(st.integers(0, size - 1), min_size=1, max_size=size)
    held = [data.draw(some) for _ in sizes]
    parameters = parameters_of(sizes)
    partition = Partition(size, 2)
    partition.add(parameters, held)
    idle = set(range(size)).difference(*held)
    for parameter, has in zip(parameters, held, strict=True):
        owners = partition.owners(parameter)
        assert len(set(owners)) == 2
        assert owners[0] in has
        if len(has) >= 2:
            assert len(set(owners) - has) == len(set(owners) & idle) <= 1
        else:
            assert has <= set(owners)


def test_ranks_without_state_are_given_their_share() -> None:
    parameters = parameters_of([4] * 24)
    before = Partition(3, 2)
    before.add(parameters)
    after = Partition(4, 2)
    after.add(parameters, [before.owners(parameter) for parameter in parameters])
    loads = [sum(rank in after.owners(parameter) for parameter in parameters) for rank in range(4)]
    assert loads == [12] * 4


@pytest.mark.parametrize(
    ("hosts", "said"),
    [(["a", "a", "a"], [0, 0, 0]), (["a", "b", "a"], [0, 1, 0])],
)
def test_a_group_knows_who_shares_a_host(hosts: list[str], said: list[int]) -> None:
    def rank(group: shoal.ProcessGroup) -> None:
        assert group._links.hosts(group._spec) == said
        if group.rank:
            with group.subgroup([2, 1]) as pair:
                assert pair._links.hosts(pair._spec) == [said[2], said[1]]

    run_threads(rank, 3, hosts=hosts)


@pairwise(optimizer=["SGD", "Adam"], as_views=[False, True], size=[2, 3, 4], copies=[2, "size"])
def test_copies_change_nothing(optimizer: str, as_views: bool, size: int, copies: Any) -> None:
    alone = mixed()
    optimizer_class: Any = getattr(torch.optim, optimizer)
    train(alone, optimizer_class(groups_of(alone), lr=0.01))
    expected = values(alone)

    def rank(group: shoal.ProcessGroup) -> None:
        own = mixed()
        many = group.size if copies == "size" else copies
        options = {"parameters_as_bucket_view": as_views, "copies": many}
        train(own, zero(own, group, optimizer_class, groups_of, **options))
        assert_same_bits(values(own), expected)

    run_threads(rank, size)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_the_state_of_a_rank_is_its_share_of_the_copies(size: int) -> None:
    alone = deep()
    optimizer = torch.optim.Adam(alone.parameters(), lr=0.01)

    def one_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()

    one_step(alone, optimizer)
    whole = bytes_of(optimizer.state)

    def rank(group: shoal.ProcessGroup) -> tuple[int, int]:
        model = deep()
        distributed = zero(model, group, copies=2)
        one_step(model, distributed)
        sent = sum(p.nbytes for p in model.parameters() if distributed.owner(p) == group.rank)
        return bytes_of(distributed.state), sent

    parts = run_threads(rank, size)
    assert sum(state for state, _ in parts) == 2 * whole
    assert max(state for state, _ in parts) <= 1.05 * 2 * whole / size
    parameters = sum(parameter.nbytes for parameter in alone.parameters())
    assert sum(sent for _, sent in parts) == parameters  # no more than with one copy
    assert max(sent for _, sent in parts) <= 1.2 * parameters / size


def test_the_state_is_saved_once_and_loaded_by_all_owners() -> None:
    alone = mixed()
    optimizer = torch.optim.AdamW(alone.parameters(), lr=0.01)
    train(alone, optimizer, range(2 * STEPS))
    expected = optimizer.state_dict()

    def rank(group: shoal.ProcessGroup, saved: Any) -> Any:
        own = mixed()
        distributed = zero(own, group, torch.optim.AdamW, copies=2)
        if saved is not None:
            own.load_state_dict(saved[0])
            distributed.load_state_dict(copy.deepcopy(saved[1]))  # ranks are threads
        begin = 0 if saved is None else STEPS
        train(own, distributed, range(begin, begin + STEPS))
        distributed.consolidate_state_dict(to=1)
        return (own.state_dict(), distributed.state_dict()) if group.rank == 1 else None

    saved = None
    for size in (4, 3):
        saved = run_threads(rank, size, saved)[1]
    assert saved is not None
    assert list(saved[1]["state"]) == list(expected["state"])
    for number, state in expected["state"].items():
        assert_same_bits(saved[1]["state"][number].values(), state.values())


@on_ranks(2)
def test_copies_that_cannot_be_are_refused(group: shoal.ProcessGroup) -> None:
    model = mixed()
    for copies in (0, 3, True, 1.0, "2"):
        with pytest.raises(UsageError, match="expected 1 to 2: each copy of a state is on another rank"):
            zero(model, group, copies=copies)
    with pytest.raises(
        UsageError, match="a hook that updates parameters in backward supports one owner only"
    ):
        zero(model, group, copies=2, overlap_with_ddp=True)
    with pytest.raises(shoal.ModelMismatch, match="rank 1: option copies is 2, but 1 on rank 0"):
        zero(model, group, copies=1 + group.rank)
    assert zero(model, group, copies=2).copies == 2
