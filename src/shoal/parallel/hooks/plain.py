"""The hooks that leave gradients as they are: the all-reduce that is there without a hook, and nothing."""

from __future__ import annotations

import torch

from ...future import Future
from ...group import ProcessGroup
from ...spec import AVG
from .bucket import GradBucket
from .contract import group_of


def allreduce_hook(state: ProcessGroup | None, bucket: GradBucket) -> Future[torch.Tensor]:
    """Average the gradients with one all-reduce: what happens without a hook, to build others from.

    Args:
        state: the ranks to average over; None means those of the model.
        bucket: the gradients.

    Returns:
        A future of the bucket's buffer.

    Raises:
        UsageError: ``state`` is something else.
    """
    return group_of(state, bucket, "allreduce_hook").all_reduce(bucket.buffer(), AVG)


def noop_hook(state: object, bucket: GradBucket) -> Future[torch.Tensor]:
    """Leave the gradients as they are on each rank: to measure what communication costs.

    The ranks' models drift apart with it.

    Args:
        state: anything; it is not looked at.
        bucket: the gradients.
    """
    future: Future[torch.Tensor] = Future()
    future.set_result(bucket.buffer())
    return future
