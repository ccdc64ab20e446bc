"""Parameters updated bucket by bucket equal those that are updated all together afterwards."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import SGD, Adam, AdamW, Optimizer

import shoal
from shoal.parallel import hooks
from tests.parallel.training import on_ranks

from .buckets import Model

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "SGD": lambda parameters: SGD(parameters, lr=0.1, momentum=0.9),
    "Adam, one by one": lambda parameters: Adam(parameters, lr=0.1, foreach=False),
    "AdamW, all at once": lambda parameters: AdamW(parameters, lr=0.1, weight_decay=0.1, foreach=True),
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.1),
}


def groups_of(parameters: list[torch.Tensor]) -> list[dict[str, Any]]:
    return [{"params": parameters[::2]}, {"params": parameters[1::2], "lr": 0.03}]


def step_after(model: Model, optimizer: Optimizer) -> None:
    """What people do without the hook."""
    model.reduce(hooks.allreduce_hook)
    for bucket in model.buckets:
        for parameter, view in zip(bucket.parameters(), bucket.gradients(), strict=True):
            parameter.grad = view
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("name", OPTIMIZERS)
@on_ranks(2)
def test_it_equals_steps_after_backward_with_groups_and_a_schedule(
    group: shoal.ProcessGroup, name: str
) -> None:
    plain, overlapped = Model(group, count=4), Model(group, count=4)
    reference = OPTIMIZERS[name](groups_of(plain.parameters))
    optimizer = OPTIMIZERS[name](groups_of(overlapped.parameters))
    schedules = [torch.optim.lr_scheduler.StepLR(o, 2, 0.5) for o in (reference, optimizer)]
    hook = hooks.hook_then_optimizer(hooks.allreduce_hook, optimizer)
    for _ in range(6):
        step_after(plain, reference)
        overlapped.reduce(hook)
        for schedule in schedules:
            schedule.step()
        for a, b in zip(plain.parameters, overlapped.parameters, strict=True):
            assert torch.equal(a, b)
            assert b.grad is None
    states = [copy.deepcopy(o.state_dict()) for o in (reference, optimizer)]
    for a, b in zip(*(_flat(state["state"]) for state in states), strict=True):
        assert torch.equal(torch.as_tensor(a), torch.as_tensor(b))


def _flat(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [leaf for key in sorted(value, key=str) for leaf in _flat(value[key])]
    return [value]


@on_ranks(1)
def test_a_loaded_state_is_used(group: shoal.ProcessGroup) -> None:
    first, second = Model(group), Model(group)
    saved = io.BytesIO()
    optimizer = Adam(first.parameters, lr=0.1)
    hook = hooks.hook_then_optimizer(hooks.allreduce_hook, optimizer)
    for _ in range(2):
        first.reduce(hook)
    torch.save([first.parameters, optimizer.state_dict()], saved)
    first.reduce(hook)
    saved.seek(0)
    again = Adam(second.parameters, lr=0.7)
    hook = hooks.hook_then_optimizer(hooks.allreduce_hook, again)
    parameters, state = torch.load(saved)
    with torch.no_grad():
        torch._foreach_copy_(second.parameters, parameters)
    again.load_state_dict(state)
    second.step = 1
    second.reduce(hook)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters, second.parameters, strict=True))


@pytest.mark.parametrize(
    ("inner", "state"),
    [
        (hooks.fp16_compress_hook, lambda: None),
        (hooks.quantization_perchannel_hook, lambda: None),
        (hooks.powerSGD_hook, lambda: hooks.PowerSGDState(start_powerSGD_iter=1)),
        (lambda state, bucket: _other_tensor(bucket), lambda: None),
    ],
    ids=["float16", "eight bits", "PowerSGD", "a result elsewhere"],
)
@on_ranks(2)
def test_it_goes_with_every_hook(group: shoal.ProcessGroup, inner: Any, state: Any) -> None:
    plain, overlapped = Model(group, count=2), Model(group, count=2)
    optimizer = SGD(overlapped.parameters, lr=1.0)
    hook = hooks.hook_then_optimizer(inner, optimizer)
    own, other = state(), state()
    for _ in range(3):
        before = [parameter.detach().clone() for parameter in overlapped.parameters]
        averaged = plain.reduce(inner, own)
        overlapped.reduce(hook, other)
        for old, new, step in zip(before, overlapped.parameters, averaged, strict=True):
            assert torch.equal(new, old - step.float())


def _other_tensor(bucket: hooks.GradBucket) -> shoal.Future[torch.Tensor]:
    own = bucket.buffer().double()
    return bucket.group.all_reduce(own, "avg")


@on_ranks(2)
def test_parameters_that_the_optimiser_does_not_hold_stay_as_they_are(group: shoal.ProcessGroup) -> None:
    model = Model(group, count=2)
    model.reduce(hooks.hook_then_optimizer(hooks.allreduce_hook, SGD(model.parameters[:1], lr=1.0)))
    assert bool(model.parameters[0].any())
    assert not any(bool(parameter.any()) for parameter in model.parameters[1:])


@on_ranks(1)
def test_gradients_that_were_there_stay_there(group: shoal.ProcessGroup) -> None:
    model = Model(group)
    mine = [torch.ones_like(parameter) for parameter in model.parameters]
    for parameter, own in zip(model.parameters, mine, strict=True):
        parameter.grad = own
    model.reduce(hooks.hook_then_optimizer(hooks.allreduce_hook, SGD(model.parameters, lr=1.0)))
    assert all(p.grad is own for p, own in zip(model.parameters, mine, strict=True))
    assert all(bool((own == 1).all()) for own in mine)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # torch's own, when imported
@on_ranks(2)
def test_what_torch_attached_to_parameters_runs_after_the_reduction_and_no_more_by_itself(
    group: shoal.ProcessGroup,
) -> None:
    from torch.distributed.optim import _apply_optimizer_in_backward

    plain, carrying = Model(group, count=2), Model(group, count=2)
    _apply_optimizer_in_backward(SGD, carrying.parameters[:7], {"lr": 0.1})
    taken = hooks.take_over_optimizers_in_backward(carrying.parameters)
    assert [id(parameter) for parameter in taken] == [id(p) for p in carrying.parameters[:7]]
    carrying.parameters[0].sum().backward()
    assert not bool(carrying.parameters[0].any())  # nobody stepped it
    carrying.parameters[0].grad = None
    hook = hooks.hook_then_optimizers_in_backward(hooks.allreduce_hook)
    reference = SGD(plain.parameters[:7], lr=0.1)
    for _ in range(3):
        step_after(plain, reference)
        carrying.reduce(hook)
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters, carrying.parameters, strict=True))


def test_optimisers_that_need_all_parameters_at_once_are_refused() -> None:
    parameters = [torch.zeros(3, requires_grad=True)]
    with pytest.raises(shoal.UsageError, match=r"other than LBFGS.*got LBFGS"):
        hooks.hook_then_optimizer(hooks.allreduce_hook, torch.optim.LBFGS(parameters))
    with pytest.raises(shoal.UsageError, match=r"takes an optimiser from torch.optim.*got list"):
        hooks.hook_then_optimizer(hooks.allreduce_hook, parameters)  # type: ignore[arg-type]
    with pytest.raises(shoal.UsageError, match=r"takes a communication hook.*got NoneType"):
        hooks.hook_then_optimizer(None, SGD(parameters, lr=0.1))  # type: ignore[arg-type]
