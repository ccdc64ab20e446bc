"""The ranks that contribute gradients to a pass; in a Join these may be a subset."""

from __future__ import annotations

from collections.abc import Callable


class Participants:
    """The ranks that run a forward pass and contribute gradients to its backward pass.

    Args:
        find: returns ``(first, scale)``, waiting for the other ranks.  Called once, at the first use of
            either.  None: all ranks take part.
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
        """The factor for averages over all ranks; not 1 if the mean must be over the participants only."""
        return self.resolve()[1]

    def resolve(self) -> tuple[int, float]:
        """Return ``(first, scale)``; the first call waits for the other ranks.

        Raises UsageError, on every rank that calls it, if the ranks treat a batch differently.
        """
        if self._find is not None:
            self._found = self._find()
            self._find = None
        return self._found
