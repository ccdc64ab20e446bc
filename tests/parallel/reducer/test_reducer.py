"""What the reducer does while backward runs, and what it says when gradients do not come."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn

import shoal
from shoal.errors import GroupAborted, UnusedParameterError, UsageError
from tests.parallel.models import (
    SMALL_MB,
    assert_same_parameters,
    batches,
    fixed,
    loss_of,
    mlp,
    on_ranks,
    part,
)


class Recorder:
    """Notes the names of a group's operations, and what they returned, from now on."""

    def __init__(self, group: shoal.ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[str] = []
        self.futures: list[shoal.Future] = []
        self.memory: list[torch.Tensor] = []
        for name in ("all_reduce", "broadcast", "all_gather"):
            monkeypatch.setattr(group, name, self._noting(name, getattr(group, name)))
        empty = group.empty

        def noting_empty(*shape: int, **options: torch.dtype) -> torch.Tensor:
            self.memory.append(empty(*shape, **options))
            return self.memory[-1]

        monkeypatch.setattr(group, "empty", noting_empty)

    def _noting(self, name: str, call: Callable[..., shoal.Future]) -> Callable[..., shoal.Future]:
        def noting(*args: object, **options: object) -> shoal.Future:
            self.events.append(name)
            self.futures.append(call(*args, **options))
            return self.futures[-1]

        return noting


def test_reduction_starts_and_ends_while_backward_still_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    data = batches(2)

    def rank(group: shoal.ProcessGroup) -> None:
        model = shoal.DistributedDataParallel(mlp(), group=group, bucket_cap_mb=SMALL_MB)
        loss_of(model, part(data[0], group)).backward()
        record = Recorder(group, monkeypatch)

        def last_gradient(_: torch.Tensor) -> None:
            # The first all-reduce ends although this rank's backward does not go on before it has.
            record.futures[0].wait()
            record.events.append("last gradient")

        model.module[0].weight.register_post_accumulate_grad_hook(last_gradient)
        loss_of(model, part(data[1], group)).backward()
        assert record.events.count("all_reduce") == len(model._reducer.buckets) > 2
        assert record.events[0] == "all_reduce"
        assert "last gradient" in record.events[1:]

    on_ranks(2, rank)


def test_gradients_are_views_of_registered_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    data = batches(3)

    def rank(group: shoal.ProcessGroup) -> None:
        record = Recorder(group, monkeypatch)
        model = shoal.DistributedDataParallel(mlp(), group=group, bucket_cap_mb=SMALL_MB)
        for batch, set_to_none in zip(data, (True, False, True), strict=True):
            model.zero_grad(set_to_none=set_to_none)
            loss_of(model, part(batch, group)).backward()
            registered = {memory.untyped_storage().data_ptr() for memory in record.memory}
            for parameter in model.parameters():
                assert parameter.grad.untyped_storage().data_ptr() in registered
            flats = {bucket.flat.data_ptr(): bucket.flat for bucket in model._reducer.buckets}
            for bucket in model._reducer.buckets:
                end = bucket.flat.data_ptr() + bucket.flat.numel() * bucket.flat.element_size()
                for view in bucket.views:
                    assert bucket.flat.data_ptr() <= view.data_ptr() < end
            assert len(flats) == len(model._reducer.buckets)

    on_ranks(2, rank)


class Backwards(nn.Module):
    """Registers its layers in the reverse of the order in which it uses them."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(16, 3)
        self.middle = nn.Linear(16, 16)
        self.first = nn.Linear(6, 16)
        fixed(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))))


def test_buckets_are_rebuilt_once_in_the_order_in_which_gradients_arrived(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = batches(4)

    def rank(group: shoal.ProcessGroup) -> list[tuple[int, ...]]:
        model = shoal.DistributedDataParallel(Backwards().double(), group=group, bucket_cap_mb=SMALL_MB)
        names = [name for name, _ in model.module.named_parameters()]
        before = [bucket.members for bucket in model._reducer.buckets]
        assert names[before[0][0]].startswith("first")
        loss_of(model, part(data[0], group)).backward()
        after = [bucket.members for bucket in model._reducer.buckets]
        assert names[after[0][0]].startswith("last")
        assert names[after[-1][-1]].startswith("first")
        record = Recorder(group, monkeypatch)
        for batch in data[1:]:
            loss_of(model, part(batch, group)).backward()
        assert set(record.events) == {"all_reduce"}
        assert [bucket.members for bucket in model._reducer.buckets] == after
        return after

    first, second = on_ranks(2, rank)
    assert first == second


def test_gradients_keep_their_values_when_buckets_are_rebuilt() -> None:
    (batch,) = batches(1)
    expected = Backwards().double()

    def rank(group: shoal.ProcessGroup) -> list[torch.Tensor]:
        model = shoal.DistributedDataParallel(Backwards().double(), group=group, bucket_cap_mb=SMALL_MB)
        loss_of(model, part(batch, group)).backward()
        return [parameter.grad for parameter in model.parameters()]

    (mine, _) = on_ranks(2, rank)
    loss_of(expected, batch).backward()
    for gradient, parameter in zip(mine, expected.parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad)


class TwoRoads(nn.Module):
    """Uses ``spare`` only when told to."""

    def __init__(self) -> None:
        super().__init__()
        self.main = nn.Linear(4, 4)
        self.spare = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, spare: bool) -> torch.Tensor:
        x = self.main(x)
        return self.spare(x) if spare else x


@pytest.mark.parametrize("skips", [(0, 1, 2), (1,), (0, 2)])
@pytest.mark.parametrize("bucket_cap_mb", [SMALL_MB / 10, 25])
def test_unused_parameters_are_named_on_all_ranks_whichever_ranks_skip_them(
    skips: tuple[int, ...], bucket_cap_mb: float
) -> None:
    def rank(group: shoal.ProcessGroup) -> str:
        model = shoal.DistributedDataParallel(TwoRoads(), group=group, bucket_cap_mb=bucket_cap_mb)
        x = torch.ones(2, 4)
        with pytest.raises(UnusedParameterError) as caught:
            model(x, group.rank not in skips).sum().backward()
        # Nothing is broken: the next step that uses everything succeeds.
        model.zero_grad()
        model(x, True).sum().backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
        return str(caught.value)

    for message in on_ranks(3, rank):
        for number in range(3):
            assert (f"rank {number}: 'spare.weight', 'spare.bias'" in message) == (number in skips)
        assert "main" not in message


def test_a_parameter_frozen_after_wrapping_is_named_as_such() -> None:
    def rank(group: shoal.ProcessGroup) -> None:
        model = shoal.DistributedDataParallel(TwoRoads(), group=group)
        model.module.main.bias.requires_grad_(False)
        with pytest.raises(UnusedParameterError, match=r"'main.bias' \(frozen after wrapping\)"):
            model(torch.ones(1, 4), True).sum().backward()

    on_ranks(2, rank)


def _interrupted_backward(model: nn.Module, x: torch.Tensor) -> None:
    def stumble(_: torch.Tensor) -> None:
        raise KeyError("stumbled")

    handle = model.module.main.weight.register_hook(stumble)
    with pytest.raises(KeyError, match="stumbled"):
        model(x, True).sum().backward()
    handle.remove()


def test_training_goes_on_after_an_exception_that_ended_backward_on_all_ranks() -> None:
    def rank(group: shoal.ProcessGroup) -> nn.Module:
        model = shoal.DistributedDataParallel(TwoRoads(), group=group, bucket_cap_mb=SMALL_MB / 10)
        x = torch.full((1, 4), float(group.rank))
        _interrupted_backward(model, x)
        model.zero_grad()
        model(x, True).sum().backward()
        assert model.module.spare.bias.grad.tolist() == [1.0] * 4
        return model

    on_ranks(2, rank)


@pytest.mark.parametrize("begun", [False, True])
def test_a_backward_pass_is_reduced_that_follows_an_interrupted_one_without_a_forward_pass(
    begun: bool,
) -> None:
    def stumble(_: torch.Tensor) -> None:
        raise KeyError("stumbled")

    def rank(group: shoal.ProcessGroup) -> list[float]:
        model = shoal.DistributedDataParallel(TwoRoads(), group=group, bucket_cap_mb=SMALL_MB / 10)
        x = torch.full((1, 4), float(group.rank))
        first, second = model(x, True), model(x, True)
        # Hooks on the output see backward before any gradient of a parameter has come.
        handle = (model.module.main.weight if begun else first).register_hook(stumble)
        with pytest.raises(KeyError, match="stumbled"):
            first.sum().backward()
        handle.remove()
        second.sum().backward()
        return [float(x) for x in model.module.spare.weight.grad.flatten()]

    means = on_ranks(2, rank)
    assert means[0] == means[1]


@pytest.mark.parametrize("to_none", [False, True])
def test_an_exception_that_ended_backward_on_one_rank_is_reported_by_the_others_alone(to_none: bool) -> None:
    zeroed = threading.Event()

    def rank(group: shoal.ProcessGroup) -> None:
        model = shoal.DistributedDataParallel(TwoRoads(), group=group, bucket_cap_mb=SMALL_MB / 10)
        x = torch.ones(1, 4)
        if group.rank == 1:
            _interrupted_backward(model, x)
            model.zero_grad(set_to_none=to_none)
            zeroed.set()
        else:
            assert zeroed.wait(30)
            with pytest.raises(
                UnusedParameterError, match=r"rank 1: an exception ended backward before 'main\.weight'"
            ):
                model(x, True).sum().backward()
            model.zero_grad(set_to_none=to_none)
        for _ in range(2):
            model(x, True).sum().backward()
            assert model.module.spare.bias.grad.tolist() == [1.0] * 4
            model.zero_grad(set_to_none=to_none)

    on_ranks(2, rank)


def test_a_parameter_in_several_reentrant_checkpoints_is_refused_with_advice() -> None:
    from torch.utils.checkpoint import checkpoint

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(2):
                x = checkpoint(self.layer, x, use_reentrant=True)
            return x

    def rank(group: shoal.ProcessGroup) -> None:
        model = shoal.DistributedDataParallel(Twice(), group=group)
        with pytest.raises(
            UsageError, match=r"'layer\.(weight|bias)' on rank 0 arrived twice.*use_reentrant=False"
        ):
            model(torch.ones(1, 4, requires_grad=True)).sum().backward()

    on_ranks(1, rank)


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("in_place", [False, True])
def test_what_hooks_make_of_a_gradient_is_reduced_whenever_they_were_put_on(
    in_place: bool, later: bool
) -> None:
    data = batches(4)

    def twice(parameter: torch.Tensor) -> None:
        if in_place:
            parameter.grad.mul_(2)
        else:
            parameter.grad = parameter.grad * 2

    def rank(group: shoal.ProcessGroup) -> list[list[torch.Tensor]]:
        model = shoal.DistributedDataParallel(mlp(), group=group, bucket_cap_mb=SMALL_MB)
        gradients = []
        for step, batch in enumerate(data):
            loss = loss_of(model, part(batch, group)) if later else None
            if step == 1:
                for parameter in model.parameters():
                    parameter.register_post_accumulate_grad_hook(twice)
            model.zero_grad()
            (loss_of(model, part(batch, group)) if loss is None else loss).backward()
            gradients.append([parameter.grad.clone() for parameter in model.parameters()])
        return gradients

    first, second = on_ranks(2, rank)
    model = mlp()
    for step, batch in enumerate(data):
        model.zero_grad()
        loss_of(model, batch).backward()
        for one, other, parameter in zip(first[step], second[step], model.parameters(), strict=True):
            assert torch.equal(one, other)
            torch.testing.assert_close(one, parameter.grad * (2 if step else 1))


def test_gradients_that_a_hook_takes_away_are_missed() -> None:
    def rank(group: shoal.ProcessGroup) -> None:
        model = shoal.DistributedDataParallel(mlp(), group=group)
        loss_of(model, batches(1)[0]).backward()
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
        with pytest.raises(UsageError, match="on rank 0 was taken away before it could be reduced"):
            loss_of(model, batches(1)[0]).backward()

    on_ranks(1, rank)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_backward_that_creates_a_graph_reduces_the_values() -> None:
    (batch,) = batches(1)

    def rank(group: shoal.ProcessGroup) -> list[torch.Tensor]:
        model = shoal.DistributedDataParallel(mlp(), group=group, bucket_cap_mb=SMALL_MB)
        loss_of(model, part(batch, group)).backward(create_graph=True)
        gradients = [parameter.grad for parameter in model.parameters()]
        assert not any(gradient.requires_grad for gradient in gradients)
        return gradients

    mine, _ = on_ranks(2, rank)
    expected = mlp()
    loss_of(expected, batch).backward()
    for gradient, parameter in zip(mine, expected.parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad)


def test_what_breaks_the_group_is_raised_by_backward_and_by_every_later_step() -> None:
    aborted = threading.Event()

    def rank(group: shoal.ProcessGroup) -> None:
        model = shoal.DistributedDataParallel(mlp(), group=group, bucket_cap_mb=SMALL_MB)
        loss_of(model, part(batches(1)[0], group)).backward()
        if group.rank == 1:
            group.abort("had enough")
            aborted.set()
            return
        for _ in range(2):
            with pytest.raises(GroupAborted, match="had enough"):
                loss_of(model, part(batches(1)[0], group)).backward()
        assert aborted.wait(30)

    on_ranks(2, rank)


class Wrapped:
    """An output whose tensors cannot be found without knowing the class."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def test_outputs_of_unknown_classes_are_reduced_too() -> None:
    class Opaque(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()

        def forward(self, x: torch.Tensor) -> Wrapped:
            return Wrapped(self.inner(x))

    (batch,) = batches(1)

    def rank(group: shoal.ProcessGroup) -> list[torch.Tensor]:
        model = shoal.DistributedDataParallel(Opaque(), group=group, bucket_cap_mb=SMALL_MB)
        inputs, targets = part(batch, group)
        ((model(inputs).tensor - targets) ** 2).mean().backward()
        return [parameter.grad for parameter in model.parameters()]

    mine, other = on_ranks(2, rank)
    expected = mlp()
    loss_of(expected, batch).backward()
    for a, b, parameter in zip(mine, other, expected.parameters(), strict=True):
        torch.testing.assert_close(a, parameter.grad)
        assert torch.equal(a, b)


def test_backward_through_the_inner_module_stays_local() -> None:
    def rank(group: shoal.ProcessGroup) -> None:
        model = shoal.DistributedDataParallel(mlp(), group=group)
        loss_of(model, part(batches(1)[0], group)).backward()
        if group.rank == 0:  # would hang if it communicated
            loss_of(model.module, batches(1)[0]).backward()
        loss_of(model, part(batches(1)[0], group)).backward()

    on_ranks(2, rank)


def test_a_dropped_wrapper_leaves_no_hooks_and_frees_the_module() -> None:
    def rank(group: shoal.ProcessGroup) -> None:
        inner = mlp()
        model = shoal.DistributedDataParallel(inner, group=group, bucket_cap_mb=SMALL_MB)
        loss_of(model, part(batches(1)[0], group)).backward()
        reducer = weakref.ref(model._reducer)
        del model
        gc.collect()
        assert reducer() is None
        alone = mlp()
        inner.zero_grad()
        loss_of(inner, batches(1)[0]).backward()
        loss_of(alone, batches(1)[0]).backward()
        assert_same_parameters(inner, alone)
        for a, b in zip(inner.parameters(), alone.parameters(), strict=True):
            assert torch.equal(a.grad, b.grad)
        again = weakref.ref(inner[0].weight)
        del inner, a
        gc.collect()
        assert again() is None

    on_ranks(1, rank)
