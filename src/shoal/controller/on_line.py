"""What a line needs to know of the spaces whose commands it sends."""

from __future__ import annotations

from collections import Counter, deque
from typing import Any, Protocol

from ..errors import ShoalError
from .history import Issued


class OnLine(Protocol):
    """A space, as its lines see it; :class:`.space.Space` says what each part is."""

    freed: deque[Any]
    calls: dict[Any, Any]
    issued: int
    awaited: int
    missed: Counter[str]
    lost: ShoalError | None
    size: int

    @property
    def tensors(self) -> int: ...

    def cut(self) -> None: ...

    def uncut(self) -> Issued: ...

    def leave(self) -> None: ...

    def lose(self, why: ShoalError) -> None: ...
