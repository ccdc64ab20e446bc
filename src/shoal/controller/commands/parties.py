"""Protocols of the spaces and the trace that a `NodeConnection` works with."""

from __future__ import annotations

from collections import Counter, deque
from contextlib import AbstractContextManager
from typing import Any, Protocol

from ...errors import ShoalError
from .batch import SegmentBatch
from .history import Issued


class OnLine(Protocol):
    """The interface of a space for its connections; see :class:`.space.Space`."""

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
    """The interface of a trace for connections; see :class:`shoal.controller.api.trace.NodeTrace`."""

    def sent(self, stream: int, batch: SegmentBatch, begun: int) -> None: ...

    def acknowledged(self, batch: SegmentBatch) -> None: ...

    def waiting(self) -> AbstractContextManager[None]: ...
