"""Ranks that are processes, each with a default group, and live through many tests."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import shoal.distributed as dist
from tests.compat.pool import Pools
from tests.compat.rank import Context

SIZE = 4
#: seconds that an operation of a test may take
_OPERATION = 20.0


class Pool:
    """Ranks that wait for :meth:`run`; they start with the first run, and anew after one that failed."""

    def __init__(self) -> None:
        self._pools = Pools(backend=None)

    def run(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """What ``fn(*args)`` returns on each rank; the errors of all ranks are raised here.

        ``fn`` stands at the top level of a module, and leaves a default group behind.
        """
        return self._pools(SIZE).run(_with_default_group, fn, args)

    def close(self) -> None:
        """Let all ranks destroy their groups and end."""
        self.run(dist.destroy_process_group)
        self._pools.close()


def _with_default_group(context: Context, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    if not dist.is_initialized():
        warnings.simplefilter("ignore", ResourceWarning)  # of groups that tests drop
        begin(context.rank, context.size, str(context.scratch / "meeting"))
    return fn(*args)


def begin(rank: int, size: int, meeting: str) -> None:
    """Make the default group, in place of the one there is."""
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("gloo", f"file://{meeting}", _OPERATION, size, rank)
