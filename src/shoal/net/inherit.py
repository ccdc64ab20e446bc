"""A forked child closes the sockets that it inherits.

A DataLoader's workers would otherwise keep their parent's connections open after its death, and
its peers would wait for a process that is gone.
"""

from __future__ import annotations

import os
from typing import Protocol
from weakref import WeakSet


class _Closable(Protocol):
    def close(self) -> None: ...


_inherited: WeakSet[_Closable] = WeakSet()


def close_in_forked_child(resource: _Closable) -> None:
    """Have ``resource.close()`` called in every child that this process forks while it lives.

    ``close`` must do no more than close the child's copy of a descriptor, and may be called twice.
    """
    _inherited.add(resource)


def _after_fork() -> None:
    for resource in list(_inherited):
        resource.close()
    _inherited.clear()


os.register_at_fork(after_in_child=_after_fork)
