"""What a bucket offers to hooks that keep something from step to step."""

from __future__ import annotations

import torch

import shoal
from tests.parallel.training import on_ranks

from .buckets import SHAPES, Model


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
