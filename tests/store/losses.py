"""Answers that are lost, for the tests of stores on servers that are not shoal's."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class Losses:
    """Loses every ``every``-th answer to a write, half of them before the server has heard of it.

    Args:
        error: is raised in the place of the answer.
    """

    def __init__(self, every: int, error: type[Exception]) -> None:
        self._every, self._error, self._count = every, error, itertools.count(1)

    def of(self, write: Callable[[], T]) -> T:
        """The answer to ``write``, unless it is lost."""
        number = next(self._count)
        if number % (2 * self._every) == 0:
            raise self._error("lost on the way there")
        answer = write()
        if number % self._every == 0:
            raise self._error("lost on the way back")
        return answer
