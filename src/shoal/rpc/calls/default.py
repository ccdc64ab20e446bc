"""The agent and the timeout of calls where nobody names them."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ...common.keywords import checked_seconds
from ...errors import UsageError
from ..connection.meeting import WorkerMeeting
from .current import current

#: torch's word for a timeout that the agent's settings say
UNSET = -1.0


class _DefaultAgent:
    """The process's own agent, which ``init_rpc`` makes and ``shutdown`` ends.

    Attributes:
        meeting: of the fixed number of workers that it is one of; None: they come and go.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._agent: Any = None
        self.meeting: WorkerMeeting | None = None
        self._pid = 0
        self._changing = False

    def agent(self) -> Any:
        """The agent; None: there is none, or the process was forked from the one that has it."""
        return self._agent if self._pid == os.getpid() else None

    @contextmanager
    def changing(self, operation: str) -> Iterator[None]:
        """A block in which this thread, and no other, makes the agent or ends it."""
        with self._lock:
            if self._changing and self._pid == os.getpid():
                raise UsageError(f"{operation}: another thread calls init_rpc or shutdown just now")
            self._changing, pid, self._pid = True, self._pid, os.getpid()
            if pid != self._pid:
                self._agent = self.meeting = None
        try:
            yield
        finally:
            self._changing = False

    def set(self, agent: Any, meeting: WorkerMeeting | None = None) -> None:
        """From now on ``agent`` is the process's own."""
        self._agent, self.meeting = agent, meeting


state = _DefaultAgent()


def default_agent(operation: str) -> Any:
    """The agent that serves the call which this thread runs for, else the process's own.

    Raises:
        UsageError: there is none.
    """
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
    """Seconds that a call may take, from an argument with torch's meaning.

    Args:
        timeout: None or -1: ``unset``; 0: no limit.
        name: of the argument, for the error.

    Raises:
        UsageError: it is nothing of this, and no number of seconds.
    """
    if timeout is None or timeout == UNSET:
        return unset
    return math.inf if timeout == 0 else checked_seconds(name, timeout)
