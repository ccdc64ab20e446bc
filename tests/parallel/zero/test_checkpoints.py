"""State dictionaries: complete, those of the optimiser inside, and good for any number of ranks."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.errors import UsageError
from shoal.testing import run_threads
from tests.parallel.training import assert_same_bits, on_ranks, values

from .training import STEPS, groups_of, mixed, named, train, zero


def _saved(model: nn.Module, optimizer: shoal.ZeroRedundancyOptimizer, to: int) -> tuple[Any, bytes | None]:
    """What a training script would write to a file, on rank ``to``."""
    optimizer.consolidate_state_dict(to=to)
    if optimizer.group.rank != to:
        return copy.deepcopy(model.state_dict()), None
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    return copy.deepcopy(model.state_dict()), file.getvalue()


def _load(saved: bytes) -> Any:
    return torch.load(io.BytesIO(saved), weights_only=True)


def test_training_goes_on_with_another_number_of_ranks() -> None:
    """4 ranks, then 2, then 3, then the optimiser inside alone: as if one rank had trained all along."""
    alone = mixed()
    train(alone, torch.optim.Adam(alone.parameters(), lr=0.01), range(4 * STEPS))

    def rank(group: shoal.ProcessGroup, begin: int, saved: Any) -> tuple[Any, bytes | None]:
        own = mixed()
        optimizer = zero(own, group, lr=7)
        if saved is not None:
            own.load_state_dict(saved[0])
            optimizer.load_state_dict(_load(saved[1]))
        else:
            optimizer.param_groups[0]["lr"] = 0.01
        train(own, optimizer, range(begin, begin + STEPS))
        return _saved(own, optimizer, to=group.size - 1)

    saved = None
    for turn, size in enumerate((4, 2, 3)):
        saved = run_threads(rank, size, turn * STEPS, saved)[size - 1]
    assert saved is not None
    model = mixed()
    model.load_state_dict(saved[0])
    optimizer = torch.optim.Adam(model.parameters(), lr=7)
    optimizer.load_state_dict(_load(saved[1]))
    train(model, optimizer, range(3 * STEPS, 4 * STEPS))
    assert_same_bits(values(model), values(alone))


@pytest.mark.parametrize("groups", [groups_of, named])
@pytest.mark.parametrize("size", [1, 3])
def test_the_state_is_that_of_the_optimiser_inside(groups: Any, size: int) -> None:
    alone = mixed()
    optimizer = torch.optim.AdamW(groups(alone), lr=0.01)
    train(alone, optimizer)

    def rank(group: shoal.ProcessGroup) -> Any:
        own = mixed()
        distributed = zero(own, group, torch.optim.AdamW, groups)
        train(own, distributed)
        distributed.consolidate_state_dict()
        return distributed.state_dict() if group.rank == 0 else None

    actual, expected = run_threads(rank, size)[0], optimizer.state_dict()
    assert actual["param_groups"] == expected["param_groups"]
    assert list(actual["state"]) == list(expected["state"])
    for number, state in expected["state"].items():
        assert list(actual["state"][number]) == list(state)
        assert_same_bits(actual["state"][number].values(), state.values())


def test_each_rank_keeps_only_its_part_of_a_loaded_state() -> None:
    whole = mixed()
    optimizer = torch.optim.Adam(whole.parameters())
    train(whole, optimizer)
    saved = optimizer.state_dict()

    def rank(group: shoal.ProcessGroup) -> set[int]:
        own = mixed()
        distributed = zero(own, group)
        distributed.load_state_dict(copy.deepcopy(saved))
        assert distributed.state is distributed.optim.state
        numbers = {id(parameter): number for number, parameter in enumerate(own.parameters())}
        return {numbers[id(parameter)] for parameter in distributed.state}

    parts = run_threads(rank, 3)
    assert sum(len(part) for part in parts) == len(saved["state"])
    assert set.union(*parts) == set(saved["state"])


@on_ranks(2)
def test_a_rank_without_the_state_says_so_and_how_to_get_it(group: shoal.ProcessGroup) -> None:
    own = mixed()
    optimizer = zero(own, group)
    wanted = rf"rank {group.rank} has only its own part .* consolidate_state_dict\(to={group.rank}\)"
    with pytest.raises(UsageError, match=wanted):
        optimizer.state_dict()
    optimizer.consolidate_state_dict(to=1)
    if group.rank == 1:
        optimizer.state_dict()
    else:
        with pytest.raises(UsageError, match=wanted):
            optimizer.state_dict()
    train(own, optimizer, [0])
    with pytest.raises(UsageError, match=wanted):  # it would be that of an earlier step
        optimizer.state_dict()


@on_ranks(2)
def test_a_state_of_other_groups_is_refused(group: shoal.ProcessGroup) -> None:
    own = mixed()
    optimizer = zero(own, group)
    saved = torch.optim.Adam(groups_of(own)).state_dict()
    with pytest.raises(UsageError, match=r"groups with \[4, 6\] parameters, .* groups with \[10\]"):
        optimizer.load_state_dict(saved)
    with pytest.raises(UsageError, match="to=2 is not a rank"):
        optimizer.consolidate_state_dict(to=2)


def test_hooks_around_saving_and_loading_are_called() -> None:
    def rank(group: shoal.ProcessGroup) -> list[str]:
        own = mixed()
        optimizer = zero(own, group)
        log: list[str] = []

        def renamed(_: object, state: dict[str, Any]) -> dict[str, Any]:
            log.append("saved")
            return {**state, "note": "mine"}

        def checked(_: object, state: dict[str, Any]) -> dict[str, Any]:
            log.append(state["note"])
            return {name: value for name, value in state.items() if name != "note"}

        optimizer.register_state_dict_pre_hook(lambda _: log.append("saving"))
        optimizer.register_state_dict_post_hook(renamed)
        optimizer.register_load_state_dict_pre_hook(checked)
        optimizer.register_load_state_dict_post_hook(lambda _: log.append("loaded"))
        optimizer.load_state_dict(optimizer.state_dict())
        return log

    assert run_threads(rank, 1) == [["saving", "saved", "mine", "loaded"]]


@on_ranks(3)
def test_state_that_is_no_tensor_travels_too(group: shoal.ProcessGroup) -> None:
    class Noting(torch.optim.SGD):
        """Keeps things of all kinds."""

        def step(self, closure: Any = None) -> Any:
            loss = super().step(closure)
            self.state["steps"] = self.state.get("steps", 0) + 1
            for group in self.param_groups:
                for parameter in group["params"]:
                    self.state[parameter] = {"seen": [parameter.numel(), {"copy": parameter.detach() + 1}]}
            return loss

    own = mixed()
    optimizer = zero(own, group, Noting)
    train(own, optimizer)
    optimizer.consolidate_state_dict()
    if group.rank == 0:
        saved = optimizer.state_dict()
        assert saved["state"]["steps"] == STEPS
        optimizer.load_state_dict(saved)
        assert optimizer.state["steps"] == STEPS
        for number, parameter in enumerate(own.parameters()):
            (count, inner) = saved["state"][number]["seen"]
            assert count == parameter.numel()
            assert torch.equal(inner["copy"], parameter.detach() + 1)
