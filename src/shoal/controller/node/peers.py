"""A node's half of what goes from node to node: tensors that are sent and awaited, and who is lost.

A copy is a ``send`` in the log of one node and a ``receive`` in that of another, or of several.  The n-th
send on a channel, from one node to another, is the n-th receive on it, because both logs are in the order of
the program.  A send never waits for the receiver's program: its node goes on as soon as the elements are in
memory that it lends, or in memory of its own, and a thread of the receiver's takes them at once.  So whatever
the program copies between whichever nodes, the oldest command of all that are not done can go on.

A node that is busy hears of deaths and replacements earlier than it comes to the commands that were issued
before them, and in any order.  So each worker of an index has an *epoch*, which counts the workers before it,
and each command says of which epochs it is: a channel is the sum of two, and the *base* of a set of nodes is
the sum of all of theirs.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack

from ...common.wording import in_words
from ...errors import GroupError, RpcError, ShoalError
from ...future import Future
from ...rpc import Agent
from ...rpc.peer import Peer
from ..protocol.commands import LOST
from ..protocol.naming import MASTER

#: bytes of a tensor whose letter has read them all when it is sent
_INSIDE = 16 << 10
#: bytes of a tensor beyond which one's host lends memory to others
_LENT = 256 << 10

#: the node that sends, the channel, and how many were sent on it before
_Key = tuple[int, int, int]
#: name and epoch of the worker that is a node
Member = tuple[str, int]


class Elsewhere(Exception):
    """A tensor that another node should have sent, or a collective that it takes part in, failed there.

    Attributes:
        node: where the failure is known.
        number: of it there, or LOST.
    """

    def __init__(self, node: int, number: int) -> None:
        super().__init__(f"node {node} has failed")
        self.node = node
        self.number = number


class Undelivered(Exception):
    """A tensor that another node sent did not come."""


class Peers:
    """The other nodes of a master's session.

    Attributes:
        session: its name.
        index: of this node.
        epoch: of this node.
        agent: by which the nodes call one another.

    Args:
        members: the nodes by their indices, as far as there are any yet.
    """

    def __init__(
        self, session: str, index: int, epoch: int, agent: Agent, members: Mapping[int, Member]
    ) -> None:
        self.session = session
        self.index = index
        self.epoch = epoch
        self.agent = agent
        self._sent: Counter[tuple[int, int]] = Counter()
        self._awaited: Counter[tuple[int, int]] = Counter()
        self._members = {**members, index: (agent.name, epoch)}
        #: the epochs of each node's workers below which all are dead, the node that died last at the end
        self._dead = {each: epoch for each, (_, epoch) in self._members.items()}
        self._peers: dict[int, Peer] = {}
        #: nodes to which a large tensor went that was not lent
        self._unlent: set[int] = set()
        self._changed = threading.Condition()
        self._arrived: dict[_Key, Any] = {}
        self._closed = False
        self._on_lost: list[Callable[[int], None]] = []

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
        name = self.name(to, key[1] - self.epoch)
        if name is None:
            return None
        try:
            peer = self._peers.get(to)
            if peer is None or peer.name != name:
                peer = self.agent.peer(name, 0.0).options(timeout=float("inf"))
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
        name = self.name(to, key[1] - self.epoch)
        if name is not None:
            with contextlib.suppress(ShoalError):
                self.agent.peer(MASTER, 0.0).post(
                    relay, name, self.session, key, f"node {self.index}: {in_words(error)}"
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
            self._changed.wait_for(
                lambda: key in self._arrived or self._is_dead(source, channel - self.epoch)
            )
            if key not in self._arrived:
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
            if not self._is_dead(key[0], key[1] - self.epoch):  # whoever waited for it has given up
                self._arrived.setdefault(key, value)
                self._changed.notify_all()

    # -- who is lost -----------------------------------------------------------------------------

    def meet(self, index: int, name: str, epoch: int) -> None:
        """A worker has become a node, as the master says."""
        with self._changed:
            self._bury(index, epoch)
            if index not in self._members or self._members[index][1] < epoch:
                self._members[index] = name, epoch
                self._forget(index, epoch)
            self._changed.notify_all()

    def name(self, index: int, epoch: int) -> str | None:
        """The name of the worker that is a node in an epoch; waits for it; None: it has died."""
        with self._changed:
            self._changed.wait_for(lambda: self._members.get(index, ("", -1))[1] >= epoch or self._closed)
            return None if self._is_dead(index, epoch) else self._members[index][0]

    def names(self, members: Collection[int], base: int) -> list[str] | None:
        """The names of the workers that are a set of nodes; waits for them; None: one of them has died.

        Args:
            base: sum of their epochs.
        """

        def known() -> bool:
            there = [self._members[each] for each in members if each in self._members]
            return len(there) == len(members) and sum(epoch for _, epoch in there) >= base

        with self._changed:
            self._changed.wait_for(lambda: known() or self._has_lost(members, base))
            if self._has_lost(members, base):
                return None
            return [self._members[each][0] for each in members]

    def lose(self, index: int, epoch: int) -> None:
        """The worker that was a node in an epoch has died, as the master says."""
        with self._changed:
            self._bury(index, epoch + 1)
            self._changed.notify_all()
        for fn in self._on_lost:
            fn(index)

    def on_lost(self, fn: Callable[[int], None]) -> None:
        """Call ``fn(index)`` when a worker that was a node has died."""
        self._on_lost.append(fn)

    def lost(self, members: Collection[int], base: int) -> int | None:
        """The node that died last, of a set since the sum of their epochs was ``base``; None: none did."""
        with self._changed:
            if not self._has_lost(members, base):
                return None
            return next(each for each in reversed(self._dead) if each in members)

    def close(self) -> None:
        """End all waits here: the session has ended."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _is_dead(self, index: int, epoch: int) -> bool:
        return self._closed or self._dead.get(index, 0) > epoch

    def _has_lost(self, members: Collection[int], base: int) -> bool:
        return self._closed or sum(self._dead.get(each, 0) for each in members) > base

    def _bury(self, index: int, epoch: int) -> None:
        """The workers of a node below an epoch are dead."""
        if self._dead.get(index, 0) < epoch:
            self._dead.pop(index, None)
            self._dead[index] = epoch
        self._dead.setdefault(index, epoch)

    def _forget(self, index: int, epoch: int) -> None:
        """Forget what concerns the workers of a node before the one that died last."""
        self._peers.pop(index, None)
        self._unlent.discard(index)
        old = epoch - 1 + self.epoch
        for counts in (self._sent, self._awaited):
            for each in [each for each in counts if each[0] == index and each[1] < old]:
                del counts[each]
        for key in [key for key in self._arrived if key[0] == index and key[1] < old]:
            del self._arrived[key]


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


def meet(session: str, index: int, epoch: int, name: str) -> None:
    """At a node: a worker has become another one."""
    peers = _sessions.get(session)
    if peers is not None:
        peers.meet(index, name, epoch)


def lose(session: str, index: int, epoch: int) -> None:
    """At a node: another one has died."""
    peers = _sessions.get(session)
    if peers is not None:
        peers.lose(index, epoch)


def relay(to: str, session: str, key: _Key, why: str) -> None:
    """At the master: tell a node that something cannot come."""
    from ...rpc import current

    with contextlib.suppress(ShoalError):
        current().agent.peer(to, 0.0).post(deliver, session, key, why)


def _is_dense(x: torch.Tensor) -> bool:
    return bool(torch.ops.aten.is_non_overlapping_and_dense(x))
