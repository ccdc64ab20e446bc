"""Post-local SGD: average gradients among all ranks at first, and then only among neighbours.

From Lin, Stich, Patel and Jaggi, "Don't use large mini-batches, use local SGD" (arXiv:1808.07217).  What the
groups of neighbours learn is brought together by averaging parameters from time to time:
:class:`shoal.PeriodicModelAverager`.
"""

from __future__ import annotations

import torch

from ...errors import UsageError
from ...future import Future
from ...group import ProcessGroup
from .bucket import GradBucket
from .contract import checked_group
from .plain import allreduce_hook, noop_hook


class PostLocalSGDState:
    """The state of :func:`post_localSGD_hook`.

    Args:
        process_group: averages gradients until ``start_localSGD_iter``; None means the model's.
        subgroup: averages them from then on: the neighbours of this rank and itself, such as those on the
            same host; made with ``group.split(color)`` or ``group.subgroup(ranks)``.
        start_localSGD_iter: how many backward passes average among all.
        post_local_gradient_allreduce: whether gradients are averaged at all from then on.  Without it
            ``subgroup`` is not needed.

    Attributes:
        iter: backward passes until now.

    Raises:
        UsageError: an argument makes no sense.
    """

    def __init__(
        self,
        process_group: ProcessGroup | None,
        subgroup: ProcessGroup | None,
        start_localSGD_iter: int,
        post_local_gradient_allreduce: bool = True,
    ) -> None:
        self.process_group = checked_group(process_group, "process_group")
        self.subgroup = checked_group(subgroup, "subgroup")
        if not isinstance(start_localSGD_iter, int) or start_localSGD_iter < 0:
            raise UsageError(
                f"start_localSGD_iter is a number of backward passes, got {start_localSGD_iter!r}"
            )
        if post_local_gradient_allreduce and subgroup is None:
            raise UsageError(
                "post-local SGD needs a subgroup, the ranks among which gradients are averaged after "
                f"{start_localSGD_iter} passes: subgroup=group.split(color), with one color a host, say; "
                "or post_local_gradient_allreduce=False to average none"
            )
        self.start_localSGD_iter = start_localSGD_iter
        self.post_local_gradient_allreduce = post_local_gradient_allreduce
        self.iter = 0


def post_localSGD_hook(state: PostLocalSGDState, bucket: GradBucket) -> Future[torch.Tensor]:
    """Average the gradients among all ranks until ``state.start_localSGD_iter``, then in the subgroup.

    Args:
        state: the same on all ranks, but for the subgroup.
        bucket: the gradients.

    Returns:
        A future of the bucket's buffer.

    Raises:
        UsageError: ``state`` is something else.
    """
    if not isinstance(state, PostLocalSGDState):
        raise UsageError(
            f"the state of post_localSGD_hook is a PostLocalSGDState, got {type(state).__name__}"
        )
    step = state.iter
    state.iter += bucket.is_last()
    if step < state.start_localSGD_iter:
        return allreduce_hook(state.process_group, bucket)
    if not state.post_local_gradient_allreduce:
        return noop_hook(None, bucket)
    return allreduce_hook(state.subgroup, bucket)
