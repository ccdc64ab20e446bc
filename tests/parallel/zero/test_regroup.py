"""Over another group: owners keep their state, the emptiest ranks take what is missing."""

from __future__ import annotations

import copy

import pytest
import torch

import shoal
from shoal import ModelMismatch, StateDiverged, StateLost, UsageError, ZeroRedundancyOptimizer
from shoal.testing import run_threads
from tests.parallel.training import assert_same_bits, on_ranks, values

from .training import STEPS, groups_of, mixed, named, train, zero


def assert_state_is(optimizer: ZeroRedundancyOptimizer, alone: torch.optim.Optimizer) -> list[int]:
    """This rank's part of the state is that of the optimiser alone; returns the numbers of its parameters."""
    pairs = zip(_all(optimizer), _all(alone), strict=True)
    numbers = []
    for number, (mine, other) in enumerate(pairs):
        if mine in optimizer.state:
            numbers.append(number)
            assert list(optimizer.state[mine]) == list(alone.state[other])
            assert_same_bits(optimizer.state[mine].values(), alone.state[other].values())
            assert [x.stride() for x in optimizer.state[mine].values()] == [
                x.stride() for x in alone.state[other].values()
            ]
    inside = [p for group in optimizer.optim.param_groups for p in group["params"]]
    assert inside == [p for p in _all(optimizer) if p in optimizer.state]
    return numbers


def _all(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _train_in_turn(group: shoal.ProcessGroup, turns: list[list[int]], as_views: bool) -> list[int] | None:
    """Train in one group after another of some ranks; a rank comes without state, if it comes later."""
    own, alone = mixed(), mixed()
    plain = torch.optim.Adam(groups_of(alone), lr=0.01)
    optimizer = zero(own, None, groups=groups_of, copies=2, parameters_as_bucket_view=as_views)
    owned = None
    for turn, ranks in enumerate(turns):
        steps = range(turn * STEPS, (turn + 1) * STEPS)
        if group.rank in ranks:
            with group.subgroup(ranks) as part:
                if turn:
                    own.load_state_dict(copy.deepcopy(alone.state_dict()))  # as a session sends it
                optimizer.regroup(part)
                train(own, optimizer, steps)
                train(alone, plain, steps)
                assert_same_bits(values(own), values(alone))
                owned = assert_state_is(optimizer, plain)
        else:
            owned = None
            train(alone, plain, steps)
    return owned


@pytest.mark.parametrize("as_views", [False, True], ids=["copies", "views"])
@pytest.mark.parametrize(
    "turns",
    [
        [[0, 1, 2, 3], [0, 3, 2], [2, 0], [0]],
        [[1], [1, 0], [2, 1, 0], [0, 1, 2, 3]],
        [[0, 1], [1, 2], [2, 3, 0]],
    ],
)
def test_ranks_leave_and_come_and_the_state_stays(turns: list[list[int]], as_views: bool) -> None:
    owned = run_threads(_train_in_turn, 4, turns, as_views)
    owners = [sum(number in part for part in owned if part is not None) for number in range(10)]
    expected = min(2, len(turns[-1]))
    assert owners.count(expected) + owners.count(0) == 10  # an empty parameter has state, too
    assert owners[0] == expected


@on_ranks(3)
def test_an_exchange_that_broke_is_done_again(group: shoal.ProcessGroup) -> None:
    own, alone = mixed(), mixed()
    plain = torch.optim.Adam(alone.parameters(), lr=0.01)
    optimizer = zero(own, group, copies=2)
    train(own, optimizer, [0])
    train(alone, plain, [0, 1])
    told: list[BaseException] = []

    class Leading:
        def goes_on(self, error: shoal.GroupError) -> bool:
            told.append(error)
            new = broken.rebuild()
            assert new is not None
            made.append(new)
            optimizer.regroup(new)
            return True

        def settle(self) -> None:
            optimizer.settle()

    made: list[shoal.ProcessGroup] = []
    broken = group.split(0)
    assert broken is not None
    optimizer.regroup(broken)
    optimizer.settle()
    optimizer.follow(Leading())
    if group.rank == 1:
        broken.abort("for the test")
    train(own, optimizer, [1])
    assert_same_bits(values(own), values(alone))
    assert_state_is(optimizer, plain)
    assert len(told) == 1
    optimizer.follow(None)
    optimizer.regroup(group)
    optimizer.settle()
    made[0].close()
    train(own, optimizer, [2])
    train(alone, plain, [2])
    assert_same_bits(values(own), values(alone))


@on_ranks(3)
def test_what_nobody_holds_any_more_is_named(group: shoal.ProcessGroup) -> None:
    own = mixed()
    optimizer = zero(own, group, groups=named, copies=2)
    train(own, optimizer, [0])
    before = copy.deepcopy(own.state_dict())
    optimizer.consolidate_state_dict()
    saved = group.broadcast_object(copy.deepcopy(optimizer.state_dict()) if group.rank == 0 else None).wait()
    with group.split(group.rank) as alone:
        assert alone is not None
        missing = [name for name, p in own.named_parameters() if p not in optimizer.state]
        assert missing
        optimizer.regroup(alone)
        with pytest.raises(StateLost) as caught:
            optimizer.settle()
        assert all(f"parameter '{name}' of group 0" in str(caught.value) for name in missing[:5])
        with pytest.raises(StateLost):
            train(own, optimizer, [1])
        # A checkpoint makes up for it.
        own.load_state_dict(before)
        optimizer.load_state_dict(saved)
        train(own, optimizer, [1])
        other = mixed()
        train(other, torch.optim.Adam(other.parameters(), lr=0.01), [0, 1])
        assert_same_bits(values(own), values(other))


@on_ranks(3)
def test_owners_whose_states_differ_are_named(group: shoal.ProcessGroup) -> None:
    own = mixed()
    optimizer = zero(own, group, copies=3)
    train(own, optimizer, [0])
    if group.rank == 2:
        optimizer.state[own.first.weight]["exp_avg"][0, 0] *= 1 + 2**-20
    optimizer.regroup(group)
    with pytest.raises(StateDiverged, match=r"ranks 0 and 2 own parameter .* of group 0, and have different"):
        optimizer.settle()


@on_ranks(2)
def test_ranks_with_other_parameters_or_settings_are_told(group: shoal.ProcessGroup) -> None:
    own = mixed()
    optimizer = zero(own, None, copies=2, parameters_as_bucket_view=group.rank == 1)
    optimizer.regroup(group)
    with pytest.raises(ModelMismatch, match="rank 1: option parameters_as_bucket_view is True, but False"):
        optimizer.settle()


@on_ranks(3)
def test_a_rank_that_joins_before_the_first_step_takes_the_state_that_was_loaded(
    group: shoal.ProcessGroup,
) -> None:
    own, alone = mixed(), mixed()
    plain = torch.optim.Adam(alone.parameters(), lr=0.01)
    train(alone, plain)
    own.load_state_dict(copy.deepcopy(alone.state_dict()))
    optimizer = zero(own, None, copies=2)
    if group.rank < 2:
        optimizer.load_state_dict(copy.deepcopy(plain.state_dict()))
    else:
        optimizer.discard_state()
    optimizer.regroup(group)
    train(own, optimizer, [1])
    train(alone, plain, [1])
    assert_same_bits(values(own), values(alone))
    assert assert_state_is(optimizer, plain)


def test_without_a_group_it_says_what_is_missing() -> None:
    own, alone = mixed(), mixed()
    with pytest.raises(UsageError, match="has no default group of shoal"):
        zero(own, None)
    with pytest.raises(UsageError, match="copies=0: expected 1 to the size of the group"):
        zero(own, None, copies=0)
    optimizer = zero(own, None, copies=2)
    for fn in (optimizer.step, optimizer.consolidate_state_dict, optimizer.settle):
        if fn == optimizer.settle:
            fn()  # nothing is new
            continue
        with pytest.raises(UsageError, match=r"made without a group, for the elastic\.Session of a State"):
            fn()
    plain = torch.optim.Adam(alone.parameters(), lr=0.01)
    train(alone, plain)
    optimizer.load_state_dict(plain.state_dict())
    assert_state_is(optimizer, plain)
    assert optimizer.state_dict()["state"].keys() == plain.state_dict()["state"].keys()


@on_ranks(1)
def test_one_copy_cannot_follow(group: shoal.ProcessGroup) -> None:
    optimizer = zero(mixed(), group)
    for fn in (optimizer.check_regroup, lambda: optimizer.regroup(group)):
        with pytest.raises(UsageError, match=r"that part is lost with the rank\.  Make it with copies=2"):
            fn()
