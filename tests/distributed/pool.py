"""Ranks that are processes, each with a default group, and live through many tests.

The default group is one per process, so threads cannot take the place of ranks here; and starting
processes takes longer than most of what the tests do with them.
"""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import shoal.distributed as dist
from shoal.group import ProcessGroup
from shoal.testing import Ranks, processes

#: seconds until all tests of a pool must be done, and an operation of a test
_LIFE = 300.0
_OPERATION = 20.0


class Pool:
    """Ranks that wait for :meth:`run`; a context manager.

    They start with the first run, and anew after one that failed.

    Args:
        size: number of ranks.
        folder: an empty one, where the default groups meet.
    """

    def __init__(self, size: int, folder: Path) -> None:
        self.size = size
        self._folder = folder
        self._ranks: Ranks | None = None
        self._tasks = 0

    def run(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """What ``fn(*args)`` returns on each rank; the errors of all ranks are raised here.

        ``fn`` stands at the top level of a module, and leaves a default group behind.
        """
        task, self._tasks = self._tasks, self._tasks + 1
        if self._ranks is None:
            meeting = str(self._folder / f"meeting{task}")
            self._ranks = processes(_serve, self.size, meeting, task, timeout=_LIFE)
        self._ranks.store.set(f"task/{task}", pickle.dumps((fn, args)))
        keys = [f"done/{task}/{rank}" for rank in range(self.size)]
        try:
            outcomes = [pickle.loads(value) for value in self._ranks.store.multi_get(keys, 3 * _OPERATION)]
            errors = [f"rank {rank}:\n{error}" for rank, (_, error) in enumerate(outcomes) if error]
            assert not errors, "\n".join(errors)
        except BaseException:
            self._ranks.close()
            self._ranks = None
            raise
        return [value for value, _ in outcomes]

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._ranks is not None:
            self._ranks.store.set(f"task/{self._tasks}", pickle.dumps(None))
            ended = self._ranks.join()
            self._ranks.close()
            assert all(outcome.error is None for outcome in ended), ended


def _serve(group: ProcessGroup, meeting: str, task: int) -> None:
    begin(group.rank, group.size, meeting)
    while (job := pickle.loads(group.store.get(f"task/{task}", _LIFE))) is not None:
        fn, args = job
        value = error = None
        try:
            value = fn(*args)
        except BaseException as raised:
            error = traceback.format_exc()
            if (world := dist.group.WORLD) is not None:
                world.abort(f"a test failed on rank {group.rank}: {raised!r}")
        group.store.set(f"done/{task}/{group.rank}", pickle.dumps((value, error)))
        task += 1
    dist.destroy_process_group()


def begin(rank: int, size: int, meeting: str) -> None:
    """Make the default group, in place of the one there is."""
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("gloo", f"file://{meeting}", _OPERATION, size, rank)
