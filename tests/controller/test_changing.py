"""A replay never does other than Python would: programs of which something changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import shoal
from shoal.controller import Master
from tests.controller import disguised  # noqa: F401 - it adds to PROGRAMS
from tests.controller.changing import NODE, PROGRAMS
from tests.controller.trainings import copied


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_sees_of_a_recorded_step_what_it_sees_of_a_function(master: Master, name: str) -> None:
    program, least = PROGRAMS[name]
    steps: list[Any] = []

    def recorded(fn: Callable[..., Any]) -> Any:
        steps.append(master.recorded(fn))
        return steps[-1]

    found = []
    for step in (lambda fn: fn, recorded):
        torch.manual_seed(0)
        found.append(copied(program(step)))
    assert sum(each.replays for each in steps) >= least
    assert len(found[0]) == len(found[1])
    for eager, replayed in zip(*found, strict=True):
        if isinstance(eager, Tensor):
            assert eager.dtype == replayed.dtype
            assert torch.equal(eager, replayed)
        else:
            assert eager == replayed


# -- what is refused ---------------------------------------------------------------------------------


def _refused(step: Callable[[Tensor], Any], *found: str, calls: int = 5) -> None:
    """The call of that number raises RecordingMismatch, with such texts."""
    for value in range(calls - 1):
        step(torch.full((2,), float(value), device=NODE))
    with pytest.raises(shoal.RecordingMismatch) as caught:
        step(torch.ones(2, device=NODE))
    for text in found:
        assert text in str(caught.value)


def test_a_list_that_grows_in_every_call_is_refused(master: Master) -> None:
    sums: list[Tensor] = []

    def grow(x: Tensor) -> Tensor:
        sums.append(x.sum())
        return x * 1

    _refused(master.recorded(grow), "sums had 4 elements before the call and has 5 after it")


def test_a_graph_that_leads_out_of_the_step_is_refused(master: Master) -> None:
    weight = torch.ones(2, device=NODE, requires_grad=True)
    for outer in (weight * 3, weight + 3):

        def onwards(x: Tensor) -> None:
            (outer * x).sum().backward(retain_graph=True)  # noqa: B023

        _refused(
            master.recorded(onwards),
            "was not found among the objects that the function uses",
            "pass it as an argument",
        )


def test_a_tensor_of_the_master_that_would_get_a_gradient_is_refused(master: Master) -> None:
    for weight in (torch.ones((), requires_grad=True), torch.ones(2, requires_grad=True)):

        def learn(x: Tensor) -> None:
            (weight.to(NODE) * x).sum().backward()  # noqa: B023

        _refused(master.recorded(learn), "requires a gradient", "detach()", "weight.to(NODE)", calls=1)


def test_a_refusal_that_the_function_catches_is_raised_by_the_call(master: Master) -> None:
    def catches(x: Tensor) -> Tensor:
        try:
            return x + x.sum().item()
        except Exception:
            return x

    _refused(master.recorded(catches), "x.sum().item()", "return the tensor", calls=1)


def test_random_numbers_of_the_master_are_refused_in_the_fifth_call(master: Master) -> None:
    def noisy(x: Tensor) -> Tensor:
        return x * 2 if torch.rand(()) < 2 else x

    _refused(master.recorded(noisy), "random numbers of torch at the master", "draw on the node")


def test_arguments_that_are_other_objects_in_every_call_are_refused(
    master: Master, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Batch:
        def __init__(self, x: Tensor) -> None:
            self.x = x

    monkeypatch.setattr("shoal.controller.recording.recorded_function.MAX_ARGUMENT_KINDS", 8)
    step = master.recorded(lambda batch: batch.x * 2)
    batches = [Batch(torch.full((2,), float(value), device=NODE)) for value in range(9)]
    for batch in batches[:8]:
        assert torch.equal(step(batch).cpu(), batch.x.cpu() * 2)
    with pytest.raises(shoal.RecordingMismatch, match="pass the tensors of an object"):
        step(batches[8])


def test_a_generator_cannot_be_recorded(master: Master) -> None:
    def parts(x: Tensor) -> Any:
        yield x + 1

    with pytest.raises(shoal.UsageError, match="is a generator function or a coroutine"):
        master.recorded(parts)


def test_a_call_that_issues_nothing_runs_every_time(master: Master) -> None:
    seen: list[int] = []
    count = master.recorded(lambda: seen.append(1))
    for _ in range(8):
        count()
    assert len(seen) == 8
