"""What a forked child inherits: nothing that works.

A fork copies memory but not threads, and shares sockets with the parent.  A child that used them would
corrupt the parent's traffic, and one that merely kept them open would hide the parent's death from its
peers.  So the child marks every group as forked, and lets each backend drop what it holds.
"""

from __future__ import annotations

import os
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .process_group import ProcessGroup

_groups: weakref.WeakSet[ProcessGroup] = weakref.WeakSet()


def watch(group: ProcessGroup) -> None:
    """From now on a forked child refuses to use ``group``."""
    _groups.add(group)


def forget(group: ProcessGroup) -> None:
    """``group`` is closed."""
    _groups.discard(group)


def _after_fork_in_child() -> None:
    backends = {}
    for group in list(_groups):
        group._become_forked()
        backends[id(group._backend)] = group._backend
    _groups.clear()
    for backend in backends.values():
        backend.after_fork_in_child()


os.register_at_fork(after_in_child=_after_fork_in_child)
