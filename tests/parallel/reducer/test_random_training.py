"""Random training programs: every rank's gradients are what a simulation of all ranks in one process finds.

A program is drawn from a seed: options of the wrapper, and steps made of local and reduced passes in all
kinds of order, in which ranks use different parts of a model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any

import pytest
import torch
from torch import nn

from tests.parallel.models import fixed
from tests.parallel.training import assert_as_simulated, local

WIDTH = 4
PARTS = 5


class Parts(nn.Module):
    """Layers in dense and sparse kinds between two that are always used; the caller says which, in order."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.parts = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=k % 2 == 0) for k in range(PARTS - 1))
        self.parts.append(nn.Embedding(10, WIDTH, sparse=sparse))
        self.last = nn.Linear(WIDTH, WIDTH)
        self.last.weight = self.first.weight
        fixed(self.double())

    def forward(self, x: torch.Tensor, uses: Sequence[int]) -> torch.Tensor:
        words = (x[:, 0] * 3).long().abs() % 10
        x = torch.tanh(self.first(x))
        for use in uses:
            part = self.parts[use]
            x = x + torch.tanh(part(words) if isinstance(part, nn.Embedding) else part(x))
        return self.last(x)


Uses = list[list[int]]  # which parts each rank uses, in order


@dataclass
class Step:
    zero: str
    local: list[Uses]
    reduced: list[Uses]
    backward: str
    order: list[int]  # of interleaved passes: k the first time is forward through reduced[k], then backward
    asides: list[list[str]]  # what each rank does between forward and backward


@dataclass
class Drawn:
    """What all ranks do."""

    seed: int
    size: int
    options: dict[str, Any]
    sparse: bool
    steps: list[Step] = field(default_factory=list)


def drawn(seed: int) -> Drawn:
    random = Random(seed)
    size = random.choice([2, 2, 3, 4])
    mode = random.choice(["plain", "find_unused_parameters", "find_unused_parameters", "static_graph"])
    options: dict[str, Any] = {
        "bucket_cap_mb": random.choice([0.0001, 0.0004, 25]),
        "gradient_as_bucket_view": random.random() < 0.7,
    }
    if mode != "plain":
        options[mode] = True
    program = Drawn(seed, size, options, sparse=random.random() < 0.4)

    def uses() -> Uses:
        if mode == "plain":
            everything = [*range(PARTS), random.randrange(PARTS)]
            return [random.sample(everything, len(everything)) for _ in range(size)]
        return [random.choices(range(PARTS), k=random.randrange(4)) for _ in range(size)]

    always = uses()
    for number in range(5):
        static = mode == "static_graph"
        count = 1 if static or number == 0 else random.choice([1, 1, 2, 3, 3])
        # In training mode all ranks go forward equally often.
        of_all = random.choices(["nothing", "nothing", "dropped", "grad"], k=1)
        program.steps.append(
            Step(
                zero=random.choice(["none", "zeros", "keep"]),
                local=[always if static else uses() for _ in range(random.choice([0, 0, 1, 2]))],
                reduced=[always if static else uses() for _ in range(count)],
                backward="together" if static else random.choice(["together", "interleaved", "again"]),
                order=random.sample([*range(count), *range(count)], 2 * count),
                asides=[[*of_all, *random.choices(["nothing", "no_grad", "eval"], k=2)] for _ in range(size)],
            )
        )
    if mode == "find_unused_parameters" and random.random() < 0.5:
        # All parts are used in the first pass, so the order of the buckets is that of the parts.
        program.steps[0].reduced = [[list(range(PARTS)) for _ in range(size)]]
    return program


def played(program: Drawn, model: nn.Module, place: Any) -> Iterator[None]:
    random = torch.Generator().manual_seed(program.seed * 10 + place.rank)

    def loss(uses: Uses) -> torch.Tensor:
        x = torch.randn(3, WIDTH, generator=random, dtype=torch.float64)
        return model(x, uses[place.rank]).square().mean()

    def asides() -> None:
        for aside in step.asides[place.rank]:
            _aside(aside, model, lambda: loss(step.reduced[0]))

    for step in program.steps:
        if step.zero != "keep":
            model.zero_grad(set_to_none=step.zero == "none")
        for uses in step.local:
            with local(model):
                loss(uses).backward()
        if step.backward == "interleaved":
            living: dict[int, torch.Tensor] = {}
            for number in step.order:
                if number in living:
                    living.pop(number).backward()
                    yield
                else:
                    living[number] = loss(step.reduced[number])
                    asides()
            continue
        losses = [loss(uses) for uses in step.reduced]
        asides()
        if step.backward == "together":
            sum(losses).backward()
            yield
        else:
            losses[0].backward(retain_graph=True)
            yield
            losses[0].backward()
            yield


def _aside(what: str, model: nn.Module, loss: Any) -> None:
    if what == "no_grad":
        with torch.no_grad():
            loss()
    elif what == "eval":
        model.eval()
        loss()
        model.train()
    elif what == "dropped":
        loss()
    elif what == "grad":
        torch.autograd.grad(loss(), list(model.parameters()), allow_unused=True)


@pytest.mark.parametrize("seed", range(40))
def test_gradients_are_those_of_the_simulation(seed: int) -> None:
    program = drawn(seed)
    assert_as_simulated(
        partial(played, program),
        program.size,
        make=lambda: Parts(program.sparse),
        where=program,
        **program.options,
    )
