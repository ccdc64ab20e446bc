"""The ranks that give gradients in a pass, where not all of them do (within a Join)."""

from __future__ import annotations

from collections.abc import Callable


class Participants:
    """The ranks that run a forward pass and give gradients in its backward pass.

    The answer comes from the other ranks, and is waited for only when it is needed.

    Args:
        find: returns ``(first, scale)``; it is called once, when one of the two is first asked for.  Without
            it all ranks take part.
    """

    __slots__ = ("_find", "_found")

    def __init__(self, find: Callable[[], tuple[int, float]] | None = None) -> None:
        self._find = find
        self._found = (0, 1.0)

    @property
    def first(self) -> int:
        """The lowest rank that takes part; the same on all ranks."""
        return self.resolve()[0]

    @property
    def scale(self) -> float:
        """The factor for averages over all ranks: other than 1 if the mean is over the participants alone."""
        return self.resolve()[1]

    def resolve(self) -> tuple[int, float]:
        """The pair ``(first, scale)``; waits for the other ranks the first time.

        Raises:
            UsageError: the ranks treat a batch differently; on every rank that asks.
        """
        if self._find is not None:
            self._found = self._find()
            self._find = None
        return self._found
