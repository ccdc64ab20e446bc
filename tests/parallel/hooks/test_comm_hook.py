"""Where communication hooks stand in DistributedDataParallel; our own hooks are tested in ``hooks``."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.errors import UsageError
from shoal.parallel import hooks
from shoal.parallel.hooks import GradBucket
from tests.parallel.models import Experts, batches, loss_of, part, sentences, words
from tests.parallel.training import assert_as_simulated, on_ranks, steps, wrapped


def average(_: object, bucket: GradBucket) -> shoal.Future[torch.Tensor]:
    return bucket.group.all_reduce(bucket.buffer(), op="avg")


def of_another_dtype(_: object, bucket: GradBucket) -> shoal.Future[torch.Tensor]:
    wide = bucket.buffer().to(torch.float64) / bucket.group.size
    return bucket.group.all_reduce(wide.reshape(1, -1))


def in_a_callback(_: object, bucket: GradBucket) -> shoal.Future[torch.Tensor]:
    def scaled(future: shoal.Future[torch.Tensor]) -> torch.Tensor:
        again = bucket.group.all_reduce(torch.zeros(3)).wait()  # hooks may communicate in callbacks
        return future.value() / bucket.group.size + again.sum()

    return bucket.group.all_reduce(bucket.buffer().clone()).then(scaled)


def with_a_future_of_torch(_: object, bucket: GradBucket) -> torch.futures.Future[list[torch.Tensor]]:
    bucket.group.all_reduce(bucket.buffer(), op="avg").wait()
    future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
    future.set_result([bucket.buffer().clone()])
    return future


@pytest.mark.parametrize("hook", [average, of_another_dtype, in_a_callback, with_a_future_of_torch])
def test_a_hook_takes_the_place_of_the_all_reduce(hook: object) -> None:
    assert_as_simulated(steps(batches(4)), hook=hook)


@on_ranks(2)
def test_a_hook_sees_every_gradient_once_and_knows_the_last_bucket(group: shoal.ProcessGroup) -> None:
    seen: list[GradBucket] = []

    def note(state: list[GradBucket], bucket: GradBucket) -> shoal.Future[torch.Tensor]:
        state.append(bucket)
        for gradient, parameter in zip(bucket.gradients(), bucket.parameters(), strict=True):
            assert gradient.shape == parameter.shape
            inside = gradient.data_ptr() - bucket.buffer().data_ptr()
            assert 0 <= inside < max(bucket.buffer().nbytes, 1)
            torch.testing.assert_close(gradient, parameter.grad)
        return average(None, bucket)

    model = wrapped(group)
    model.register_comm_hook(seen, note)
    for _ in range(2):
        seen.clear()
        model.zero_grad()
        loss_of(model, batches(1)[0]).backward()
        parameters = [parameter for bucket in seen for parameter in bucket.parameters()]
        assert sorted(map(id, parameters)) == sorted(map(id, model.parameters()))
        assert [bucket.index() for bucket in seen] == list(range(len(seen)))
        assert [bucket.is_last() for bucket in seen] == [False] * (len(seen) - 1) + [True]


@on_ranks(2)
def test_a_hook_does_not_touch_what_the_ranks_tell_one_another(group: shoal.ProcessGroup) -> None:
    """A hook that loses information, as compression does, loses no error."""

    def nothing(_: object, bucket: GradBucket) -> shoal.Future[torch.Tensor]:
        bucket.buffer().zero_()
        return average(None, bucket)

    model = wrapped(group, Experts(), hook=nothing)
    with pytest.raises(shoal.UnusedParameterError, match=r"rank 1: 'experts\.3\.weight'"):
        model(torch.ones(1, 6), range(4 - group.rank)).sum().backward()


def test_unused_and_sparse_gradients_beside_a_hook() -> None:
    def program(model: nn.Module, place: Any) -> Iterator[None]:
        loss_of(model, part(sentences(1)[0], place), place.rank == 0).backward()
        yield

    assert_as_simulated(program, make=words, hook=average, find_unused_parameters=True)


@pytest.mark.parametrize(
    ("hook", "message"),
    [
        ("all_reduce", "got str: 'all_reduce'"),
        (lambda bucket: None, r"takes \(bucket\)"),
        (lambda state, bucket, more: None, r"takes \(state, bucket, more\)"),
    ],
)
@on_ranks(1)
def test_hooks_of_the_wrong_kind_are_refused_at_once(
    group: shoal.ProcessGroup, hook: object, message: str
) -> None:
    model = wrapped(group)
    with pytest.raises(UsageError, match=r"hook\(state, bucket\) that returns.*" + message):
        model.register_comm_hook(None, hook)


@pytest.mark.parametrize(
    ("hook", "message"),
    [
        (lambda state, bucket: bucket.buffer(), "returned a tensor of"),
        (lambda state, bucket: None, "returned NoneType: None"),
        (
            lambda state, bucket: bucket.group.all_reduce(torch.ones(3)),
            "the value a tensor of 3 elements, but must have a tensor of",
        ),
        (lambda state, bucket: bucket.group.barrier(), "the value NoneType: None"),
    ],
)
@on_ranks(2)
def test_hooks_that_return_something_else_are_named(
    group: shoal.ProcessGroup, hook: object, message: str
) -> None:
    model = wrapped(group, hook=hook)
    with pytest.raises(UsageError, match=rf"hook .*<lambda> on rank {group.rank}, for bucket 0, .*{message}"):
        loss_of(model, batches(1)[0]).backward()


@on_ranks(2)
def test_an_exception_of_a_hook_or_of_its_callback_ends_backward(group: shoal.ProcessGroup) -> None:
    def fails(_: object, bucket: GradBucket) -> shoal.Future[torch.Tensor]:
        raise KeyError("in the hook")

    def fails_later(_: object, bucket: GradBucket) -> shoal.Future[torch.Tensor]:
        return average(None, bucket).then(lambda future: {}["in the callback"])

    for hook, message in ((fails, "in the hook"), (fails_later, "in the callback")):
        model = wrapped(group, hook=hook)
        with pytest.raises(KeyError, match=message):
            loss_of(model, batches(1)[0]).backward()


@on_ranks(1)
def test_a_second_hook_is_refused(group: shoal.ProcessGroup) -> None:
    model = wrapped(group, hook=functools.partial(average))
    with pytest.raises(UsageError, match="registered already on rank 0"):
        model.register_comm_hook(None, average)


@on_ranks(1)
def test_hooks_run_in_the_thread_of_backward(group: shoal.ProcessGroup) -> None:
    threads = set()

    def note(_: object, bucket: GradBucket) -> shoal.Future[torch.Tensor]:
        threads.add(threading.current_thread())
        return average(None, bucket)

    model = wrapped(group, hook=note)
    loss_of(model, batches(1)[0]).backward()
    assert threads == {threading.current_thread()}


class _WithNothing(nn.Module):
    """A parameter without elements, in a bucket of its own dtype, and one number."""

    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.zeros(0, 3, dtype=torch.float64))
        self.number = nn.Parameter(torch.tensor(2.0))

    def forward(self, factor: float) -> torch.Tensor:
        return self.number * factor + self.nothing.sum()


@pytest.mark.parametrize("name", [name for name in hooks.__all__ if name.endswith("_hook")])
@on_ranks(2)
def test_every_hook_takes_buckets_without_elements_and_of_one(group: shoal.ProcessGroup, name: str) -> None:
    states: dict[str, Any] = {
        "powerSGD_hook": hooks.PowerSGDState(group, start_powerSGD_iter=2),
        "batched_powerSGD_hook": hooks.PowerSGDState(group, start_powerSGD_iter=2),
        "post_localSGD_hook": hooks.PostLocalSGDState(group, group, 2),
    }
    model = wrapped(group, _WithNothing())
    model.register_comm_hook(states.get(name), getattr(hooks, name))
    for _ in range(4):
        model.zero_grad()
        model(1.0 + group.rank).backward()
        assert model.module.nothing.grad.shape == (0, 3)
        assert model.module.number.grad.item() == (1.0 + group.rank if name == "noop_hook" else 1.5)
