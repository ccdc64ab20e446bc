"""Protocols of the spaces whose commands a line carries, and of a trace."""

from __future__ import annotations

from collections import Counter, deque
from contextlib import AbstractContextManager
from typing import Any, Protocol

from ...errors import ShoalError
from .batch import SegmentBatch
from .history import Issued


class OnLine(Protocol):
    """A space, as its lines see it; :class:`.space.Space` says what each part is."""

    number: int
    lines: tuple[Any, ...]
    further: list[Any]
    over: bool
    freed: deque[Any]
    calls: dict[Any, Any]
    issued: int
    awaited: int
    missed: Counter[str]
    lost: ShoalError | None
    size: int

    @property
    def tensors(self) -> int: ...

    def used(self) -> bool: ...

    def end(self) -> None: ...

    def cut(self) -> None: ...

    def uncut(self) -> Issued: ...

    def leave(self) -> None: ...

    def lose(self, why: ShoalError) -> None: ...


class Watching(Protocol):
    """Hears of the lines of a node; see :class:`shoal.controller.api.trace.NodeTrace`."""

    def sent(self, stream: int, batch: SegmentBatch, begun: int) -> None: ...

    def acknowledged(self, batch: SegmentBatch) -> None: ...

    def waiting(self) -> AbstractContextManager[None]: ...
