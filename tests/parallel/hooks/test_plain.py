"""Hooks that lose nothing: the all-reduce, none at all, post-local SGD; what hooks are given and refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import shoal
from shoal.parallel import hooks
from shoal.testing import run_threads
from tests.parallel.training import on_ranks

from .buckets import SHAPES, Model, gradient, same_on_all


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("given", [True, False], ids=["a group as state", "no state"])
def test_the_all_reduce_averages_over_the_ranks(size: int, given: bool) -> None:
    def rank(group: shoal.ProcessGroup) -> Any:
        model = Model(group, count=3)
        return model.reduce(hooks.allreduce_hook, group if given else None), model.mean()

    results = run_threads(rank, size)
    averaged = same_on_all([own for own, _ in results])
    torch.testing.assert_close(averaged, results[0][1], rtol=1e-6, atol=1e-6)


def test_a_group_as_state_may_be_smaller_than_that_of_the_model() -> None:
    def rank(group: shoal.ProcessGroup) -> Any:
        with group.split(group.rank // 2) as pair:
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


@on_ranks(1)
def test_memory_is_the_same_in_every_step_and_differs_by_name(group: shoal.ProcessGroup) -> None:
    (bucket,) = Model(group).buckets
    memory = bucket.memory("mine", 10, torch.float16)
    assert (memory.dtype, memory.shape) == (torch.float16, (10,))
    assert bucket.memory("mine", 10, torch.float16) is memory
    assert bucket.memory("other", 10, torch.float16).data_ptr() != memory.data_ptr()
    assert bucket.memory("mine", 10, torch.bfloat16).data_ptr() != memory.data_ptr()


@on_ranks(1)
def test_the_bucket_of_another_dtype_has_its_gradients_where_the_first_has_them(
    group: shoal.ProcessGroup,
) -> None:
    model = Model(group)
    (bucket,) = model.buckets
    model.compute()
    small = bucket.as_dtype(torch.bfloat16)
    assert bucket.as_dtype(torch.bfloat16) is small
    small.set_buffer(bucket.buffer())
    assert small.buffer().dtype is torch.bfloat16
    assert small.is_last()
    assert small.index() == 0
    assert small.indices() == tuple(range(len(SHAPES)))
    for own, wide in zip(small.gradients(), bucket.gradients(), strict=True):
        assert own.stride() == wide.stride()
        assert torch.equal(own, wide.bfloat16())


@on_ranks(4)
def test_the_neighbours_average_among_themselves_after_the_first_passes(group: shoal.ProcessGroup) -> None:
    pair = group.split(group.rank // 2)
    state = hooks.PostLocalSGDState(None, pair, start_localSGD_iter=2)
    model = Model(group, count=2)
    for step in range(4):
        own = model.reduce(hooks.post_localSGD_hook, state)
        ranks = range(4) if step < 2 else range(group.rank // 2 * 2, group.rank // 2 * 2 + 2)
        for index, averaged in enumerate(own):
            mean = sum(gradient(other, step, index, averaged.shape) for other in ranks) / len(ranks)
            torch.testing.assert_close(averaged, mean, rtol=1e-6, atol=1e-6)
    assert state.iter == 4
    pair.close()


@on_ranks(2)
def test_gradients_may_stay_on_each_rank(group: shoal.ProcessGroup) -> None:
    state = hooks.PostLocalSGDState(group, None, 1, post_local_gradient_allreduce=False)
    model = Model(group, dtype=torch.float64)
    model.reduce(hooks.post_localSGD_hook, state)
    for index, own in enumerate(model.reduce(hooks.post_localSGD_hook, state)):
        assert torch.equal(own, gradient(group.rank, 1, index, own.shape))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((None, None, 3), "needs a subgroup.*after 3 passes"),
        ((3, None, 3), "process_group must be a ProcessGroup or None, got int"),
        ((None, "pair", 3), "subgroup must be a ProcessGroup or None, got str"),
        ((None, None, -1, False), "start_localSGD_iter is a number of backward passes, got -1"),
    ],
)
def test_settings_without_meaning_are_refused(arguments: Any, message: str) -> None:
    with pytest.raises(shoal.UsageError, match=message):
        hooks.PostLocalSGDState(*arguments)
