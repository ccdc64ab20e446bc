"""The master of this process."""

from __future__ import annotations

from typing import Any, Protocol

from ..errors import UsageError
from .space import Space


class Nodes(Protocol):
    """A master, as operators and the device see it."""

    name: str
    strict: bool

    @property
    def count(self) -> int: ...

    def space(self, index: int) -> Space: ...

    def synchronize(self) -> None: ...

    def seed(self, seed: int) -> None: ...

    def streams(self) -> Any: ...  # ordering.Streams


_master: Nodes | None = None


def master() -> Nodes:
    """The one that is open.

    Raises:
        UsageError: there is none.
    """
    if _master is None:
        raise UsageError("there are no nodes: call shoal.init_master_worker(workers=n) first")
    return _master


def opened() -> Nodes | None:
    """The one that is open, if any."""
    return _master


def set_master(master: Nodes | None) -> None:
    """Another one, or none."""
    global _master
    _master = master
