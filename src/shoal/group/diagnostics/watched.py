"""The interface of a group for this package; it avoids an import cycle with :class:`~shoal.ProcessGroup`."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any, Protocol

from ...backend.base import Backend, DataChannel, GroupSpec
from ...errors import GroupError
from ...recorder import FlightRecorder
from ...store import Store
from ...world import World


class Watched(Protocol):
    """The attributes of a group that dumps and the checks of member lists use."""

    _channel: DataChannel
    _spec: GroupSpec
    _world: World
    _closing: threading.Lock
    #: number of subgroups made with each name, choices and list
    _made: Counter[tuple[Any, ...]]

    @property
    def _backend(self) -> Backend: ...

    @property
    def rank(self) -> int: ...

    @property
    def ranks(self) -> tuple[int, ...]: ...

    @property
    def name(self) -> str: ...

    @property
    def state(self) -> str: ...

    @property
    def timeout(self) -> float: ...

    @property
    def store(self) -> Store: ...

    @property
    def recorder(self) -> FlightRecorder | None: ...

    def _subgroup(
        self, members: list[int], name: str | None, timeout: float | None, *, asked: str
    ) -> Watched: ...

    def _reported(self, failure: GroupError) -> GroupError: ...

    def abort(self, reason: str = "") -> None: ...

    def close(self, timeout: float | None = None) -> None: ...
