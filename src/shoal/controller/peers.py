"""A node's half of what goes from node to node: tensors that are sent and awaited, and who is lost.

A copy is a ``send`` in the log of one node and a ``receive`` in that of another, or of several.  The n-th
send on a channel, from one node to another, is the n-th receive on it, because both logs are in the order of
the program.  A send never waits for the receiver's program: its node goes on as soon as the elements are in
memory that it lends, or in memory of its own, and a thread of the receiver's takes them at once.  So whatever
the program copies between whichever nodes, the oldest command of all that are not done can go on.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import Counter
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack

from ..errors import GroupError, RpcError, ShoalError
from ..future import Future
from ..rpc import Agent
from ..rpc.peer import Peer
from ..wording import in_words
from .naming import MASTER, node_name
from .reasons import LOST, Elsewhere, Undelivered

#: bytes of a tensor whose letter has read them all when it is sent
_INSIDE = 16 << 10
#: bytes of a tensor beyond which one's host lends memory to others
_LENT = 256 << 10

#: the node that sends, the channel, and how many were sent on it before
_Key = tuple[int, int, int]


class Peers:
    """The other nodes of a master's session.

    Attributes:
        session: its name.
        index: of this node.
        agent: by which the nodes call one another.

    Args:
        names: of the nodes' workers, by their indices, as far as there are any yet.
    """

    def __init__(self, session: str, index: int, agent: Agent, names: Mapping[int, str]) -> None:
        self.session = session
        self.index = index
        self.agent = agent
        self._sent: Counter[tuple[int, int]] = Counter()
        self._awaited: Counter[tuple[int, int]] = Counter()
        self._names = {**names, index: agent.name}
        self._peers: dict[int, Peer] = {}
        #: nodes to which a large tensor went that was not lent
        self._unlent: set[int] = set()
        self._changed = threading.Condition()
        self._arrived: dict[_Key, Any] = {}
        self._given_up: set[_Key] = set()
        self._lost: set[int] = set()
        self._closed = False

    # -- sending ---------------------------------------------------------------------------------

    def send(self, x: torch.Tensor, to: int, channel: int) -> None:
        """Send a copy of a tensor, which may be changed at once."""
        key = self._next(to, channel)
        x = x.detach().resolve_conj().resolve_neg()
        if to == self.index:
            self.deliver(key, x.to("cpu", copy=True))
            return
        x = x.cpu()
        lending = x.nbytes > _LENT and to not in self._unlent and _is_dense(x)
        if not lending:
            self._deliver(to, key, x if x.nbytes <= _INSIDE and _is_dense(x) else x.clone())
            return
        alias = from_dlpack(x)  # a storage of its own, of which is known who has it
        read = weakref.ref(alias.untyped_storage())
        future = self._deliver(to, key, alias)
        del alias
        _ = self.agent.endpoint.post.lends  # lets go of what was sent
        if future is not None and read() is not None:
            self._unlent.add(to)
            with contextlib.suppress(RpcError, GroupError):
                future.wait()

    def send_poison(self, poison: tuple[int, int], to: int, channel: int) -> None:
        """Send, in the place of a tensor, why there is none: the node where that is known, and its number."""
        key = self._next(to, channel)
        if to == self.index:
            self.deliver(key, poison)
        else:
            self._deliver(to, key, poison)

    def _next(self, to: int, channel: int) -> _Key:
        count = self._sent[to, channel]
        self._sent[to, channel] += 1
        return self.index, channel, count

    def _deliver(self, to: int, key: _Key, value: Any) -> Future[Any] | None:
        try:
            peer = self._peers.get(to)
            if peer is None:
                peer = self.agent.peer(self.name(to), 0.0).options(timeout=float("inf"))
                self._peers[to] = peer
            future = peer.call(deliver, self.session, key, value)
        except ShoalError as error:
            self._not_delivered(to, key, error)
            return None
        future.add_done_callback(partial(self._delivered, to, key))
        return future

    def _delivered(self, to: int, key: _Key, future: Future[Any]) -> None:
        error = future.exception()
        if error is not None:
            self._not_delivered(to, key, error)

    def _not_delivered(self, to: int, key: _Key, error: BaseException) -> None:
        """The receiver must not wait for ever: the master, which reaches it, tells it, if it lives."""
        with contextlib.suppress(ShoalError):
            self.agent.peer(MASTER, 0.0).post(
                relay, self.name(to), self.session, key, f"node {self.index}: {in_words(error)}"
            )

    # -- receiving -------------------------------------------------------------------------------

    def receive(self, source: int, channel: int) -> torch.Tensor:
        """The next tensor that a node sends on a channel; waits for it.

        Raises:
            Elsewhere: there is none, and why is known at another node.
            Undelivered: it was sent, and did not come.
        """
        count = self._awaited[source, channel]
        self._awaited[source, channel] += 1
        key = source, channel, count
        with self._changed:
            self._changed.wait_for(lambda: key in self._arrived or source in self._lost or self._closed)
            if key not in self._arrived:
                self._given_up.add(key)
                raise Elsewhere(source, LOST)
            value = self._arrived.pop(key)
        if isinstance(value, torch.Tensor):
            return value
        if isinstance(value, str):
            raise Undelivered(value)
        raise Elsewhere(*value)

    def deliver(self, key: _Key, value: Any) -> None:
        """Take what was sent: a tensor, why there is none, or in words why it cannot come."""
        with self._changed:
            if key in self._given_up:
                self._given_up.discard(key)
            else:
                self._arrived.setdefault(key, value)
            self._changed.notify_all()

    # -- who is lost -----------------------------------------------------------------------------

    def meet(self, index: int, name: str) -> None:
        """A worker has become a node, as the master says."""
        with self._changed:
            self._names[index] = name
            self._forget(index)
            self._lost.discard(index)
            self._changed.notify_all()

    def name(self, index: int) -> str:
        """The name of a node's worker."""
        with self._changed:
            self._changed.wait_for(lambda: index in self._names or self._closed)
            return self._names.get(index, node_name(index))

    def lose(self, index: int) -> None:
        """A node has died, as the master says."""
        with self._changed:
            self._lost.add(index)
            self._forget(index)
            self._changed.notify_all()

    def _forget(self, index: int) -> None:
        self._peers.pop(index, None)
        self._unlent.discard(index)

    def lost(self) -> set[int]:
        """The nodes that have died."""
        with self._changed:
            return set(self._lost)

    def close(self) -> None:
        """End all waits here: the session has ended."""
        with self._changed:
            self._closed = True
            self._lost.update(self._names)
            self._changed.notify_all()


_sessions: dict[str, Peers] = {}


def enter(peers: Peers) -> None:
    """Begin a session on this node."""
    _sessions[peers.session] = peers


def leave(session: str) -> None:
    """End a session on this node."""
    ended = _sessions.pop(session, None)
    if ended is not None:
        ended.close()


def of_session(session: str) -> Peers:
    """The other nodes of a session that was begun here."""
    return _sessions[session]


# -- what others call ------------------------------------------------------------------------------


def deliver(session: str, key: _Key, value: Any) -> None:
    """At the receiver: take what was sent."""
    peers = _sessions.get(session)
    if peers is not None:
        peers.deliver(key, value)


def meet(session: str, index: int, name: str) -> None:
    """At a node: a worker has become another one."""
    peers = _sessions.get(session)
    if peers is not None:
        peers.meet(index, name)


def lose(session: str, index: int) -> None:
    """At a node: another one has died."""
    peers = _sessions.get(session)
    if peers is not None:
        peers.lose(index)


def relay(to: str, session: str, key: _Key, why: str) -> None:
    """At the master: tell a node that something cannot come."""
    from ..rpc import current

    with contextlib.suppress(ShoalError):
        current().agent.peer(to, 0.0).post(deliver, session, key, why)


def _is_dense(x: torch.Tensor) -> bool:
    return bool(torch.ops.aten.is_non_overlapping_and_dense(x))
