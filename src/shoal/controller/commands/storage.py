"""Memory of tensors on nodes, and its uses by several streams."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .space import Space


class StorageUses:
    """The uses of a storage that other streams may have to wait for.

    Attributes:
        written: the log of the last command that wrote to it, and the position after that command; None: it
            was in the default stream, before there were others.
        uses: for each log, the position after its last use since then.
        users: logs that ever used it.
        views: further tensors in it, by space and id: the log and position that made each.
    """

    __slots__ = ("users", "uses", "views", "written")

    def __init__(self) -> None:
        self.written: tuple[Space, int] | None = None
        self.uses: dict[Space, int] = {}
        self.users: set[Space] = set()
        self.views: dict[tuple[int, int], tuple[Space, int]] = {}


class Storage:
    """The memory of one or more tensors; `joined` is the storage of a place that replaced it, if any."""

    __slots__ = ("_past", "joined")

    def __init__(self) -> None:
        self.joined: Storage | None = None
        self._past: StorageUses | None = None

    @property
    def past(self) -> StorageUses:
        """The uses of this memory, recorded once there are several streams."""
        if self._past is None:
            self._past = StorageUses()
        return self._past


def merge_storages(storages: Sequence[Storage]) -> Storage:
    """Merge storages that may be the same memory into one.

    All commands on them must precede later ones, as after :meth:`.stream_order.StreamOrder.apart`.
    """
    first, *others = dict.fromkeys(storages)
    for each in others:
        first.past.users |= each.past.users
        first.past.views.update(each.past.views)
        each.joined = first
    return first
