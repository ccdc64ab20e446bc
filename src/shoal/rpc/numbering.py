"""Functions that are called again and again go by a number.

The first calls of a function carry its pickled reference and the number that it shall have; as soon as the
reply to one of them says that the other end knows the number, later calls carry that alone.  Calls may be
taken up in any order, so nothing less would do.  Each connection has tables of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import BuiltinFunctionType, FunctionType
from typing import Any

from ..errors import RpcError

#: how many functions get a number; those beyond always go by reference
MOST = 4096
#: in the place of a number: the function stands in the pickle, and gets none
NONE = 0xFFFFFFFF


class Sent:
    """The functions that this end has called over a connection."""

    def __init__(self) -> None:
        self._numbers: dict[Callable[..., Any], int] = {}
        self._next = itertools.count()
        self._known: set[int] = set()

    def number(self, fn: Callable[..., Any]) -> tuple[int, bool]:
        """The number of ``fn`` and whether the other end knows it; NONE if it gets none."""
        if type(fn) not in (FunctionType, BuiltinFunctionType, type) or "<" in fn.__qualname__:
            return NONE, False
        number = self._numbers.get(fn)
        if number is None:
            if len(self._numbers) >= MOST:
                return NONE, False
            number = self._numbers.setdefault(fn, next(self._next))
        return number, number in self._known

    def answered(self, number: int) -> None:
        """The other end says that it knows ``number``."""
        self._known.add(number)


class Received:
    """The functions that the other end has called over a connection."""

    def __init__(self) -> None:
        self._functions: dict[int, Callable[..., Any]] = {}

    def learn(self, number: int, fn: Callable[..., Any]) -> None:
        """``fn`` came with ``number``."""
        if number < MOST:
            self._functions[number] = fn

    def function(self, number: int) -> Callable[..., Any]:
        """The function that has ``number``."""
        try:
            return self._functions[number]
        except KeyError:
            raise RpcError(f"a call names function number {number}, which was never told") from None
