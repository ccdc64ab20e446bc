"""Closing inherited sockets in a forked child.

Otherwise the workers of a DataLoader would keep the connections of their parent open after it has ended, and
its peers would not detect that.
"""

from __future__ import annotations

import os
from typing import Protocol
from weakref import WeakSet


class _Closable(Protocol):
    def close(self) -> None: ...


_inherited: WeakSet[_Closable] = WeakSet()


def close_in_forked_child(resource: _Closable) -> None:
    """Call ``resource.close()`` in every child that this process forks while ``resource`` exists.

    ``close`` must only close the child's copy of a descriptor, and may be called twice.
    """
    _inherited.add(resource)


def _after_fork() -> None:
    for resource in list(_inherited):
        resource.close()
    _inherited.clear()


os.register_at_fork(after_in_child=_after_fork)
