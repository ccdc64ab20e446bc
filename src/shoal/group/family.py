"""The groups that use one world's connections."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from .lists import ListWatch

if TYPE_CHECKING:
    from .process_group import ProcessGroup


class Family:
    """The open groups that were made from a world, without the world; all of them share it.

    Attributes:
        lists: finds out that members gave different lists.
    """

    def __init__(self) -> None:
        self.forget_threads()
        self._members: set[ProcessGroup] = set()
        self._ended = False

    def forget_threads(self) -> None:
        """In a forked child: locks may have been held by threads that the child does not have."""
        self._lock = threading.Lock()
        self.lists = ListWatch()

    def add(self, make: Callable[[], ProcessGroup]) -> ProcessGroup | None:
        """Make a group that belongs to the family, unless that has :meth:`ended <end>`: then None."""
        with self._lock:
            if self._ended:
                return None
            group = make()
            self._members.add(group)
            return group

    def discard(self, group: ProcessGroup) -> None:
        """``group`` is closed."""
        with self._lock:
            self._members.discard(group)

    def members(self) -> list[ProcessGroup]:
        """Those that are open now."""
        with self._lock:
            return list(self._members)

    def end(self) -> list[ProcessGroup]:
        """Take no further group; those that are to be closed."""
        with self._lock:
            self._ended = True
            return list(self._members)
