"""Random steps give recorded what they give eagerly: views, writes, mixed dtypes, copies, frees."""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import shoal
from shoal.controller import Master
from tests.controller.test_random_programs import NODE, UNARY, WRITES, step

#: steps of the long form
MANY = 60 if os.environ.get("STRESS") == "short" else 400
CALLS = 6
KINDS = ["make", "unary", "binary", "scalar", "cast", "hop", "spread"] + ["view", "write", "free"] * 2


def _waits(fn: Callable[..., Any]) -> bool:
    """Whether an operation waits for its node, which no recorded step may."""
    return "nonzero" in fn.__code__.co_names if hasattr(fn, "__code__") else False


_UNARY = [each for each in UNARY if not _waits(each)]
#: no mask is assigned to
_WRITES = [each for i, each in enumerate(WRITES) if i != 6]


class Step:
    """A step that its seed says.

    Args:
        master: of the nodes.
        seed: says what it does.
    """

    def __init__(self, master: Master, seed: int) -> None:
        self._place = master.nodes
        self._seed = seed

    def __call__(self, *given: Tensor) -> list[Any]:
        choose = random.Random(self._seed)
        values = [given[0].clone(), *given[1:], *(each.clone() for each in given)]
        said: list[str] = []
        for _ in range(choose.randint(5, 40)):
            kind = choose.choice(KINDS)
            at, other, seed = choose.randrange(len(values)), choose.randrange(len(values)), choose.random()
            if kind == "free":
                if len(values) > 1:
                    del values[at]
                continue
            try:
                made = self._made(kind, random.Random(seed), values[at], values[other])
            except (RuntimeError, IndexError, ValueError, TypeError) as error:
                if isinstance(error, shoal.RecordingMismatch):
                    raise
                said.append(type(error).__name__)
                continue
            if made is not None:
                values.append(made)
        return [said, values]

    def _made(self, kind: str, choose: random.Random, x: Tensor, y: Tensor) -> Tensor | None:
        if kind == "hop":
            return (x.to("node:1") * 1).to(NODE)
        if kind == "spread":
            return (x.to(self._place.device) * 1).on(choose.choice(self._place.indices)).to(NODE)
        return step(kind, choose, x, y, NODE, _UNARY, _WRITES)


def _inputs(number: int) -> list[Tensor]:
    """Of a call: other elements each time, one of them a view."""
    torch.manual_seed(number)
    wide = torch.randn(4, 3).to(NODE)
    return [
        wide[1:3],
        torch.randint(0, 4, (3,)).to(NODE),
        torch.tensor([True, number % 2 == 0, False]).to(NODE),
    ]


def _seen(result: Any) -> list[Any]:
    said, values = result
    found: list[Any] = [list(said)]
    for each in values:
        try:
            found.append((each.dtype, tuple(each.shape), each.stride(), repr(each.tolist())))
        except shoal.RemoteOpError:
            found.append("poison")
    return found


def _differences(master: Master, seeds: Sequence[int]) -> tuple[list[str], int]:
    """What recorded steps of these seeds do otherwise than eager ones, and how many calls were replays.

    A step that asks its node for the shape of a result is refused.
    """
    found, replays = [], 0
    for seed in seeds:
        eager = Step(master, seed)
        recorded = master.recorded(eager)
        for number in range(CALLS):
            both = []
            try:
                for call in (eager, recorded):
                    given = _inputs(number)
                    both.append([*_seen(call(*given)), *_seen([[], given])])
            except shoal.RecordingMismatch as error:
                if "waits for its node" not in str(error):
                    found.append(f"step {seed}: {error}")
                break
            if both[0] != both[1]:
                wrong = next((a, b) for a, b in zip(*both, strict=True) if a != b)
                found.append(f"step {seed}, call {number}: {wrong}")
                break
        replays += recorded.replays
        with contextlib.suppress(shoal.RemoteOpError):
            master.synchronize()
    return found, replays


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch deprecates some of what programs may do
def test_steps_give_recorded_what_they_give_eagerly(master: Master) -> None:
    found, replays = _differences(master, range(12))
    assert not found
    assert replays > 12


@pytest.mark.stress
@pytest.mark.filterwarnings("ignore::UserWarning")  # torch deprecates some of what programs may do
def test_many_steps_give_recorded_what_they_give_eagerly(master: Master) -> None:
    found, replays = _differences(master, range(12, 12 + MANY))
    assert not found
    assert replays > 2 * MANY
