"""Groups that live through many tests: ranks as threads that run what the test hands them.

Making a group takes longer than most of what tests do with it.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

from shoal.group import ProcessGroup
from shoal.testing import run_threads


class World:
    """``size`` ranks as threads, waiting for :meth:`run`; a context manager."""

    def __init__(self, size: int, **options: Any) -> None:
        self.size = size
        self._options = {"timeout": 300.0, "op_timeout": 20.0, **options}
        self._tasks: list[queue.SimpleQueue[Any]] = [queue.SimpleQueue() for _ in range(size)]
        self._outcomes: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._failed = False
        self._thread = threading.Thread(target=self._host, name="world", daemon=True)

    def run(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """``fn(group, *args)`` on every rank; their results, or the exception of the first that failed."""
        for tasks in self._tasks:
            tasks.put((fn, args))
        outcomes: dict[int, Any] = {}
        first_error = None
        while len(outcomes) < self.size:
            rank, value, error = self._outcomes.get(timeout=self._options["timeout"])
            outcomes[rank] = value
            first_error = first_error or error
        if first_error is not None:
            self._failed = True
            raise first_error
        return [outcomes[rank] for rank in range(self.size)]

    @property
    def usable(self) -> bool:
        """Whether all that ran so far ended well."""
        return not self._failed

    def _host(self) -> None:
        try:
            run_threads(self._serve, self.size, **self._options)
        except BaseException as error:
            for rank in range(self.size):
                self._outcomes.put((rank, None, error))

    def _serve(self, group: ProcessGroup) -> None:
        while (task := self._tasks[group.rank].get()) is not None:
            fn, args = task
            try:
                self._outcomes.put((group.rank, fn(group, *args), None))
            except BaseException as error:
                self._outcomes.put((group.rank, None, error))
                group.abort(f"a test failed on rank {group.rank}: {error!r}")

    def __enter__(self) -> World:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        for tasks in self._tasks:
            tasks.put(None)
        self._thread.join(self._options["timeout"])
        assert not self._thread.is_alive(), "the world did not end"


class Worlds:
    """Worlds by size and options, made when first asked for and used until one fails."""

    def __init__(self) -> None:
        self._worlds: dict[str, World] = {}

    def __call__(self, size: int, **options: Any) -> World:
        key = repr((size, sorted(options.items())))
        world = self._worlds.get(key)
        if world is None or not world.usable:
            if world is not None:
                world.__exit__()
            world = self._worlds[key] = World(size, **options).__enter__()
        return world

    def close(self) -> None:
        while self._worlds:
            self._worlds.popitem()[1].__exit__()
