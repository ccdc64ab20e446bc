"""Numbers for functions that are called repeatedly, so that they are not pickled in each call.

The first calls of a function contain its pickled reference and its new number.  When the reply to one of them
confirms that the callee knows the number, later calls contain only the number.  The confirmation is needed
because calls may be handled in any order.  A number belongs to one function as long as the connection exists.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import BuiltinFunctionType, FunctionType
from typing import Any

#: maximum number of functions with a number on a connection; others are pickled in each call
MAX_FUNCTIONS = 4096
#: sent instead of a number: the function is in the pickle and gets no number
NO_NUMBER = 0xFFFFFFFF


class SentFunctions:
    """The functions that this end calls over a connection."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers: dict[Callable[..., Any], int] = {}
        #: the numbers that the other end knows
        self._confirmed: set[int] = set()

    def number_of(self, fn: Callable[..., Any], *, post: bool = False) -> tuple[int, bool]:
        """Return the number of ``fn``, and whether the other end knows it.

        The number is NO_NUMBER if ``fn`` has none, and for a ``post``, which is not confirmed, if the other
        end may not know it.
        """
        if type(fn) not in (FunctionType, BuiltinFunctionType, type) or "<" in fn.__qualname__:
            return NO_NUMBER, False
        number = self._numbers.get(fn, NO_NUMBER)
        if number in self._confirmed:
            return number, True
        if post:
            return NO_NUMBER, False
        return self._new(fn) if number == NO_NUMBER else number, False

    def confirm(self, number: int) -> None:
        """Note that the other end has confirmed ``number``."""
        self._confirmed.add(number)

    def _new(self, fn: Callable[..., Any]) -> int:
        with self._lock:
            if len(self._numbers) >= MAX_FUNCTIONS:
                return NO_NUMBER
            return self._numbers.setdefault(fn, len(self._numbers))
