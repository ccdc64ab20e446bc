"""The context of a thread or task: the call that it serves, and the default agent of the process.

def slow(x):
    for batch in x:
        if shoal.rpc.current().cancelled():
            return None
        ...
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

from ...common.arguments import checked_seconds
from ...errors import UsageError
from ..connection.endpoint import Message
from ..connection.meeting import WorkerMeeting

if TYPE_CHECKING:
    from ..agent import Agent

#: torch's value for "use the timeout of the agent"
UNSET = -1.0


class Current:
    """The call that a handler serves.

    Attributes:
        caller: name of the worker that called.
        agent: the agent that was called.
        peer: number of the connection on which the call arrived.
    """

    __slots__ = ("_message", "agent", "caller", "peer")

    def __init__(self, agent: Agent, caller: str, message: Message) -> None:
        self.agent = agent
        self.caller = caller
        self.peer = message.peer
        self._message = message

    def remaining(self) -> float | None:
        """Return seconds until the call times out, at least 0.0; None: no timeout, or no reply expected."""
        return self._message.remaining()

    def cancelled(self) -> bool:
        """Whether the caller no longer waits: it cancelled the call, timed out, or is lost."""
        return self._message.cancelled()


#: the call that this thread or asyncio task serves
current_call: ContextVar[Current | None] = ContextVar("shoal_rpc_current", default=None)


def current() -> Current:
    """Return the call that this thread or asyncio task serves.

    Raises:
        UsageError: it does not serve a call.
    """
    found = current_call.get()
    if found is None:
        raise UsageError("shoal.rpc.current(): this code was not called by another worker")
    return found


def served_by(agent: object) -> tuple[int, int] | None:
    """Return the call to ``agent`` that this thread or asyncio task serves, if a reply to it is expected.

    Returns:
        the numbers of the connection and of the call.
    """
    found = current_call.get()
    if found is None or found.agent is not agent or not found._message.call:
        return None
    return found.peer, found._message.call


class _DefaultAgent:
    """The default agent of the process, created by ``init_rpc`` and closed by ``shutdown``.

    Attributes:
        meeting: of the fixed set of workers that it belongs to; None: workers may join and leave at any time.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._agent: Agent | None = None
        self.meeting: WorkerMeeting | None = None
        self._pid = 0
        self._changing = False

    def agent(self) -> Agent | None:
        """Return the agent; None: there is none, or it belongs to the parent of this forked process."""
        return self._agent if self._pid == os.getpid() else None

    @contextmanager
    def changing(self, operation: str) -> Iterator[None]:
        """A context in which only this thread creates or closes the agent."""
        with self._lock:
            if self._changing and self._pid == os.getpid():
                raise UsageError(f"{operation}: another thread is calling init_rpc or shutdown")
            self._changing, pid, self._pid = True, self._pid, os.getpid()
            if pid != self._pid:
                self._agent = self.meeting = None
        try:
            yield
        finally:
            self._changing = False

    def set(self, agent: Agent | None, meeting: WorkerMeeting | None = None) -> None:
        """Set the default agent."""
        self._agent, self.meeting = agent, meeting


state = _DefaultAgent()


def default_agent(operation: str) -> Agent:
    """Return the agent whose call this thread serves, else the default agent; raise UsageError if none."""
    try:
        return current().agent
    except UsageError:
        agent = state.agent()
    if agent is None:
        raise UsageError(
            f"{operation}: RPC has not been initialized in this process; call shoal.rpc.init_rpc(name) "
            "first, or use the methods of an agent (shoal.rpc.join)"
        )
    return agent


def call_timeout(timeout: float | None, unset: float, name: str = "timeout") -> float:
    """Convert ``timeout`` to seconds, as torch does: None or -1: ``unset``; 0: no limit.

    Raises UsageError, which names the argument ``name``, if it is not a valid number of seconds.
    """
    if timeout is None or timeout == UNSET:
        return unset
    return math.inf if timeout == 0 else checked_seconds(name, timeout)
