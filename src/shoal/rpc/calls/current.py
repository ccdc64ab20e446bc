"""``shoal.rpc.current``: information about the call that a handler serves.

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
        peer: number of the connection on which the call arrived.
    """

    __slots__ = ("_letter", "agent", "caller", "peer")

    def __init__(self, agent: Any, caller: str, letter: _Letter) -> None:
        self.agent = agent
        self.caller = caller
        self.peer = letter.peer
        self._letter = letter

    def remaining(self) -> float | None:
        """Return seconds until the call times out, at least 0.0; None: no timeout, or no reply expected."""
        return self._letter.remaining()

    def cancelled(self) -> bool:
        """Whether the caller no longer waits: it cancelled the call, timed out, or is lost."""
        return self._letter.cancelled()


_current: ContextVar[Current | None] = ContextVar("shoal_rpc_current", default=None)


def current() -> Current:
    """Return the call that this thread or asyncio task serves.

    Raises:
        UsageError: it does not serve a call.
    """
    found = _current.get()
    if found is None:
        raise UsageError("shoal.rpc.current(): this code was not called by another worker")
    return found


def served_by(agent: object) -> tuple[int, int] | None:
    """Return the call to ``agent`` that this thread or asyncio task serves, if a reply to it is expected.

    Returns:
        the numbers of the connection and of the call.
    """
    found = _current.get()
    if found is None or found.agent is not agent or not found._letter.call:
        return None
    return found.peer, found._letter.call


def enter_call(call: Current) -> Token[Current | None]:
    """Make ``call`` the current one, until :func:`leave_call`."""
    return _current.set(call)


def leave_call(token: Token[Current | None]) -> None:
    """Restore the current call from before :func:`enter_call`."""
    _current.reset(token)
