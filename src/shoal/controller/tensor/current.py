"""The open master of this process."""

from __future__ import annotations

import os
from typing import Any, Protocol

from ...errors import ForkedProcess, UsageError
from ..commands.space import Space


class MasterInterface(Protocol):
    """The interface of a master for operators and the device module."""

    name: str
    strict: bool

    @property
    def count(self) -> int: ...

    def space(self, index: int) -> Space: ...

    def synchronize(self) -> None: ...

    def seed(self, seed: int) -> None: ...

    def streams(self) -> Any: ...  # stream_order.StreamOrder

    def become_forked(self) -> None: ...


_master: MasterInterface | None = None
_forked = False


def master() -> MasterInterface:
    """The open master; raises `UsageError` or `ForkedProcess` if there is none."""
    if _master is None:
        if _forked:
            raise ForkedProcess("the nodes belong to the parent process, of which this one is a fork")
        raise UsageError("there are no nodes: call shoal.init_master_worker(workers=n) first")
    return _master


def opened() -> MasterInterface | None:
    """The open master, or None."""
    return _master


def set_master(master: MasterInterface | None) -> None:
    global _master
    _master = master


def _after_fork_in_child() -> None:
    global _master, _forked
    if _master is not None:
        _master.become_forked()
        _master, _forked = None, True


os.register_at_fork(after_in_child=_after_fork_in_child)
