"""The logs of further streams."""

from __future__ import annotations

from .line import Line
from .space import Space


class Branch(Space):
    """The log of a further stream for a space, which has the tensors.

    Attributes:
        holders: how many of the program's streams it is.
    """

    __slots__ = ("holders",)

    def __init__(self, home: Space, stream: int, lines: tuple[Line, ...]) -> None:
        super().__init__(home.device, lines, home.lock, number=home.number, home=home)
        self.stream = stream
        self.holders = 0
        self.freed = home.freed
        self.ordering = home.ordering
        home.further.append(self)

    @property
    def tensors(self) -> int:
        """They are counted with its home."""
        return 0
