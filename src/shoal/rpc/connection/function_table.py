"""Numbers for functions that are called repeatedly, so that they are not pickled in each call.

The first calls of a function contain its pickled reference and its new number.  When the reply to one of them
confirms that the callee knows the number, later calls contain only the number.  The confirmation is needed
because calls may be handled in any order.  Each connection has separate tables.

A table has :data:`MAX_FUNCTIONS` slots.  When all are in use, the caller reuses the slots of the functions
that were called least recently.  Each number is used once, and its slot is its remainder: so the callee sees
from a number that it replaces an older one.  A slot is not reused while a call of its function may have no
reply yet, nor after a post of its function, whose arrival is not confirmed.  So a call with a waiting caller
always finds its function; any other late call fails and never runs a wrong function.
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

#: maximum number of functions with a number at a time; others are pickled in each call
MAX_FUNCTIONS = 4096
#: sent instead of a number: the function is in the pickle and gets no number
NO_NUMBER = 0xFFFFFFFF
#: number of slots that are freed at a time
_SLOTS_FREED_AT_ONCE = 256
#: maximum number of slots of posted functions
_MAX_POSTED = MAX_FUNCTIONS // 2
#: number of functions from which on they are kept in order of their last calls
_MIN_ORDERED = MAX_FUNCTIONS // 2


class _NumberedFunction:
    """A function that has a number."""

    __slots__ = ("confirmed", "number", "posted", "usable")

    def __init__(self, number: int) -> None:
        self.number = number
        #: whether calls may use it; False while its slot may be reused
        self.usable = True
        #: whether the other end knows it
        self.confirmed = False
        self.posted = False


class SentFunctions:
    """The functions that this end calls over a connection.

    Args:
        in_use: returns the numbers of the functions of pending calls.
    """

    def __init__(self, in_use: Callable[[], list[int]]) -> None:
        self._in_use = in_use
        self._lock = threading.Lock()
        #: in the order of their last calls, the least recent first
        self._entries: OrderedDict[Callable[..., Any], _NumberedFunction] = OrderedDict()
        self._slots: list[_NumberedFunction | None] = []
        self._free: list[int] = []
        self._posted = 0
        #: ticket -> number of the function of a call that is being made
        self._making: dict[int, int] = {}
        self._tickets = itertools.count(1)

    def use(self, fn: Callable[..., Any], *, post: bool = False) -> tuple[int, bool, int]:
        """Return the number of ``fn``; NO_NUMBER: none, or a post whose receiver may not know it.

        Returns:
            the number; whether the other end knows it; a ticket for :meth:`release` when the
            call has been made or has failed.  The number remains that of ``fn`` until then, and
            afterwards as long as ``in_use`` returns it.
        """
        if type(fn) not in (FunctionType, BuiltinFunctionType, type) or "<" in fn.__qualname__:
            return NO_NUMBER, False, 0
        ticket = next(self._tickets)
        while True:
            entry = self._entries.get(fn)
            if entry is None and (post or (entry := self._new(fn)) is None):
                self.release(ticket)
                return NO_NUMBER, False, 0
            self._making[ticket] = entry.number
            if entry.usable:  # from now on _make_room sees that its slot is in use
                break
        if len(self._entries) > _MIN_ORDERED:
            with contextlib.suppress(KeyError):
                self._entries.move_to_end(fn)
        if post and not (entry.confirmed and self._may_keep(entry)):
            self.release(ticket)
            return NO_NUMBER, False, 0
        return entry.number, entry.confirmed, ticket

    def release(self, ticket: int) -> None:
        """End the use of a ticket of :meth:`use`: the call has been made or has failed."""
        self._making.pop(ticket, None)

    def confirm(self, number: int) -> None:
        """Note that the other end has confirmed ``number``."""
        slot = number % MAX_FUNCTIONS
        entry = self._slots[slot] if slot < len(self._slots) else None
        if entry is not None and entry.number == number:
            entry.confirmed = True

    # -- inside --------------------------------------------------------------------------------

    def _new(self, fn: Callable[..., Any]) -> _NumberedFunction | None:
        with self._lock:
            entry = self._entries.get(fn)
            if entry is not None:
                return entry
            if len(self._slots) < MAX_FUNCTIONS:
                number = len(self._slots)
                self._slots.append(None)
            else:
                if not self._free:
                    self._make_room()
                if not self._free or (number := self._free.pop()) >= NO_NUMBER:
                    return None
            entry = self._slots[number % MAX_FUNCTIONS] = _NumberedFunction(number)
            self._entries[fn] = entry
            return entry

    def _make_room(self) -> None:
        """Free the slots of the least recently called functions."""
        out = []
        for fn in list(itertools.islice(self._entries, 2 * _SLOTS_FREED_AT_ONCE + self._posted)):
            entry = self._entries[fn]
            if not entry.posted:
                entry.usable = False
                del self._entries[fn]
                out.append((fn, entry))
            if len(out) == 2 * _SLOTS_FREED_AT_ONCE:
                break
        # New calls cannot use them now; earlier calls are in _making or in _in_use().
        busy = {*self._making.copy().values(), *self._in_use()}
        back = []
        for fn, entry in out:
            if entry.number in busy or len(self._free) >= _SLOTS_FREED_AT_ONCE:
                back.append((fn, entry))
            else:
                self._slots[entry.number % MAX_FUNCTIONS] = None
                self._free.append(entry.number + MAX_FUNCTIONS)
        for fn, entry in reversed(back):
            entry.usable = True
            self._entries[fn] = entry
            self._entries.move_to_end(fn, last=False)

    def _may_keep(self, entry: _NumberedFunction) -> bool:
        """Reserve the slot of a posted function permanently if possible; return whether it is reserved."""
        with self._lock:
            if not entry.posted and self._posted < _MAX_POSTED:
                entry.posted = True
                self._posted += 1
            return entry.posted


class ReceivedFunctions:
    """The functions that the other end has called over a connection."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._slots: dict[int, tuple[int, Callable[..., Any]]] = {}

    def learn(self, number: int, fn: Callable[..., Any]) -> None:
        """Store ``fn`` as ``number``, replacing a function with an older number in the same slot."""
        slot = number % MAX_FUNCTIONS
        with self._lock:
            there = self._slots.get(slot)
            if there is None or there[0] <= number:
                self._slots[slot] = (number, fn)

    def function(self, number: int) -> Callable[..., Any]:
        """Return the function with ``number``."""
        there = self._slots.get(number % MAX_FUNCTIONS)
        if there is None or there[0] != number:
            raise RpcError(f"a call names function number {number}, which is unknown here or was replaced")
        return there[1]
