"""torch.distributed over Gloo, in the processes of a group of shoal: what is compared with runs there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch.distributed import distributed_c10d

import shoal

_kept: list[object] = []


class _OneThread(dist.ProcessGroupGloo):
    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta, **others: Any) -> None:
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_default_device()]
        options._timeout = timeout
        options._threads = 1
        super().__init__(store, rank, size, options)


@contextmanager
def gloo(
    group: shoal.ProcessGroup, meeting: str, timeout: float, *, one_thread: bool = False
) -> Iterator[None]:
    """torch's default group has the ranks of ``group``.

    Args:
        meeting: path of a file that does not exist yet, where the ranks meet.
        timeout: seconds for one operation.
        one_thread: for sparse all-reduces.  Torch gives a group of Gloo two threads, and each writes the name
            of the operation that it completed last to the same ``std::string``, without a lock (torch 2.13,
            ``ProcessGroupGloo::runLoop``).  The name of a sparse all-reduce is so long that it lies on the
            heap: one thread frees or writes to what the other has freed, and the process dies later,
            anywhere.  A group of one rank that does nothing but a few hundred of them at a time does so in
            seconds.  With one thread, operations run one after another, and none may be waited for in a
            callback, as PowerSGD does.
    """
    threads: AbstractContextManager[object] = nullcontext()
    if one_thread:
        threads = mock.patch.object(distributed_c10d, "ProcessGroupGloo", _OneThread)
    with threads:
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
