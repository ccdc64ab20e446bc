"""Detection of nodes on the master's machine that are stopped by a signal, such as Ctrl-Z or SIGSTOP.

Connections to other machines break when heartbeats are missing. Connections within a machine have no
heartbeats, because a busy machine could delay them; there the state of the process is checked.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable

from ...common.formatting import format_seconds
from ...rpc import Agent

#: maximum seconds between two checks
_LOOK = 1.0


class Standstills:
    """Watches the nodes of this machine.

    Args:
        agent: the master's agent.
        living: returns the worker names of the nodes.
        give_up: called with the name of a worker that was stopped for too long, and a text with the reason.
        seconds: time for which a worker may be stopped.
    """

    def __init__(
        self,
        agent: Agent,
        living: Callable[[], Iterable[str]],
        give_up: Callable[[str, str], None],
        seconds: float,
    ) -> None:
        self._agent = agent
        self._living = living
        self._give_up = give_up
        self._seconds = seconds
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="shoal-master-standstills", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._over.set()
        if threading.current_thread() is not self._thread:  # it runs callbacks, which may close the master
            self._thread.join()

    def _watch(self) -> None:
        since: dict[str, float] = {}
        looked, pause = time.monotonic(), min(_LOOK, self._seconds / 4)
        while not self._over.wait(pause):
            now = time.monotonic()
            if now - looked > self._seconds / 2:
                since = {}  # this process was stopped too: restart the time of the others
            looked = now
            since = {each: since.get(each, now) for each in self._living() if self._is_stopped(each)}
            for name, begin in since.items():
                if now - begin >= self._seconds:
                    self._give_up(
                        name, f"its process was stopped by a signal for {format_seconds(self._seconds)}"
                    )

    def _is_stopped(self, name: str) -> bool:
        line = self._agent.connections.existing(name)
        return line is not None and line.worker.is_stopped()
