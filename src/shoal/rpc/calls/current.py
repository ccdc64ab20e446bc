"""A handler can ask here about the call that it serves.

def slow(x):
    for batch in x:
        if shoal.rpc.current().cancelled():
            return None
        ...
"""

from __future__ import annotations

from contextvars import ContextVar, Token
from typing import Any, Protocol

from ...errors import UsageError


class _Letter(Protocol):
    @property
    def peer(self) -> int: ...

    @property
    def call(self) -> int: ...

    def remaining(self) -> float | None: ...

    def cancelled(self) -> bool: ...


class Current:
    """The call that a handler serves.

    Attributes:
        caller: name of the worker that called.
        agent: the agent that was called.
        peer: number of the connection that the call came on.
    """

    __slots__ = ("_letter", "agent", "caller", "peer")

    def __init__(self, agent: Any, caller: str, letter: _Letter) -> None:
        self.agent = agent
        self.caller = caller
        self.peer = letter.peer
        self._letter = letter

    def remaining(self) -> float | None:
        """Seconds until the caller gives up, 0.0 if it has; None: it waits for ever, or for no reply."""
        return self._letter.remaining()

    def cancelled(self) -> bool:
        """Whether nobody wants the result any more: the caller cancelled, gave up, or is lost."""
        return self._letter.cancelled()


_current: ContextVar[Current | None] = ContextVar("shoal_rpc_current", default=None)


def current() -> Current:
    """The call that this thread, or this asyncio task, serves.

    Raises:
        UsageError: it serves none.
    """
    found = _current.get()
    if found is None:
        raise UsageError("shoal.rpc.current(): this code was not called by another worker")
    return found


def served_by(agent: object) -> tuple[int, int] | None:
    """The call to ``agent`` that this thread, or this asyncio task, serves, if it has a reply to come.

    Returns:
        the number of its connection, and its own on that.
    """
    found = _current.get()
    if found is None or found.agent is not agent or not found._letter.call:
        return None
    return found.peer, found._letter.call


def enter_call(call: Current) -> Token[Current | None]:
    """Make ``call`` the current one, until :func:`leave_call`."""
    return _current.set(call)


def leave_call(token: Token[Current | None]) -> None:
    """End what :func:`enter_call` began."""
    _current.reset(token)
