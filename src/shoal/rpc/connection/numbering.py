"""Functions that are called again and again go by a number.

The first calls of a function carry its pickled reference and the number that it shall have; as soon as the
reply to one of them says that the other end knows the number, later calls carry that alone.  Calls may be
taken up in any order, so nothing less would do.  Each connection has tables of its own.

A table has :data:`MOST` places.  When all are taken, the end that calls gives those of the functions that it
has not called for the longest time to new ones.  Each number is used once: its place is its remainder, so the
callee sees that a number takes the place of an older one, and no message about that is needed.  A place that
a call without a reply may still need is not given away, and neither is that of a function that was posted
(nobody says when a post was taken up).  So a call that somebody waits for finds its function; any other that
comes too late is refused, and runs nothing else.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable
from types import BuiltinFunctionType, FunctionType
from typing import Any

from ...errors import RpcError

#: how many functions have a number at a time; those beyond go by reference
MOST = 4096
#: in the place of a number: the function stands in the pickle, and gets none
NONE = 0xFFFFFFFF
#: how many places are freed at a time
_AT_ONCE = 256
#: how many places functions that were posted may keep
_POSTED = MOST // 2
#: of so few functions nobody needs to know which was called last
_KEPT_IN_ORDER = MOST // 2


class _NumberedFunction:
    """A function that has a number."""

    __slots__ = ("found", "known", "number", "posted")

    def __init__(self, number: int) -> None:
        self.number = number
        #: whether calls find it; False while its place is perhaps given away
        self.found = True
        #: whether the other end knows it
        self.known = False
        self.posted = False


class Sent:
    """The functions that this end calls over a connection.

    Args:
        in_use: gives the numbers that calls have which are made and have no reply.
    """

    def __init__(self, in_use: Callable[[], list[int]]) -> None:
        self._in_use = in_use
        self._lock = threading.Lock()
        #: in the order of their last calls, the oldest first
        self._entries: OrderedDict[Callable[..., Any], _NumberedFunction] = OrderedDict()
        self._places: list[_NumberedFunction | None] = []
        self._free: list[int] = []
        self._posted = 0
        #: numbers of calls that are being made
        self._making: dict[int, int] = {}
        self._tickets = itertools.count(1)

    def use(self, fn: Callable[..., Any], *, post: bool = False) -> tuple[int, bool, int]:
        """The number of ``fn`` for a call, or for a post if the other end knows it; NONE if it gets none.

        Returns:
            the number; whether the other end knows it; a ticket for :meth:`over`, due when the call has been
            made or could not be.  From then on the number stays that of ``fn`` as long as ``in_use`` has it.
        """
        if type(fn) not in (FunctionType, BuiltinFunctionType, type) or "<" in fn.__qualname__:
            return NONE, False, 0
        ticket = next(self._tickets)
        while True:
            entry = self._entries.get(fn)
            if entry is None and (post or (entry := self._new(fn)) is None):
                self.over(ticket)
                return NONE, False, 0
            self._making[ticket] = entry.number
            if entry.found:  # whoever frees its place from now on sees that it is in use
                break
        if len(self._entries) > _KEPT_IN_ORDER:
            with contextlib.suppress(KeyError):
                self._entries.move_to_end(fn)
        if post and not (entry.known and self._may_keep(entry)):
            self.over(ticket)
            return NONE, False, 0
        return entry.number, entry.known, ticket

    def over(self, ticket: int) -> None:
        """The call that :meth:`use` gave the ticket for has been made, or could not be."""
        self._making.pop(ticket, None)

    def answered(self, number: int) -> None:
        """The other end says that it knows ``number``."""
        place = number % MOST
        entry = self._places[place] if place < len(self._places) else None
        if entry is not None and entry.number == number:
            entry.known = True

    # -- inside --------------------------------------------------------------------------------

    def _new(self, fn: Callable[..., Any]) -> _NumberedFunction | None:
        with self._lock:
            entry = self._entries.get(fn)
            if entry is not None:
                return entry
            if len(self._places) < MOST:
                number = len(self._places)
                self._places.append(None)
            else:
                if not self._free:
                    self._make_room()
                if not self._free or (number := self._free.pop()) >= NONE:
                    return None
            entry = self._places[number % MOST] = _NumberedFunction(number)
            self._entries[fn] = entry
            return entry

    def _make_room(self) -> None:
        """Take their places from the functions that were not called for the longest time."""
        out = []
        for fn in list(itertools.islice(self._entries, 2 * _AT_ONCE + self._posted)):
            entry = self._entries[fn]
            if not entry.posted:
                entry.found = False
                del self._entries[fn]
                out.append((fn, entry))
            if len(out) == 2 * _AT_ONCE:
                break
        # Nobody finds them any more: who has them already is among those that make or await a call.
        busy = {*self._making.copy().values(), *self._in_use()}
        back = []
        for fn, entry in out:
            if entry.number in busy or len(self._free) >= _AT_ONCE:
                back.append((fn, entry))
            else:
                self._places[entry.number % MOST] = None
                self._free.append(entry.number + MOST)
        for fn, entry in reversed(back):
            entry.found = True
            self._entries[fn] = entry
            self._entries.move_to_end(fn, last=False)

    def _may_keep(self, entry: _NumberedFunction) -> bool:
        """Let an entry that is posted keep its place, if few do."""
        with self._lock:
            if not entry.posted and self._posted < _POSTED:
                entry.posted = True
                self._posted += 1
            return entry.posted


class Received:
    """The functions that the other end has called over a connection."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._places: dict[int, tuple[int, Callable[..., Any]]] = {}

    def learn(self, number: int, fn: Callable[..., Any]) -> None:
        """``fn`` came with ``number``, and takes the place of what had an older one."""
        place = number % MOST
        with self._lock:
            there = self._places.get(place)
            if there is None or there[0] <= number:
                self._places[place] = (number, fn)

    def function(self, number: int) -> Callable[..., Any]:
        """The function that has ``number``."""
        there = self._places.get(number % MOST)
        if there is None or there[0] != number:
            raise RpcError(f"a call names function number {number}, which was never told, or long ago")
        return there[1]
