"""The open master of this process."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ...errors import ForkedProcess, UsageError

if TYPE_CHECKING:
    from ..api.master import Master


_master: Master | None = None
_forked = False


def master() -> Master:
    """The open master; raises `UsageError` or `ForkedProcess` if there is none."""
    if _master is None:
        if _forked:
            raise ForkedProcess("the nodes belong to the parent process, of which this one is a fork")
        raise UsageError("there are no nodes: call shoal.init_master_worker(workers=n) first")
    return _master


def opened() -> Master | None:
    """The open master, or None."""
    return _master


def set_master(master: Master | None) -> None:
    global _master
    _master = master


def _after_fork_in_child() -> None:
    global _master, _forked
    if _master is not None:
        _master.become_forked()
        _master, _forked = None, True


os.register_at_fork(after_in_child=_after_fork_in_child)
