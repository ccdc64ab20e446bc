"""Gradients of earlier passes that the program still refers to keep their values."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.errors import OutOfSharedMemory
from shoal.parallel import hooks
from tests.parallel.models import mlp
from tests.parallel.training import on_ranks, wrapped

#: ways to refer to a gradient, or to a part of it
REFERENCES: dict[str, Callable[[torch.Tensor], Any]] = {
    "the tensor": lambda gradient: gradient,
    "detached": lambda gradient: gradient.detach(),
    "flattened": lambda gradient: gradient.view(-1),
    "a slice": lambda gradient: gradient[1:],
    "numpy": lambda gradient: gradient.numpy(),
    "dlpack": lambda gradient: torch.from_dlpack(gradient),
    "a graph": lambda gradient: torch.ones_like(gradient, requires_grad=True) * gradient,
    "memory": lambda gradient: gradient.untyped_storage(),
}


class _Scaled(nn.Module):
    """Two weights whose gradients are the input; the second may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.zeros(3))
        self.second = nn.Parameter(torch.zeros(3))

    def forward(self, factor: float, *, both: bool = True, hidden: bool = False) -> Any:
        out = (self.first * factor).sum() + ((self.second * factor).sum() if both else 0)
        return SimpleNamespace(loss=out) if hidden else out


def _mean(group: shoal.ProcessGroup) -> float:
    return sum(1.0 + rank for rank in range(group.size)) / group.size


def _two_losses(group: shoal.ProcessGroup, model: Any, **options: Any) -> None:
    """As PCGrad does: the gradients of each of several losses are kept, then projected."""
    kept = []
    for factor in (1.0, -3.0, 5.0):
        model.zero_grad()
        out = model(torch.full((1,), factor * (group.rank + 1)), **options)
        getattr(out, "loss", out).backward()
        kept.append([parameter.grad for parameter in model.parameters()])
    found = [[None if gradient is None else gradient.tolist() for gradient in step] for step in kept]
    assert found == [[[factor * _mean(group)] * 3] * 2 for factor in (1.0, -3.0, 5.0)]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"find_unused_parameters": True},
        {"static_graph": True},
        {"gradient_as_bucket_view": False},
        {"copies": 2},
        {"mixed_precision": shoal.MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)},
        {"hook": hooks.allreduce_hook},
    ],
    ids=lambda options: " ".join(options) or "plain",
)
@on_ranks(2)
def test_the_gradients_of_several_losses_may_be_kept(
    group: shoal.ProcessGroup, options: dict[str, Any]
) -> None:
    _two_losses(group, wrapped(group, _Scaled(), **options))


@on_ranks(2)
def test_a_pass_that_its_first_gradient_opens_keeps_them_too(group: shoal.ProcessGroup) -> None:
    _two_losses(group, wrapped(group, _Scaled()), hidden=True)


@pytest.mark.parametrize("reference", REFERENCES)
@on_ranks(2)
def test_every_kind_of_reference_is_noticed(group: shoal.ProcessGroup, reference: str) -> None:
    model = wrapped(group, _Scaled(), bucket_cap_mb=25)  # both in one bucket
    for _ in range(2):  # the second pass has buckets of its own
        model.zero_grad()
        model(1.0).backward()
    gradient = model.module.second.grad
    refers = REFERENCES[reference](gradient)
    del gradient
    model.zero_grad()
    model(2.0).backward()
    if reference == "memory":
        now = torch.empty(0).set_(refers)
        assert set(now.tolist()) <= {0.0, 1.0}  # zeros lie between gradients
    elif reference == "a graph":
        (through,) = torch.autograd.grad(refers.sum(), refers.grad_fn.next_functions[0][0].variable)
        assert through.tolist() == [1.0] * 3
    else:
        assert refers.tolist() == [1.0] * len(refers)
    assert model.module.second.grad.tolist() == [2.0] * 3


@on_ranks(3)
def test_ranks_need_not_keep_the_same(group: shoal.ProcessGroup) -> None:
    model = wrapped(group, _Scaled(), bucket_cap_mb=25)
    kept = []
    for factor in (1.0, 2.0, 3.0):
        model.zero_grad()
        model(factor * (group.rank + 1)).backward()
        if group.rank == 1:
            kept.append(model.module.first.grad)
        assert model.module.second.grad.tolist() == [factor * 2] * 3
    assert [gradient.tolist() for gradient in kept] == [[factor * 2] * 3 for factor in (1, 2, 3)][: len(kept)]
    reducer = model._reducer._gradients
    names = [name for name, _ in model.module.named_parameters()]
    assert {names[index] for index in reducer.copied} == ({"first"} if group.rank == 1 else set())


@on_ranks(2)
def test_the_kept_gradient_of_a_parameter_that_is_unused_later_stays(group: shoal.ProcessGroup) -> None:
    model = wrapped(group, _Scaled(), find_unused_parameters=True, bucket_cap_mb=25)
    for _ in range(2):
        model.zero_grad()
        model(1.0).backward()
    kept = model.module.second.grad
    for _ in range(2):
        model.zero_grad()
        model(2.0, both=False).backward()
    assert kept.tolist() == [1.0] * 3
    assert model.module.second.grad is None


@on_ranks(2)
def test_a_rank_without_a_batch_keeps_them_too(group: shoal.ProcessGroup) -> None:
    model = wrapped(group, _Scaled())
    kept = []
    with model.join():
        for _ in range(2 + group.rank):
            model.zero_grad()
            model(1.0).backward()
            kept.append(model.module.first.grad)
    assert [gradient.tolist() for gradient in kept] == [[1.0] * 3, [1.0] * 3, [0.5] * 3][: len(kept)]


@on_ranks(2)
def test_a_gradient_that_its_parameter_still_has_accumulates_in_place(group: shoal.ProcessGroup) -> None:
    model = wrapped(group, _Scaled())
    for _ in range(2):
        model.zero_grad()
        model(1.0).backward()
    first, flat = model.module.first.grad, model.module.second.grad.view(-1)
    with model.no_sync():
        model(1.0).backward()
    model(1.0).backward()
    assert first is model.module.first.grad
    assert first.tolist() == flat.tolist() == [3.0] * 3


@on_ranks(2)
def test_gradients_outlive_their_group(group: shoal.ProcessGroup) -> None:
    inner = group.subgroup(range(2))
    model = wrapped(inner, _Scaled())
    model(1.0).backward()
    kept = model.module.first.grad
    inner.close()
    del model, inner
    assert kept.tolist() == [1.0] * 3


@on_ranks(2)
def test_without_registered_memory_they_are_kept_all_the_same(group: shoal.ProcessGroup) -> None:
    model = wrapped(group, _Scaled())
    model(1.0).backward()
    kept = model.module.first.grad
    model.zero_grad()

    def full(*_: object, **__: object) -> torch.Tensor:
        raise OutOfSharedMemory("there is none left")

    group.empty = full  # type: ignore[method-assign]
    model(2.0).backward()
    assert kept.tolist() == [1.0] * 3
    assert model.module.first.grad.tolist() == [2.0] * 3


@pytest.mark.parametrize("hook", [None, *(name for name in hooks.__all__ if name.endswith("_hook"))])
@on_ranks(2)
def test_a_program_that_keeps_none_pays_nothing(group: shoal.ProcessGroup, hook: str | None) -> None:
    model = shoal.DistributedDataParallel(mlp(torch.float32), group=group, bucket_cap_mb=0.0005)
    if hook is not None:
        states = {
            "powerSGD_hook": hooks.PowerSGDState(group, start_powerSGD_iter=2),
            "batched_powerSGD_hook": hooks.PowerSGDState(group, start_powerSGD_iter=2),
            "post_localSGD_hook": hooks.PostLocalSGDState(group, group, 2),
        }
        model.register_comm_hook(states.get(hook), getattr(hooks, hook))
    optimizer = torch.optim.Adam(model.parameters())
    for step in range(6):
        optimizer.zero_grad(set_to_none=step % 3 != 2)
        model(torch.ones(4, 6)).sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    assert model._reducer is not None
    assert not model._reducer._gradients.copied


@on_ranks(2)
def test_a_gradient_may_be_detached_in_place(group: shoal.ProcessGroup) -> None:
    model = wrapped(group, _Scaled())
    for _ in range(3):
        model(1.0).backward()
        gradient = model.module.first.grad
        gradient.detach_().zero_()
        model.module.second.grad = None
    assert gradient is model.module.first.grad
