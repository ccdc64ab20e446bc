"""The workers of a master's nodes, and the notification of nodes about each other.

The lock is held only briefly, so no wait of the program delays the notification of a loss, not even a wait
for a node that itself waits for the lost one.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from ...errors import ShoalError
from ...rpc import Agent, Peer
from ..commands.line import NodeConnection
from ..node import peers

#: number of failed workers remembered, for those that fail while they become nodes
_REMEMBERED = 1000


class Roster:
    """The workers of the nodes of `session`, called through `agent`.

    Attributes:
        living: connections of the nodes that are not lost, by worker name.
    """

    def __init__(self, session: str, agent: Agent) -> None:
        self.living: dict[str, NodeConnection] = {}
        self._session = session
        self._agent = agent
        self._lock = threading.Lock()
        #: the last workers that failed
        self._gone: deque[str] = deque(maxlen=_REMEMBERED)
        #: the latest worker of each node, with its epoch
        self._latest: dict[int, tuple[Peer, int]] = {}

    def members(self, index: int) -> tuple[int, dict[int, peers.Member]]:
        """Return the epoch of the next worker of a node, and the present nodes."""
        with self._lock:
            epoch = self._latest[index][1] + 1 if index in self._latest else 0
            return epoch, {each: (peer.name, of) for each, (peer, of) in self._latest.items()}

    def peer(self, index: int) -> Peer:
        """Return the latest worker of a node."""
        return self._latest[index][0]

    def add(self, line: NodeConnection, peer: Peer, known: Mapping[int, peers.Member]) -> bool:
        """Add a new node, which knows the nodes `known`; return whether it has failed meanwhile."""
        index = line.index
        with self._lock:
            self._latest[index] = peer, line.epoch
            self.living[peer.name] = line
            self._tell(peers.meet, index, line.epoch, peer.name)
            for each, (other, epoch) in self._latest.items():
                if each != index and known.get(each) != (other.name, epoch):
                    self._post(peer, peers.meet, each, epoch, other.name)
                if each != index and other.name not in self.living:
                    self._post(peer, peers.lose, each, epoch)
            return peer.name in self._gone

    def names(self) -> list[str]:
        """Return the worker names of the nodes that are not lost."""
        with self._lock:
            return list(self.living)

    def lose(self, name: str, why: str) -> NodeConnection | None:
        """Mark a worker as lost; return its connection if it was a node that was not lost before."""
        with self._lock:
            self._gone.append(name)
            line = self.living.pop(name, None)
            if line is not None:
                line.lose(why)
                self._tell(peers.lose, line.index, line.epoch)
            return line

    def _tell(self, fn: Callable[..., Any], of: int, *args: Any) -> None:
        """Call ``fn(session, of, *args)`` on all nodes except `of`."""
        for index, (peer, _) in self._latest.items():
            if index != of:
                self._post(peer, fn, of, *args)

    def _post(self, peer: Peer, fn: Callable[..., Any], *args: Any) -> None:
        """Call ``fn(session, *args)`` on a node if it is connected, without waiting."""
        if self._agent.connections.existing(peer.name) is not None:
            with contextlib.suppress(ShoalError):
                peer.post(fn, self._session, *args)
