"""A distributed optimiser that updates parameters in backward does what it does after backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import SGD, Adam, Optimizer

import shoal
from shoal import Join, ZeroRedundancyOptimizer
from shoal.errors import UsageError
from shoal.parallel.hooks import (
    CommHook,
    allreduce_hook,
    fp16_compress_hook,
    hook_with_zero_step,
    hook_with_zero_step_interleaved,
)
from shoal.testing import run_threads
from tests.parallel.models import batches, loss_of, mlp, part
from tests.parallel.training import assert_same_bits, on_ranks, pairwise, values, wrapped
from tests.parallel.zero.training import groups_of

from .buckets import same_on_all

HOOKS = [hook_with_zero_step, hook_with_zero_step_interleaved]
DATA = batches(6)


class Training:
    """A wrapped model and its optimiser, which updates in backward if it is given ``make_hook``."""

    def __init__(
        self,
        group: shoal.ProcessGroup,
        make_hook: Callable[..., CommHook] | None = None,
        inner: CommHook = allreduce_hook,
        optimizer_class: type[Optimizer] = Adam,
        **options: Any,
    ) -> None:
        self.group = group
        self.module = mlp()
        self.model = wrapped(group, self.module)
        self.optimizer = ZeroRedundancyOptimizer(
            groups_of(self.module),
            optimizer_class,
            group=group,
            overlap_with_ddp=make_hook is not None,
            lr=0.01,
            **options,
        )
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)
        hook = inner if make_hook is None else make_hook(inner, self.model, self.optimizer)
        self.model.register_comm_hook(None, hook)

    def step(self, index: int) -> None:
        self.optimizer.zero_grad()
        with self.model.no_sync():
            loss_of(self.model, part(DATA[index - 1], self.group)).backward()
        loss_of(self.model, part(DATA[index], self.group)).backward()
        self.optimizer.step()
        self.schedule.step()


@pairwise(
    size=[1, 3],
    inside=[(SGD, allreduce_hook), (Adam, allreduce_hook), (Adam, fp16_compress_hook)],
    make_hook=HOOKS,
)
def test_it_equals_steps_after_backward_from_the_first_one_on(
    size: int, inside: tuple[Any, CommHook], make_hook: Any
) -> None:
    optimizer_class, inner = inside
    options = {"momentum": 0.9} if optimizer_class is SGD else {}

    def rank(group: shoal.ProcessGroup) -> list[torch.Tensor]:
        plain = Training(group, None, inner, optimizer_class, **options)
        overlapped = Training(group, make_hook, inner, optimizer_class, **options)
        for index in range(len(DATA)):
            plain.step(index)
            overlapped.step(index)
            assert_same_bits(values(overlapped.module), values(plain.module), f"step {index}")
        states = []
        for training in (plain, overlapped):
            training.optimizer.consolidate_state_dict()
            if group.rank == 0:
                states.append(training.optimizer.state_dict())
        if group.rank == 0:
            assert str(states[0]) == str(states[1])
        return values(overlapped.module)

    same_on_all(run_threads(rank, size))


@pytest.mark.parametrize("make_hook", HOOKS)
def test_ranks_without_a_batch_update_what_they_own(make_hook: Any) -> None:
    def rank(group: shoal.ProcessGroup) -> list[torch.Tensor]:
        results = []
        for chosen in (None, make_hook):
            training = Training(group, chosen)
            with Join([training.model, training.optimizer]):
                for batch in DATA[: 1 + 2 * group.rank]:
                    training.optimizer.zero_grad()
                    loss_of(training.model, batch).backward()
                    training.optimizer.step()
            results.append(values(training.module))
        assert_same_bits(*results)
        return results[0]

    same_on_all(run_threads(rank, 3))


@on_ranks(2)
def test_parameters_of_others_are_only_reduced(group: shoal.ProcessGroup) -> None:
    module = mlp()
    model = wrapped(group, module)
    first, *rest = module.parameters()
    optimizer = ZeroRedundancyOptimizer(rest, SGD, group=group, overlap_with_ddp=True, lr=0.1)
    model.register_comm_hook(None, hook_with_zero_step_interleaved(allreduce_hook, model, optimizer))
    before = [parameter.detach().clone() for parameter in (first, *rest)]
    loss_of(model, DATA[0]).backward()
    changed = [not torch.equal(a, b) for a, b in zip((first, *rest), before, strict=True)]
    assert changed == [False] + [True] * len(rest)
    assert first.grad is not None


@on_ranks(2)
def test_what_is_put_together_wrongly_is_refused(group: shoal.ProcessGroup) -> None:
    module = mlp()
    model = wrapped(group, module)
    plain = ZeroRedundancyOptimizer(module.parameters(), SGD, group=group)
    overlapping = ZeroRedundancyOptimizer(module.parameters(), SGD, group=group, overlap_with_ddp=True)
    for make_hook in HOOKS:
        for other in (plain, SGD(module.parameters())):
            with pytest.raises(UsageError, match="made with overlap_with_ddp=True, got"):
                make_hook(allreduce_hook, model, other)  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="of one group: Sequential has None"):
            make_hook(allreduce_hook, module, overlapping)  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="takes a communication hook"):
            make_hook(None, model, overlapping)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="in backward, but none is registered"):
        overlapping.step()
    with pytest.raises(UsageError, match="; omit parameters_as_bucket_view"):
        ZeroRedundancyOptimizer(
            module.parameters(), SGD, group=group, overlap_with_ddp=True, parameters_as_bucket_view=True
        )
