"""Post-local SGD: average gradients over all ranks at first, and later only over a subgroup.

From Lin, Stich, Patel and Jaggi, "Don't use large mini-batches, use local SGD" (arXiv:1808.07217).  The
models of the subgroups are averaged periodically by :class:`shoal.PeriodicModelAverager`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...common.arguments import accept_both_group_names
from ...errors import UsageError
from ...future import Future
from ...group import ProcessGroup
from .allreduce import allreduce_hook, noop_hook
from .contract import GradBucket, checked_group


@accept_both_group_names
@dataclass(eq=False, repr=False)
class PostLocalSGDState:
    """The state of :func:`post_localSGD_hook`.

    Args:
        process_group: the group to average over until ``start_localSGD_iter``; None: that of the model.
        subgroup: the group to average over afterwards, for example the ranks on the same host; made with
            ``group.split(color)`` or ``group.subgroup(ranks)``.
        start_localSGD_iter: number of backward passes that average over ``process_group``.
        post_local_gradient_allreduce: whether to average gradients afterwards; False needs no ``subgroup``.

    Attributes:
        iter: number of backward passes so far.

    Raises:
        UsageError: an argument is invalid.
    """

    process_group: ProcessGroup | None
    subgroup: ProcessGroup | None
    start_localSGD_iter: int
    post_local_gradient_allreduce: bool = True

    def __post_init__(self) -> None:
        self.process_group = checked_group(self.process_group, "process_group")
        self.subgroup = checked_group(self.subgroup, "subgroup")
        start = self.start_localSGD_iter
        if not isinstance(start, int) or start < 0:
            raise UsageError(f"start_localSGD_iter is a number of backward passes, got {start!r}")
        if self.post_local_gradient_allreduce and self.subgroup is None:
            raise UsageError(
                "post-local SGD needs a subgroup, the ranks over which gradients are averaged after "
                f"{start} passes: for example subgroup=group.split(color), with one color per "
                "host; or post_local_gradient_allreduce=False to average none"
            )
        self.iter = 0


def post_localSGD_hook(state: PostLocalSGDState, bucket: GradBucket) -> Future[torch.Tensor]:
    """Average the gradients over all ranks until ``state.start_localSGD_iter``, then over the subgroup.

    Args:
        state: equal on all ranks except for the subgroup.
        bucket: the gradients.

    Returns:
        A future of the bucket's buffer.

    Raises:
        UsageError: ``state`` has another type.
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
