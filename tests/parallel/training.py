"""What the tests of training share: ranks, programs, a simulation of all ranks, and comparison.

**Models and data** are in ``models``: ``mlp`` (nine parameters), ``Experts`` (uses what a call names),
``Words`` (sparse and dense tables), ``Normed`` (buffers), ``Mixed`` (four dtypes), ``Shared`` (a layer used
several times) and ``Checkpointed`` around another.  All take ``batches()``, but for ``Words``, which takes
``sentences()``.

**Ranks** are threads.  ``@on_ranks(2)`` runs a whole test on two ranks; it takes the group as its first
argument.  A test that compares what the ranks found calls ``shoal.testing.run_threads`` itself.  Where ranks
must be processes (another wrapper over Gloo, a device), ``run_processes`` starts them once for all cases.
``@pairwise(size=[2, 3], dtype=[...])`` takes all combinations under ``stress``, and otherwise so many that
each pair of values is among them.

**A program** is what one rank does with its model: a generator that yields after each backward pass that is
reduced.  It knows its rank from ``place.rank`` and ``place.size``, of a group or of a :class:`Place`, and
enters ``local(model)`` for ``no_sync``; ``steps(data)`` is the plain one.

**The simulation** (:func:`simulated`) plays the programs of all ranks in turn with plain models in this
process.  It knows one rule: after a backward pass that is reduced, a gradient is the mean over the ranks of
what each of them has accumulated, where a rank that has none counts as zero, and there is none where no rank
has one.

**Comparison**: :func:`assert_as_simulated` trains on ranks and in the simulation, and holds every gradient
after every pass, and the parameters in the end, against one another: close to the simulation
(:func:`assert_close`: 1e-9 in double precision, otherwise torch's tolerance for the dtype) and equal in every
bit between the ranks.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias

import pytest
import torch
from torch import nn

import shoal
from shoal.errors import ModelMismatch
from shoal.testing import run_threads
from tests.parallel.models import Batch, loss_of, mlp, part

#: So small that every model of ``models`` has several buckets.
SMALL_MB = 0.0005

Tensors: TypeAlias = "list[torch.Tensor | None]"


@dataclass(frozen=True)
class Place:
    """Where a program stands: a rank among others, as a group says it too."""

    rank: int = 0
    size: int = 1


Program: TypeAlias = "Callable[[Any, Place | shoal.ProcessGroup], Iterator[None]]"


# -- ranks -------------------------------------------------------------------------------------------


def on_ranks(size: int | str, **options: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorator: run a test on ranks that are threads.

    Args:
        size: how many; or the name of a parameter of pytest that says it, which the test does not take.
        options: those of ``run_threads``.
    """

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def on_all(**arguments: Any) -> None:
            count = arguments.pop(size) if isinstance(size, str) else size
            run_threads(lambda group: test(group, **arguments), count, **options)

        group, *fixtures = inspect.signature(test).parameters.values()
        assert group.name == "group", "the first argument of a test on ranks is its group"
        if isinstance(size, str):
            fixtures.append(inspect.Parameter(size, inspect.Parameter.KEYWORD_ONLY))
        on_all.__signature__ = inspect.Signature(fixtures)  # type: ignore[attr-defined]
        return on_all

    return decorate


def wrapped(
    group: shoal.ProcessGroup, module: nn.Module | None = None, copies: int = 0, **options: Any
) -> Any:
    """``module``, or else :func:`mlp`, wrapped with small buckets, on several copies if told so."""
    options = {"bucket_cap_mb": SMALL_MB, "device_ids": ["cpu"] * copies or None, **options}
    return shoal.DistributedDataParallel(mlp() if module is None else module, group=group, **options)


def pairwise(**axes: Iterable[Any]) -> Any:
    """``parametrize`` with all combinations of the values of each name.

    Some in which every pair of values occurs run always, the others under ``stress``.
    """
    values = [tuple(axis) for axis in axes.values()]
    rows = list(itertools.product(*(range(len(axis)) for axis in values)))
    pairs = [set(itertools.combinations(enumerate(row), 2)) for row in rows]
    left = set().union(*pairs)
    chosen = set()
    while left:
        best = max(range(len(rows)), key=lambda number: len(pairs[number] & left))
        chosen.add(best)
        left -= pairs[best]

    def name(value: Any, index: int) -> str:
        if isinstance(value, dict):
            return ",".join(value) or "plain"
        return f"{index}" if isinstance(value, tuple) else getattr(value, "__name__", str(value))

    return pytest.mark.parametrize(
        tuple(axes),
        [
            pytest.param(
                *(axis[index] for axis, index in zip(values, row, strict=True)),
                id=" ".join(name(axis[index], index) for axis, index in zip(values, row, strict=True)),
                marks=[] if number in chosen else [pytest.mark.stress],
            )
            for number, row in enumerate(rows)
        ],
    )


def told_alike(call: Callable[[shoal.ProcessGroup], object], size: int) -> str:
    """What ``call`` says of a mismatch on every rank, which must be the same but for who says it."""

    def rank(group: shoal.ProcessGroup) -> str:
        with pytest.raises(ModelMismatch) as caught:
            call(group)
        group.barrier().wait()  # the group is as good as before
        return str(caught.value).replace(f"seen by rank {group.rank}", "")

    (message,) = set(run_threads(rank, size))
    return message


# -- programs ----------------------------------------------------------------------------------------


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def local(model: nn.Module) -> AbstractContextManager[None]:
    """``no_sync`` of a model that is wrapped."""
    return model.no_sync() if isinstance(model, shoal.DistributedDataParallel) else nullcontext()


def steps(
    data: Iterable[Batch],
    *,
    set_to_none: bool = True,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = sgd,
    whole: bool = False,
) -> Program:
    """Plain training, each rank with its part of every batch, or with all of it."""

    def program(model: nn.Module, place: Place | shoal.ProcessGroup) -> Iterator[None]:
        stepping = optimizer(model)
        for batch in data:
            stepping.zero_grad(set_to_none=set_to_none)
            loss_of(model, batch if whole else part(batch, place)).backward()
            yield
            stepping.step()

    return program


def train(model: nn.Module, data: Iterable[Batch], **options: Any) -> nn.Module:
    """Plain training with all of ``data``; the model may be wrapped.  ``options`` are those of ``steps``."""
    for _ in steps(data, whole=True, **options)(model, Place()):
        pass
    return model


def simulated(
    program: Program, make: Callable[[], nn.Module] = mlp, size: int = 2, *, by_all: bool = True
) -> tuple[list[Tensors], Tensors]:
    """The gradients after each pass that is reduced, and the parameters in the end.

    Ranks whose program has ended are no longer part of the mean; ``by_all`` still divides by their number.
    """
    models = [make() for _ in range(size)]
    runs = [program(model, Place(rank, size)) for rank, model in enumerate(models)]
    active = list(range(size))
    found: list[Tensors] = []
    last = models[0]
    ended = object()
    while active := [rank for rank in active if next(runs[rank], ended) is not ended]:
        last = models[active[0]]
        divisor = size if by_all else len(active)
        for same in zip(*(models[rank].parameters() for rank in active), strict=True):
            present = [parameter.grad.to_dense() for parameter in same if parameter.grad is not None]
            for parameter in same if present else ():
                parameter.grad = sum(present) / divisor
        found.append(gradients(last))
    return found, values(last)


# -- comparison --------------------------------------------------------------------------------------


def gradients(model: nn.Module) -> Tensors:
    return [
        None if parameter.grad is None else parameter.grad.to_dense().clone()
        for parameter in model.parameters()
    ]


def values(model: nn.Module) -> Tensors:
    return [parameter.detach().clone() for parameter in model.parameters()]


def assert_close(actual: Tensors, expected: Tensors, where: object = "") -> None:
    """Each pair is missing on both sides, or of one dtype and close."""
    for index, (a, b) in enumerate(zip(actual, expected, strict=True)):
        assert (a is None) == (b is None), f"{where}: tensor {index} is {a}, expected {b}"
        if a is not None and b is not None:
            exact = {"rtol": 1e-9, "atol": 1e-9} if b.dtype == torch.float64 else {}
            torch.testing.assert_close(
                a, b, **exact, msg=lambda text, index=index: f"{where}: tensor {index}: {text}"
            )


def assert_same_bits(actual: Sequence[Any], expected: Sequence[Any], where: object = "") -> None:
    """Each pair is missing on both sides, or equal."""
    for index, (a, b) in enumerate(zip(actual, expected, strict=True)):
        same = a is b is None or (a is not None and b is not None and torch.equal(a, b))
        assert same, f"{where}: tensor {index} is\n{a}, not\n{b}"


def assert_gradients(
    model: nn.Module, *data: Batch, make: Callable[[], nn.Module] = mlp, factor: float = 1.0
) -> None:
    """They are those that one process has of these whole batches, summed."""
    alone = make()
    for batch in data:
        (factor * loss_of(alone, batch)).backward()
    assert_close(gradients(model), gradients(alone))


def assert_reduces(
    model: Any, place: Place | shoal.ProcessGroup, data: Iterable[Batch], *, set_to_none: bool = True
) -> None:
    """Passes over this rank's part of batches give the gradients of whole batches, of :func:`mlp`."""
    for batch in data:
        model.zero_grad(set_to_none=set_to_none)
        loss_of(model, part(batch, place)).backward()
        assert_gradients(model, batch)


def assert_as_simulated(
    program: Program,
    size: int = 2,
    *,
    make: Callable[[], nn.Module] = mlp,
    wrap: Callable[..., Any] = wrapped,
    within: Callable[[Any], AbstractContextManager[Any]] = lambda _: nullcontext(),
    by_all: bool = True,
    ranks: dict[str, Any] | None = None,
    where: object = "",
    **options: Any,
) -> None:
    """Training on ranks equals the simulation.

    Args:
        wrap: gets the group, the model and ``options``.
        within: the context of the training, such as a Join.
        ranks: options of ``run_threads``.
    """

    def rank(group: shoal.ProcessGroup) -> tuple[list[Tensors], Tensors]:
        model = wrap(group, make(), **options)
        with within(model):
            seen = [gradients(model) for _ in program(model, group)]
        return seen, values(model)

    results = run_threads(rank, size, **(ranks or {}))
    expected, end = simulated(program, make, size, by_all=by_all)
    longest = max((seen for seen, _ in results), key=len)
    assert len(longest) == len(expected)
    for number, (seen, last) in enumerate(results):
        for count, (own, same, mean) in enumerate(zip(seen, longest, expected, strict=False)):
            assert_close(own, mean, f"rank {number}, gradients of pass {count}, {where}")
            assert_same_bits(own, same, f"rank {number}, gradients of pass {count}, {where}")
        assert_close(last, end, f"rank {number}, parameters, {where}")
        assert_same_bits(last, results[0][1], f"rank {number}, parameters, {where}")
