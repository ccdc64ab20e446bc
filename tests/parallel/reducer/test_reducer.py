"""What the reducer does while backward runs, and what it says when gradients do not come."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.errors import GroupAborted, UnusedParameterError, UsageError
from shoal.testing import run_threads
from tests.parallel.models import Checkpointed, batches, experts, fixed, loss_of, mlp, part
from tests.parallel.training import (
    SMALL_MB,
    assert_as_simulated,
    assert_close,
    assert_gradients,
    assert_reduces,
    assert_same_bits,
    gradients,
    on_ranks,
    simulated,
    wrapped,
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


@on_ranks(2)
def test_reduction_starts_and_ends_while_backward_still_runs(
    group: shoal.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = batches(2)
    model = wrapped(group)
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


@on_ranks(2)
def test_gradients_are_views_of_registered_memory(
    group: shoal.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = Recorder(group, monkeypatch)
    model = wrapped(group)
    for set_to_none in (True, False, True):
        assert_reduces(model, group, batches(1), set_to_none=set_to_none)
        registered = {memory.untyped_storage().data_ptr() for memory in record.memory}
        for parameter in model.parameters():
            assert parameter.grad.untyped_storage().data_ptr() in registered
        buckets = model._reducer.buckets
        for bucket in buckets:
            end = bucket.flat.data_ptr() + bucket.flat.nbytes
            assert all(bucket.flat.data_ptr() <= view.data_ptr() < end for view in bucket.views)
        assert len({bucket.flat.data_ptr() for bucket in buckets}) == len(buckets)


class Backwards(nn.Module):
    """Registers its layers in the reverse of the order in which it uses them."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(16, 3)
        self.middle = nn.Linear(16, 16)
        self.first = nn.Linear(6, 16)
        fixed(self.double())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))))


def test_buckets_are_rebuilt_once_in_the_order_in_which_gradients_arrived(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = batches(4)

    def rank(group: shoal.ProcessGroup) -> list[tuple[int, ...]]:
        model = wrapped(group, Backwards())
        names = [name for name, _ in model.module.named_parameters()]
        before = [bucket.members for bucket in model._reducer.buckets]
        assert names[before[0][0]].startswith("first")
        loss_of(model, part(data[0], group)).backward()
        assert_gradients(model, data[0], make=Backwards)
        after = [bucket.members for bucket in model._reducer.buckets]
        assert names[after[0][0]].startswith("last")
        assert names[after[-1][-1]].startswith("first")
        record = Recorder(group, monkeypatch)
        for batch in data[1:]:
            loss_of(model, part(batch, group)).backward()
        assert set(record.events) == {"all_reduce"}
        assert [bucket.members for bucket in model._reducer.buckets] == after
        return after

    first, second = run_threads(rank, 2)
    assert first == second


def backward(model: nn.Module, group: shoal.ProcessGroup, used: bool = True) -> None:
    """A pass that uses the expert, or does not."""
    loss_of(model, part(batches(1, dtype=torch.float32)[0], group), (0,) if used else ()).backward()


@pytest.mark.parametrize("skips", [(0, 1, 2), (1,), (0, 2)])
@pytest.mark.parametrize("bucket_cap_mb", [SMALL_MB / 10, 25])
def test_unused_parameters_are_named_on_all_ranks_whichever_ranks_skip_them(
    skips: tuple[int, ...], bucket_cap_mb: float
) -> None:
    def rank(group: shoal.ProcessGroup) -> str:
        model = wrapped(group, experts(1, torch.float32), bucket_cap_mb=bucket_cap_mb)
        with pytest.raises(UnusedParameterError) as caught:
            backward(model, group, group.rank not in skips)
        # Nothing is broken: the next step that uses everything succeeds.
        model.zero_grad()
        backward(model, group)
        assert all(parameter.grad is not None for parameter in model.parameters())
        return str(caught.value)

    for message in run_threads(rank, 3):
        for number in range(3):
            assert (f"rank {number}: 'experts.0.weight', 'experts.0.bias'" in message) == (number in skips)
        assert "common" not in message


@on_ranks(2)
def test_a_parameter_frozen_after_wrapping_is_named_as_such(group: shoal.ProcessGroup) -> None:
    model = wrapped(group, experts(1, torch.float32))
    model.module.common.bias.requires_grad_(False)
    with pytest.raises(UnusedParameterError, match=r"'common.bias' \(frozen after wrapping\)"):
        backward(model, group)


def stumble(_: torch.Tensor) -> None:
    raise KeyError("stumbled")


def _interrupted_backward(model: nn.Module, group: shoal.ProcessGroup) -> None:
    handle = model.module.common.weight.register_hook(stumble)
    with pytest.raises(KeyError, match="stumbled"):
        backward(model, group)
    handle.remove()


@pytest.mark.parametrize("begun", [False, True])
def test_a_backward_pass_is_reduced_that_follows_an_interrupted_one_without_a_forward_pass(
    begun: bool,
) -> None:
    def rank(group: shoal.ProcessGroup) -> list[Any]:
        model = wrapped(group, bucket_cap_mb=SMALL_MB / 10)
        first, second = (loss_of(model, part(batch, group)) for batch in batches(2))
        # Hooks on the output see backward before any gradient of a parameter has come.
        handle = (model.module[0].weight if begun else first).register_hook(stumble)
        with pytest.raises(KeyError, match="stumbled"):
            first.backward()
        handle.remove()
        second.backward()
        return gradients(model)

    assert_same_bits(*run_threads(rank, 2))


@pytest.mark.parametrize("to_none", [False, True])
def test_an_exception_that_ended_backward_on_one_rank_is_reported_by_the_others_alone(to_none: bool) -> None:
    zeroed = threading.Event()

    def rank(group: shoal.ProcessGroup) -> None:
        model = wrapped(group, experts(1, torch.float32), bucket_cap_mb=SMALL_MB / 10)
        if group.rank == 1:
            _interrupted_backward(model, group)
            model.zero_grad(set_to_none=to_none)
            zeroed.set()
        else:
            assert zeroed.wait(30)
            with pytest.raises(
                UnusedParameterError, match=r"rank 1: an exception ended backward before 'common\.weight'"
            ):
                backward(model, group)
            model.zero_grad(set_to_none=to_none)
        expected = simulated(lambda *both: iter([backward(*both)]), lambda: experts(1, torch.float32))[0][0]
        for _ in range(2):
            backward(model, group)
            assert_close(gradients(model), expected)
            model.zero_grad(set_to_none=to_none)

    run_threads(rank, 2)


@on_ranks(1)
def test_a_parameter_in_several_reentrant_checkpoints_is_refused_with_advice(
    group: shoal.ProcessGroup,
) -> None:
    model = wrapped(group, Checkpointed(nn.Linear(4, 4), reentrant=True, times=2))
    with pytest.raises(
        UsageError, match=r"'inner\.(weight|bias)' on rank 0 arrived twice.*use_reentrant=False"
    ):
        model(torch.ones(1, 4, requires_grad=True)).sum().backward()


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("in_place", [False, True])
def test_what_hooks_make_of_a_gradient_is_reduced_whenever_they_were_put_on(
    in_place: bool, later: bool
) -> None:
    def twice(parameter: torch.Tensor) -> None:
        if in_place:
            parameter.grad.mul_(2)
        else:
            parameter.grad = parameter.grad * 2

    def program(model: nn.Module, place: Any) -> Iterator[None]:
        for step, batch in enumerate(batches(4)):
            loss = loss_of(model, part(batch, place)) if later else None
            if step == 1:
                for parameter in model.parameters():
                    parameter.register_post_accumulate_grad_hook(twice)
            model.zero_grad()
            (loss_of(model, part(batch, place)) if loss is None else loss).backward()
            yield

    assert_as_simulated(program)


@on_ranks(1)
def test_gradients_that_a_hook_takes_away_are_missed(group: shoal.ProcessGroup) -> None:
    model = wrapped(group)
    loss_of(model, batches(1)[0]).backward()
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    with pytest.raises(UsageError, match="on rank 0 was removed before it was reduced"):
        loss_of(model, batches(1)[0]).backward()


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@on_ranks(2)
def test_backward_that_creates_a_graph_reduces_the_values(group: shoal.ProcessGroup) -> None:
    (batch,) = batches(1)
    model = wrapped(group)
    loss_of(model, part(batch, group)).backward(create_graph=True)
    assert not any(parameter.grad.requires_grad for parameter in model.parameters())
    assert_gradients(model, batch)


def test_what_breaks_the_group_is_raised_by_backward_and_by_every_later_step() -> None:
    aborted = threading.Event()

    def rank(group: shoal.ProcessGroup) -> None:
        model = wrapped(group)
        loss_of(model, part(batches(1)[0], group)).backward()
        if group.rank == 1:
            group.abort("had enough")
            aborted.set()
            return
        for _ in range(2):
            with pytest.raises(GroupAborted, match="had enough"):
                loss_of(model, part(batches(1)[0], group)).backward()
        assert aborted.wait(30)

    run_threads(rank, 2)


def test_outputs_of_unknown_classes_are_reduced_too() -> None:
    class Opaque(nn.Module):
        """Its output's tensors cannot be found without knowing the class."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()

        def forward(self, x: torch.Tensor) -> SimpleNamespace:
            return SimpleNamespace(tensor=self.inner(x))

    def program(model: nn.Module, place: Any) -> Iterator[None]:
        x, y = part(batches(1)[0], place)
        ((model(x).tensor - y) ** 2).mean().backward()
        yield

    assert_as_simulated(program, make=Opaque)


@on_ranks(2)
def test_backward_through_the_inner_module_stays_local(group: shoal.ProcessGroup) -> None:
    model = wrapped(group)
    loss_of(model, part(batches(1)[0], group)).backward()
    if group.rank == 0:  # would hang if it communicated
        loss_of(model.module, batches(1)[0]).backward()
    loss_of(model, part(batches(1)[0], group)).backward()


@on_ranks(1)
def test_a_dropped_wrapper_leaves_no_hooks_and_frees_the_module(group: shoal.ProcessGroup) -> None:
    inner = mlp()
    model = wrapped(group, inner)
    loss_of(model, part(batches(1)[0], group)).backward()
    reducer = weakref.ref(model._reducer)
    del model
    gc.collect()
    assert reducer() is None
    inner.zero_grad()
    loss_of(inner, batches(1)[0]).backward()
    assert_gradients(inner, *batches(1))
    again = weakref.ref(inner[0].weight)
    del inner
    gc.collect()
    assert again() is None
