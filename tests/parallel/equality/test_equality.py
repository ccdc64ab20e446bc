"""Twelve steps by shoal's wrapper and by torch's over Gloo, the same seeds and data: the same training.

On two ranks the trainings are equal in every bit.  On more, the wrappers add in different orders, and
training amplifies the rounding, how much depends on the model and on the processor's instructions.  The
yardstick is a third training in double precision: shoal's may be :data:`FACTOR` times as far from it as
torch's.

Every case (of the modules beside this one) is a test on 2 ranks, and on 4 where they show more; under
``stress`` all are on 4 too.  The ranks are processes, started once for all cases.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TypeAlias

import pytest
import torch

from shoal.errors import RemoteError
from shoal.testing import run_processes

from .case import CASES
from .joining import Uneven
from .runner import OPERATION, Outcome, Training, in_double, outcomes, same_bits

Outcomes: TypeAlias = "list[dict[str, Outcome]]"

#: how far shoal's training may be from the exact one, in distances of torch's training ...
FACTOR = 2.0
#: ... and in units of the last place, for torch's may be near to the exact one by luck
ULPS = 16.0


@pytest.fixture(scope="module")
def on_ranks(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[int], Outcomes]:
    """The outcomes of all cases that this run selects, for a number of ranks, by rank."""
    items = [item for item in request.session.items if item.path == request.path]
    wanted = {(item.callspec.params["name"], item.callspec.params["size"]) for item in items}

    @functools.cache
    def run(size: int) -> Outcomes | RemoteError:
        meeting = tmp_path_factory.mktemp("gloo") / "ranks"
        names = [name for name in CASES if (name, size) in wanted]
        try:
            return run_processes(outcomes, size, str(meeting), names, timeout=150, op_timeout=OPERATION)
        except RemoteError as error:
            return error

    def outcomes_or_raise(size: int) -> Outcomes:
        result = run(size)
        if isinstance(result, RemoteError):
            raise result
        return result

    return outcomes_or_raise


@pytest.mark.parametrize(
    ("name", "size"),
    [
        pytest.param(
            name,
            size,
            id=f"{name} on {size}",
            marks=[pytest.mark.stress] if size == 4 and not case.on_four else [],
        )
        for size in (2, 4)
        for name, case in CASES.items()
    ],
)
def test_training_equals_torchs(name: str, size: int, on_ranks: Callable[[int], Outcomes]) -> None:
    case = CASES[name]
    ranks = [by_name[name] for by_name in on_ranks(size)]
    for rank, outcome in enumerate(ranks):
        assert not outcome.failure, f"rank {rank}:\n{outcome.failure}"
    for rank, outcome in enumerate(ranks):
        assert len(outcome.shoal.losses) == len(outcome.torch.losses)
        if "absent" not in case.apart:
            assert outcome.shoal.absent == outcome.torch.absent, f"rank {rank} lacks other gradients"
        for name, tensor in outcome.torch.state.items():
            assert outcome.shoal.state[name].dtype == tensor.dtype, f"rank {rank}: {name}"
        where, difference = largest_difference(outcome.shoal, outcome.torch, case.apart)
        if same_bits(case, size):
            assert difference == 0.0, f"rank {rank}: {where} differs by {difference:.3g}"
            continue
        where, ours = largest_difference(outcome.shoal, outcome.exact, case.apart)
        _, theirs = largest_difference(outcome.torch, outcome.exact, case.apart)
        bound = FACTOR * theirs + ULPS * precision(outcome.torch)
        assert ours <= bound, f"rank {rank}: {where} is {ours:.3g} from exact, torch's {theirs:.3g}"
    assert len({outcome.shoal.parameters for outcome in ranks}) == 1, "the ranks' parameters differ"
    if case.options.get("broadcast_buffers", True):
        for step, found in enumerate(zip(*(outcome.shoal.buffers for outcome in ranks), strict=False)):
            assert len(set(found)) == 1, f"the ranks' buffers differ in forward pass {step}"
    if issubclass(case, Uneven):  # the last of the ranks gives its model to the others
        assert len({outcome.shoal.ending for outcome in ranks}) == 1, "the ranks' buffers differ in the end"


def largest_difference(actual: Training, expected: Training, apart: Sequence[str] = ()) -> tuple[str, float]:
    """The tensor that differs most, and by how much, relative to its largest element; the losses are one."""
    differences = {"the loss": _difference(torch.tensor(actual.losses), torch.tensor(expected.losses))}
    assert actual.state.keys() == expected.state.keys()
    for name, tensor in expected.state.items():
        if name not in apart:
            differences[name] = _difference(actual.state[name], tensor)
    worst = max(differences, key=differences.__getitem__)
    return worst, differences[worst]


def precision(training: Training) -> float:
    """The relative distance of neighbouring numbers in the finest dtype of the training."""
    tensors = [
        tensor for tensor in training.state.values() if tensor.dtype.is_floating_point or tensor.is_complex()
    ]
    return min(torch.finfo(tensor.dtype).eps for tensor in tensors)


def _difference(actual: torch.Tensor, expected: torch.Tensor) -> float:
    actual, expected = in_double(actual), in_double(expected)
    if not (actual.isfinite().all() and expected.isfinite().all()):
        return float("inf")
    scale = expected.abs().max().item()
    gap = (actual - expected).abs().max().item()
    return gap / scale if gap else 0.0
