"""The all-reduce as a hook, no communication at all, and what hooks are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import shoal
from shoal.parallel import hooks
from shoal.testing import run_threads
from tests.parallel.training import on_ranks

from .buckets import Model, gradient, same_on_all


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("given", [True, False], ids=["a group as state", "no state"])
def test_the_all_reduce_averages_over_the_ranks(size: int, given: bool) -> None:
    def rank(group: shoal.ProcessGroup) -> Any:
        model = Model(group, count=3)
        return model.reduce(hooks.allreduce_hook, group if given else None), model.mean()

    results = run_threads(rank, size)
    averaged = same_on_all([own for own, _ in results])
    for a, b in zip(averaged, results[0][1], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_a_group_as_state_may_be_smaller_than_that_of_the_model() -> None:
    def rank(group: shoal.ProcessGroup) -> Any:
        pair = group.split(group.rank // 2)
        assert pair is not None
        return Model(group).reduce(hooks.allreduce_hook, pair)

    results = run_threads(rank, 4)
    for first in (0, 2):
        own = same_on_all(results[first : first + 2])
        expected = (gradient(first, 0, 0, own[0].shape) + gradient(first + 1, 0, 0, own[0].shape)) / 2
        torch.testing.assert_close(own[0], expected, rtol=1e-6, atol=1e-6)


@on_ranks(2)
def test_without_communication_gradients_stay_what_they_are(group: shoal.ProcessGroup) -> None:
    model = Model(group, dtype=torch.float64)
    for index, own in enumerate(model.reduce(hooks.noop_hook)):
        assert torch.equal(own, gradient(group.rank, 0, index, own.shape))


@pytest.mark.parametrize(
    "hook",
    [
        hooks.allreduce_hook,
        hooks.fp16_compress_hook,
        hooks.bf16_compress_hook,
        hooks.quantization_pertensor_hook,
        hooks.quantization_perchannel_hook,
        hooks.powerSGD_hook,
        hooks.batched_powerSGD_hook,
        hooks.post_localSGD_hook,
    ],
    ids=lambda hook: hook.__name__,
)
@on_ranks(1)
def test_a_wrong_state_is_refused_with_the_name_of_the_hook(group: shoal.ProcessGroup, hook: Any) -> None:
    with pytest.raises(shoal.UsageError, match=rf"the state of {hook.__name__} is a .* got int"):
        hook(3, Model(group).buckets[0])


@pytest.mark.parametrize(
    "wrapper", [hooks.fp16_compress_wrapper, hooks.bf16_compress_wrapper], ids=lambda w: w.__name__
)
def test_wrappers_refuse_what_is_no_function(wrapper: Any) -> None:
    with pytest.raises(shoal.UsageError, match=rf"{wrapper.__name__} takes a communication hook.*got int"):
        wrapper(3)


@on_ranks(1)
def test_wrappers_say_which_hook_returned_no_future_or_no_tensor(group: shoal.ProcessGroup) -> None:
    def careless(state: object, bucket: hooks.GradBucket) -> Any:
        return state

    (bucket,) = Model(group).buckets
    wrapped = hooks.fp16_compress_wrapper(careless)
    with pytest.raises(shoal.UsageError, match=r"careless must return a Future of a tensor, got str"):
        wrapped("nothing", bucket)
    future: shoal.Future[Any] = shoal.Future()
    future.set_result([1, 2])
    with pytest.raises(shoal.UsageError, match=r"careless must have a tensor as its value, got list"):
        wrapped(future, bucket).wait()
