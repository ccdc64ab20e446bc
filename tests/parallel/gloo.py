"""torch.distributed over Gloo, in the processes of a group of shoal: what is compared with runs there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist

import shoal

_kept: list[object] = []


@contextmanager
def gloo(group: shoal.ProcessGroup, meeting: str, timeout: float) -> Iterator[None]:
    """torch's default group has the ranks of ``group``.

    Args:
        meeting: path of a file that does not exist yet, where the ranks meet.
        timeout: seconds for one operation.
    """
    dist.init_process_group(
        "gloo",
        init_method=f"file://{meeting}",
        rank=group.rank,
        world_size=group.size,
        timeout=timedelta(seconds=timeout),
    )
    try:
        yield
    finally:
        # Gloo's threads hold their group for a moment longer than its operations last, and if one of them is
        # the last to let go, it waits for itself: "Resource deadlock avoided".
        _kept.append(dist.distributed_c10d._get_default_group())
        dist.destroy_process_group()
