"""The workers that are a master's nodes, and what each is told of the others.

All of it happens under a lock that is held for moments: no wait of the program delays the news of a death,
not even one for a node that waits for the dead one.
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

#: workers that died and are remembered, for those that die while they become nodes
_REMEMBERED = 1000


class Roster:
    """The workers of a session's nodes.

    Attributes:
        living: the lines of the nodes that live, by the names of their workers.

    Args:
        session: its name.
        agent: calls the nodes.
    """

    def __init__(self, session: str, agent: Agent) -> None:
        self.living: dict[str, NodeConnection] = {}
        self._session = session
        self._agent = agent
        self._lock = threading.Lock()
        #: the last workers that died
        self._gone: deque[str] = deque(maxlen=_REMEMBERED)
        #: the latest worker of each node, with its epoch
        self._latest: dict[int, tuple[Peer, int]] = {}

    def members(self, index: int) -> tuple[int, dict[int, peers.Member]]:
        """The epoch of the next worker of a node, and the nodes that there are."""
        with self._lock:
            epoch = self._latest[index][1] + 1 if index in self._latest else 0
            return epoch, {each: (peer.name, of) for each, (peer, of) in self._latest.items()}

    def peer(self, index: int) -> Peer:
        """The latest worker of a node."""
        return self._latest[index][0]

    def add(self, line: NodeConnection, peer: Peer, known: Mapping[int, peers.Member]) -> bool:
        """A worker has become a node, which knows these others; whether it has died meanwhile."""
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
        """The names of the workers that are nodes and live."""
        with self._lock:
            return list(self.living)

    def lose(self, name: str, why: str) -> NodeConnection | None:
        """A worker has died; the line of the node that it was, if it was one and it is not known yet."""
        with self._lock:
            self._gone.append(name)
            line = self.living.pop(name, None)
            if line is not None:
                line.lose(why)
                self._tell(peers.lose, line.index, line.epoch)
            return line

    def _tell(self, fn: Callable[..., Any], of: int, *args: Any) -> None:
        """Call ``fn(session, of, *args)`` at all nodes but ``of``."""
        for index, (peer, _) in self._latest.items():
            if index != of:
                self._post(peer, fn, of, *args)

    def _post(self, peer: Peer, fn: Callable[..., Any], *args: Any) -> None:
        """Call ``fn(session, *args)`` at a node, if it lives, and wait for nothing."""
        if self._agent.links.existing(peer.name) is not None:
            with contextlib.suppress(ShoalError):
                peer.post(fn, self._session, *args)
