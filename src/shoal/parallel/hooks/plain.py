"""Hooks without compression: an all-reduce, as without a hook, and no communication."""

from __future__ import annotations

import torch

from ...future import Future
from ...group import ProcessGroup
from ...spec import AVG
from .bucket import GradBucket
from .contract import group_of


def allreduce_hook(state: ProcessGroup | None, bucket: GradBucket) -> Future[torch.Tensor]:
    """Average the gradients with one all-reduce, as without a hook.  Used to build other hooks.

    Args:
        state: the group to average over; None: that of the model.
        bucket: the gradients.

    Returns:
        A future of the bucket's buffer.

    Raises:
        UsageError: ``state`` has another type.
    """
    return group_of(state, bucket, "allreduce_hook").all_reduce(bucket.buffer(), AVG)


def noop_hook(state: object, bucket: GradBucket) -> Future[torch.Tensor]:
    """Keep the gradients of each rank, to measure the cost of communication.  The ranks' models diverge.

    Args:
        state: not used.
        bucket: the gradients.
    """
    future: Future[torch.Tensor] = Future()
    future.set_result(bucket.buffer())
    return future
