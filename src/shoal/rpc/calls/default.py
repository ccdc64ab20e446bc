"""The default agent of the process and default timeouts of calls."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ...common.arguments import checked_seconds
from ...errors import UsageError
from ..connection.meeting import WorkerMeeting
from .current import current

#: torch's value for "use the timeout of the agent"
UNSET = -1.0


class _DefaultAgent:
    """The default agent of the process, created by ``init_rpc`` and closed by ``shutdown``.

    Attributes:
        meeting: of the fixed set of workers that it belongs to; None: workers may join and leave at any time.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._agent: Any = None
        self.meeting: WorkerMeeting | None = None
        self._pid = 0
        self._changing = False

    def agent(self) -> Any:
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

    def set(self, agent: Any, meeting: WorkerMeeting | None = None) -> None:
        """Set the default agent."""
        self._agent, self.meeting = agent, meeting


state = _DefaultAgent()


def default_agent(operation: str) -> Any:
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
