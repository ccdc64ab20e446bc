"""Collectives through which gradients flow, against the same computation on one rank."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import shoal
from shoal import ProcessGroup, ReduceOp, UnsupportedOperation, functional
from shoal.group.validation import arguments as validation
from shoal.testing import run_threads

SIZE = 3
#: of all_to_all_single: unequal parts of four elements
SPLITS = [1, 2, 1]


def _input(rank: int, count: int = 4) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(count, generator=generator, dtype=torch.float64, requires_grad=True)


def _loss(rank: int, *outputs: torch.Tensor) -> torch.Tensor:
    """Another function of the outputs on each rank, which does not use all of the first."""
    return sum(
        ((rank + 2) * (number + 1) * y.square().sum() for number, y in enumerate(outputs)), torch.tensor(0.0)
    )


def _parts(x: torch.Tensor) -> list[torch.Tensor]:
    return [(number + 1) * x for number in range(SIZE)]


#: name -> (the function on a rank, the outputs of all ranks from the inputs of all)
CASES: dict[str, tuple[Callable[..., Any], Callable[[list[torch.Tensor]], list[Any]]]] = {
    "sum": (lambda x, g: functional.all_reduce(x, group=g), lambda xs: [sum(xs)] * SIZE),
    "avg": (lambda x, g: functional.all_reduce(x, "avg", group=g), lambda xs: [sum(xs) / SIZE] * SIZE),  # type: ignore[operator]
    "premul_sum": (
        lambda x, g: functional.all_reduce(x, ReduceOp.premul_sum(g.rank + 0.5), group=g),
        lambda xs: [sum((rank + 0.5) * x for rank, x in enumerate(xs))] * SIZE,
    ),
    "transposed": (
        lambda x, g: functional.all_reduce(x.view(2, 2).t(), group=g),
        lambda xs: [sum(x.view(2, 2).t() for x in xs)] * SIZE,
    ),
    "all_gather": (lambda x, g: functional.all_gather(x, group=g), lambda xs: [tuple(xs)] * SIZE),
    "reduce_scatter": (
        lambda x, g: functional.reduce_scatter(_parts(x), group=g),
        lambda xs: [sum(_parts(x)[rank] for x in xs) for rank in range(SIZE)],
    ),
    "reduce_scatter avg": (
        lambda x, g: functional.reduce_scatter(_parts(x), "avg", group=g),
        lambda xs: [sum(_parts(x)[rank] for x in xs) / SIZE for rank in range(SIZE)],  # type: ignore[operator]
    ),
    "broadcast": (lambda x, g: functional.broadcast(x, 1, group=g), lambda xs: [xs[1]] * SIZE),
    "all_to_all": (
        lambda x, g: functional.all_to_all(_parts(x), group=g),
        lambda xs: [tuple(_parts(x)[rank] for x in xs) for rank in range(SIZE)],
    ),
    "all_to_all_single": (
        lambda x, g: functional.all_to_all_single(x, [SPLITS[g.rank]] * SIZE, SPLITS, group=g),
        lambda xs: [torch.cat([x.split(SPLITS)[rank] for x in xs]) for rank in range(SIZE)],
    ),
}  # fmt: skip


def _outputs(value: Any) -> tuple[torch.Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_those_of_the_same_computation_on_one_rank(name: str) -> None:
    distributed, alone = CASES[name]

    def rank(group: ProcessGroup) -> tuple[Any, ...]:
        x = _input(group.rank)
        outputs = _outputs(distributed(x, group))
        (first,) = torch.autograd.grad(_loss(group.rank, *outputs), x, create_graph=name != "broadcast")
        if name == "broadcast":
            return outputs, first
        (second,) = torch.autograd.grad(first.square().sum(), x)
        return outputs, first, second

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = run_threads(rank, SIZE)
    xs = [_input(number) for number in range(SIZE)]
    outputs = [_outputs(each) for each in alone(xs)]
    loss = sum((_loss(number, *each) for number, each in enumerate(outputs)), torch.tensor(0.0))
    first = torch.autograd.grad(loss, xs, create_graph=True, materialize_grads=True)
    squares = sum((each.square().sum() for each in first), torch.tensor(0.0))
    second = torch.autograd.grad(squares, xs, materialize_grads=True)
    for number in range(SIZE):
        for mine, theirs in zip(found[number][0], outputs[number], strict=True):
            torch.testing.assert_close(mine, theirs)
        torch.testing.assert_close(found[number][1], first[number])
        if name != "broadcast":
            torch.testing.assert_close(found[number][2], second[number])


def test_an_output_that_is_not_used_has_a_gradient_of_zero() -> None:
    def rank(group: ProcessGroup) -> torch.Tensor:
        x = _input(group.rank)
        functional.all_gather(x, group=group)[0].sum().backward()
        assert x.grad is not None
        return x.grad

    first, second = run_threads(rank, 2)
    assert torch.equal(first, torch.full((4,), 2.0, dtype=torch.float64))
    assert torch.equal(second, torch.zeros(4, dtype=torch.float64))


def test_reductions_whose_gradients_are_no_reductions_are_refused() -> None:
    with shoal.init() as group:
        for op in ("max", ReduceOp.PRODUCT):
            with pytest.raises(UnsupportedOperation, match="gradients do not flow through ReduceOp"):
                functional.all_reduce(torch.ones(1), op, group=group)
        with pytest.raises(UnsupportedOperation, match="multiply the inputs yourself"):
            functional.reduce_scatter([torch.ones(1)], ReduceOp.premul_sum(2), group=group)
        with pytest.raises(shoal.UsageError, match=r"functional\.all_reduce: group must be"):
            functional.all_reduce(torch.ones(1), group="all")


NATIVE: dict[str, Callable[[ProcessGroup, torch.Tensor], Any]] = {
    "all_reduce": lambda g, x: g.all_reduce(x.clone()),
    "all_gather": lambda g, x: g.all_gather(x),
    "all_gather_single": lambda g, x: g.all_gather_single(torch.empty(1), x),
    "reduce": lambda g, x: g.reduce(x.clone()),
    "gather": lambda g, x: g.gather(x),
    "reduce_scatter": lambda g, x: g.reduce_scatter(torch.empty(1), [x]),
    "reduce_scatter_single": lambda g, x: g.reduce_scatter_single(torch.empty(1), x),
    "scatter": lambda g, x: g.scatter(torch.empty(1), [x]),
    "all_to_all": lambda g, x: g.all_to_all([torch.empty(1)], [x]),
    "all_to_all_single": lambda g, x: g.all_to_all_single(torch.empty(1), x),
}


@pytest.mark.parametrize("name", NATIVE)
def test_an_operation_of_a_group_warns_once_that_gradients_do_not_flow(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(validation, "_warned", set())
    x = torch.ones(1, requires_grad=True)
    with shoal.init() as group:
        with torch.no_grad():
            NATIVE[name](group, x).wait()
        NATIVE[name](group, x.detach()).wait()
        words = re.escape(f"{name} on rank 0: a tensor requires grad, and gradients do not flow through")
        with pytest.warns(UserWarning, match=words) as seen:
            NATIVE[name](group, x).wait()
        assert [each.filename for each in seen] == [__file__]
        NATIVE[name](group, x).wait()  # a second warning would be an error
