"""Gradients in half precision: as exact as one rounding there and one back allow."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import shoal
from shoal.parallel import hooks
from shoal.testing import run_threads
from tests.parallel.training import on_ranks, pairwise

from .buckets import Model, gradient, same_on_all

HOOKS = {
    f"{dtype}{way}": (hook, dtype, unit)
    for dtype, unit, direct, around in (
        (torch.float16, 2**-11, hooks.fp16_compress_hook, hooks.fp16_compress_wrapper),
        (torch.bfloat16, 2**-8, hooks.bf16_compress_hook, hooks.bf16_compress_wrapper),
    )
    for way, hook in (("", direct), (" around the all-reduce", around(hooks.allreduce_hook)))
}


@pairwise(size=[2, 3], dtype=[torch.float32, torch.float64], name=HOOKS)
def test_the_mean_is_rounded_once_before_and_once_after(size: int, dtype: torch.dtype, name: str) -> None:
    hook, narrow, unit = HOOKS[name]

    def rank(group: shoal.ProcessGroup) -> Any:
        model = Model(group, count=2, dtype=dtype)
        model.reduce(hook)
        return model.reduce(hook)

    averaged = same_on_all(run_threads(rank, size))
    for index, own in enumerate(averaged):
        rounded = [gradient(rank, 1, index, own.shape).to(narrow).double() for rank in range(size)]
        mean = sum(rounded) / size
        assert bool(((own - mean).abs() <= unit * mean.abs() + 1e-7).all())


def test_what_wrapped_hooks_see_and_send_is_half_as_large() -> None:
    seen = []

    def rank(group: shoal.ProcessGroup) -> None:
        def watched(state: object, bucket: hooks.GradBucket) -> shoal.Future[torch.Tensor]:
            seen.append((state, bucket.buffer().dtype, bucket.gradients()[0].dtype))
            return hooks.allreduce_hook(None, bucket)

        Model(group).reduce(hooks.bf16_compress_wrapper(watched), "mine")

    run_threads(rank, 2)
    assert seen == [("mine", torch.bfloat16, torch.bfloat16)] * 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_buckets_that_are_halves_already_are_reduced_as_they_are(dtype: torch.dtype) -> None:
    def rank(group: shoal.ProcessGroup) -> Any:
        plain = Model(group, dtype=dtype).reduce(hooks.allreduce_hook)
        return plain, Model(group, dtype=dtype).reduce(hooks.fp16_compress_hook)

    for plain, own in run_threads(rank, 2):
        assert all(torch.equal(a, b) for a, b in zip(plain, own, strict=True))


def test_sums_above_the_range_of_halves_are_no_trouble() -> None:
    """They are divided in float32; an implementation that adds halves would have to divide before."""

    def large(rank: int, step: int, index: int, shape: torch.Size) -> torch.Tensor:
        return torch.full(shape, 60000.0, dtype=torch.float64)

    def rank(group: shoal.ProcessGroup) -> Any:
        return Model(group, gradients=large).reduce(hooks.fp16_compress_hook)

    for own in same_on_all(run_threads(rank, 4)):
        assert bool((own == 60000).all())


@on_ranks(1)
def test_hooks_that_return_futures_of_torch_can_be_wrapped(group: shoal.ProcessGroup) -> None:
    def foreign(state: object, bucket: hooks.GradBucket) -> Any:
        future: Any = torch.futures.Future()
        future.set_result([bucket.buffer() * 2])
        return future

    model = Model(group, gap=0)
    for index, own in enumerate(model.reduce(hooks.fp16_compress_wrapper(foreign))):
        expected = gradient(group.rank, 0, index, own.shape).half().double() * 2
        assert torch.equal(own, expected)


def test_memory_is_taken_once() -> None:
    def rank(group: shoal.ProcessGroup) -> Any:
        model = Model(group)
        asked: list[object] = []
        empty = group.empty
        group.empty = lambda *shape, **kind: asked.append(shape) or empty(*shape, **kind)  # type: ignore[method-assign,func-returns-value]
        for _ in range(3):
            model.reduce(hooks.fp16_compress_hook)
        return len(asked)

    assert run_threads(rank, 2) == [1, 1]
