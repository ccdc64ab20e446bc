"""The workers of a master's nodes: losses, and the notification of nodes about each other.

The lock is held only briefly, so no wait of the program delays the notification of a loss, not even a wait
for a node that itself waits for the lost one.

Connections to other machines break when heartbeats are missing. Connections within a machine have no
heartbeats, because a busy machine could delay them; there a thread checks the processes.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from ... import config
from ...common.formatting import format_seconds
from ...errors import ShoalError
from ...rpc import Agent, Peer
from ..commands.connection import NodeConnection
from ..node import peers

_logger = logging.getLogger("shoal")
_CONNECTION_LOST = "its process ended, or its connection broke"
#: maximum seconds between two checks for stopped nodes
MAX_CHECK_INTERVAL_S = 1.0
#: number of failed workers remembered, for those that fail while they become nodes
MAX_REMEMBERED_FAILURES = 1000


class Roster:
    """The workers of the nodes of `session`, called through `agent`.

    Attributes:
        surviving: connections of the nodes that are not lost, by worker name.
        callbacks: called with the index of a lost node.
    """

    def __init__(self, session: str, agent: Agent) -> None:
        self.surviving: dict[str, NodeConnection] = {}
        self._session = session
        self._agent = agent
        self._lock = threading.Lock()
        #: the last workers that failed
        self._failed: deque[str] = deque(maxlen=MAX_REMEMBERED_FAILURES)
        #: the latest connection to each node
        self._latest: dict[int, NodeConnection] = {}
        self.callbacks: list[Callable[[int], Any]] = []
        agent.on_connection_lost(self.lose)
        self._timeout_s = config.HEARTBEAT_TIMEOUT.get()
        self._closing = threading.Event()
        name = "shoal-master-stopped-nodes"
        self._thread = threading.Thread(target=self._watch_stopped, name=name, daemon=True)
        self._thread.start()

    def members(self, index: int) -> tuple[int, dict[int, peers.Member]]:
        """Return the epoch of the next worker of a node, and the present nodes."""
        with self._lock:
            epoch = self._latest[index].epoch + 1 if index in self._latest else 0
            return epoch, {each: (node.peer.name, node.epoch) for each, node in self._latest.items()}

    def add(self, node: NodeConnection, known: Mapping[int, peers.Member]) -> bool:
        """Add a new node, which knows the nodes `known`; return whether it has failed meanwhile."""
        index, name = node.index, node.peer.name
        with self._lock:
            self._latest[index] = node
            self.surviving[name] = node
            self._notify_others(peers.add_node, index, node.epoch, name)
            for each, other in self._latest.items():
                if each != index and known.get(each) != (other.peer.name, other.epoch):
                    self._notify(node.peer, peers.add_node, each, other.epoch, other.peer.name)
                if each != index and other.peer.name not in self.surviving:
                    self._notify(node.peer, peers.lose_node, each, other.epoch)
            return name in self._failed

    def lose(self, name: str, why: str = _CONNECTION_LOST) -> None:
        """Mark a worker as lost; call the callbacks if it was a node that was not lost before."""
        with self._lock:
            self._failed.append(name)
            node = self.surviving.pop(name, None)
            if node is None:
                return
            node.lose(why)
            self._notify_others(peers.lose_node, node.index, node.epoch)
        for fn in list(self.callbacks):
            try:
                fn(node.index)
            except BaseException:
                with contextlib.suppress(BaseException):  # a user's logging handler may raise
                    _logger.exception("a callback of Master.on_lost failed for node %d", node.index)

    def close(self) -> None:
        """End the search for stopped nodes."""
        self._closing.set()
        if threading.current_thread() is not self._thread:  # it runs callbacks, which may close the master
            self._thread.join()

    def _watch_stopped(self) -> None:
        """Give up nodes of this machine that a signal, as of Ctrl-Z or SIGSTOP, has stopped for too long."""
        since: dict[str, float] = {}
        looked, pause = time.monotonic(), min(MAX_CHECK_INTERVAL_S, self._timeout_s / 4)
        why = f"its process was stopped by a signal for {format_seconds(self._timeout_s)}"
        while not self._closing.wait(pause):
            now = time.monotonic()
            if now - looked > self._timeout_s / 2:
                since = {}  # this process was stopped too: restart the time of the others
            looked = now
            since = {each: since.get(each, now) for each in self._stopped()}
            for name, begin in since.items():
                if now - begin >= self._timeout_s:
                    self.lose(name, why)
                    link = self._agent.connections.existing(name)
                    if link is not None:  # dropping it ends all waits for the worker
                        self._agent.endpoint.post.drop(link.number, why)

    def _stopped(self) -> list[str]:
        """Return the names of surviving workers on this machine that a signal has stopped."""
        with self._lock:
            names = list(self.surviving)
        links = [(name, self._agent.connections.existing(name)) for name in names]
        return [name for name, link in links if link is not None and link.worker.is_stopped()]

    def _notify_others(self, fn: Callable[..., Any], of: int, *args: Any) -> None:
        """Call ``fn(session, of, *args)`` on all nodes except `of`."""
        for index, node in self._latest.items():
            if index != of:
                self._notify(node.peer, fn, of, *args)

    def _notify(self, peer: Peer, fn: Callable[..., Any], *args: Any) -> None:
        """Call ``fn(session, *args)`` on a node if it is connected, without waiting."""
        if self._agent.connections.existing(peer.name) is not None:
            with contextlib.suppress(ShoalError):
                peer.post(fn, self._session, *args)
