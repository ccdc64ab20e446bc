"""Copies between nodes, and the notifications of lost and replaced nodes, on a node.

A copy is a ``send`` in the log of one node and a ``receive`` in the log of one or more others. The n-th send
on a channel from one node to another matches the n-th receive, because both logs are in the order of the
program. A send never waits for the receiver's log: the sender continues once the elements are in lent memory
or in a copy, and a thread of the receiver takes them immediately. So the oldest unfinished command of all
nodes can always proceed.

A busy node receives notifications of losses and replacements before it executes commands issued earlier, and
in any order. Therefore each worker of an index has an *epoch*, the number of workers before it, and each
command contains epochs: a channel is the sum of the epochs of two nodes, the epoch sum of a set of nodes
the sum of theirs.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ...common.formatting import describe_error
from ...errors import ShoalError
from ...future import Future
from ...rpc import Agent
from ...rpc.peer import Peer
from ..protocol.commands import LOST
from ..protocol.copies import copy_to_send
from ..protocol.workers import MASTER

if TYPE_CHECKING:
    from .place_groups import PlaceGroups

#: maximum bytes of a tensor that the message has copied when the call returns
MAX_INLINE_BYTES = 16 << 10

#: sender, channel, and number of earlier messages on the channel
_Key = tuple[int, int, int]
#: name and epoch of a node's worker
Member = tuple[str, int]


class RemoteFailure(Exception):
    """A tensor or collective could not be computed because of failure `number` (or LOST) on node `node`."""

    def __init__(self, node: int, number: int) -> None:
        super().__init__(f"node {node} has failed")
        self.node = node
        self.number = number


class NotDelivered(Exception):
    """A tensor that another node sent did not arrive."""


class Peers:
    """The other nodes of a master's session; `members` are the present ones, by index.

    Attributes:
        session: name of the session.
        index, epoch: index and epoch of this node.
        agent: calls the other nodes.
        groups: the groups of this node.
    """

    groups: PlaceGroups

    def __init__(
        self, session: str, index: int, epoch: int, agent: Agent, members: Mapping[int, Member]
    ) -> None:
        self.session = session
        self.index = index
        self.epoch = epoch
        self.agent = agent
        self._sent: Counter[tuple[int, int]] = Counter()
        self._received: Counter[tuple[int, int]] = Counter()
        self._members = {**members, index: (agent.name, epoch)}
        #: for each node the epoch below which all workers are lost; the node lost last is at the end
        self._lost_below = {each: epoch for each, (_, epoch) in self._members.items()}
        self._peers: dict[int, Peer] = {}
        self._changed = threading.Condition()
        self._arrived: dict[_Key, Any] = {}
        self._closed = False
        self._on_lost: list[Callable[[int], None]] = []

    # -- sending ---------------------------------------------------------------------------------

    def send(self, x: torch.Tensor, to: int, channel: int) -> None:
        """Send a copy of a tensor, which may be changed immediately afterwards."""
        key = self._next(to, channel)
        x = x.detach().resolve_conj().resolve_neg()
        if to == self.index:
            x = x.to("cpu", copy=True)
        else:
            x = x.cpu()
            if x.nbytes > MAX_INLINE_BYTES or not _is_dense(x):  # a short one is copied while it is encoded
                x = copy_to_send(x, self.agent)
        self._deliver(to, key, x)

    def send_poison(self, poison: tuple[int, int], to: int, channel: int) -> None:
        """Send the node and number of a failure instead of a tensor."""
        self._deliver(to, self._next(to, channel), poison)

    def _next(self, to: int, channel: int) -> _Key:
        count = self._sent[to, channel]
        self._sent[to, channel] += 1
        return self.index, channel, count

    def _deliver(self, to: int, key: _Key, value: Any) -> None:
        if to == self.index:
            self.deliver(key, value)
            return
        name = self.name(to, key[1] - self.epoch)
        if name is None:
            return
        try:
            peer = self._peers.get(to)
            if peer is None or peer.name != name:
                peer = self.agent.peer(name, 0.0).options(timeout=float("inf"))
                self._peers[to] = peer
            future = peer.call(deliver, self.session, key, value)
        except ShoalError as error:
            self._not_delivered(to, key, error)
            return
        future.add_done_callback(partial(self._delivered, to, key))

    def _delivered(self, to: int, key: _Key, future: Future[Any]) -> None:
        error = future.exception()
        if error is not None:
            self._not_delivered(to, key, error)

    def _not_delivered(self, to: int, key: _Key, error: BaseException) -> None:
        """Notify the receiver through the master, so that it does not wait forever."""
        name = self.name(to, key[1] - self.epoch)
        if name is not None:
            with contextlib.suppress(ShoalError):
                self.agent.peer(MASTER, 0.0).post(
                    relay, name, self.session, key, f"node {self.index}: {describe_error(error)}"
                )

    # -- receiving -------------------------------------------------------------------------------

    def receive(self, source: int, channel: int) -> torch.Tensor:
        """Wait for the next tensor from a node on a channel.

        Raises:
            RemoteFailure: a failure on another node, or the loss of the sender.
            NotDelivered: it was sent but did not arrive.
        """
        count = self._received[source, channel]
        self._received[source, channel] += 1
        key = source, channel, count
        with self._changed:
            self._changed.wait_for(
                lambda: key in self._arrived or self._is_lost(source, channel - self.epoch)
            )
            if key not in self._arrived:
                raise RemoteFailure(source, LOST)
            value = self._arrived.pop(key)
        if isinstance(value, torch.Tensor):
            return value
        if isinstance(value, str):
            raise NotDelivered(value)
        raise RemoteFailure(*value)

    def deliver(self, key: _Key, value: Any) -> None:
        """Store a message: a tensor, the node and number of a failure, or a text why it did not arrive."""
        with self._changed:
            if not self._is_lost(key[0], key[1] - self.epoch):  # otherwise receive() has raised
                self._arrived.setdefault(key, value)
                self._changed.notify_all()

    # -- lost and replaced nodes -----------------------------------------------------------------

    def add_node(self, index: int, name: str, epoch: int) -> None:
        """Note a new node; called by the master."""
        with self._changed:
            self._mark_lost_below(index, epoch)
            if index not in self._members or self._members[index][1] < epoch:
                self._members[index] = name, epoch
                self._forget(index, epoch)
            self._changed.notify_all()

    def name(self, index: int, epoch: int) -> str | None:
        """Wait for the worker of a node in an epoch and return its name; None if it is lost."""
        with self._changed:
            self._changed.wait_for(lambda: self._members.get(index, ("", -1))[1] >= epoch or self._closed)
            return None if self._is_lost(index, epoch) else self._members[index][0]

    def names(self, members: Collection[int], epoch_sum: int) -> list[str] | None:
        """Wait for the workers of a set of nodes, whose epochs have this sum; return their names.

        Returns None if one of them is lost.
        """

        def known() -> bool:
            there = [self._members[each] for each in members if each in self._members]
            return len(there) == len(members) and sum(epoch for _, epoch in there) >= epoch_sum

        with self._changed:
            self._changed.wait_for(lambda: known() or self._any_lost(members, epoch_sum))
            if self._any_lost(members, epoch_sum):
                return None
            return [self._members[each][0] for each in members]

    def lose_node(self, index: int, epoch: int) -> None:
        """Note the loss of the worker of a node in an epoch; called by the master."""
        with self._changed:
            self._mark_lost_below(index, epoch + 1)
            self._changed.notify_all()
        for fn in self._on_lost:
            fn(index)

    def on_lost(self, fn: Callable[[int], None]) -> None:
        """Call ``fn(index)`` when a node is lost."""
        self._on_lost.append(fn)

    def lost(self, members: Collection[int], epoch_sum: int) -> int | None:
        """Return the node of a set that was lost last since the sum of their epochs was this, or None."""
        with self._changed:
            if not self._any_lost(members, epoch_sum):
                return None
            return next(each for each in reversed(self._lost_below) if each in members)

    def close(self) -> None:
        """End all waits here: the session has ended."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _is_lost(self, index: int, epoch: int) -> bool:
        return self._closed or self._lost_below.get(index, 0) > epoch

    def _any_lost(self, members: Collection[int], epoch_sum: int) -> bool:
        return self._closed or sum(self._lost_below.get(each, 0) for each in members) > epoch_sum

    def _mark_lost_below(self, index: int, epoch: int) -> None:
        """Note that a node's workers below an epoch are lost."""
        if self._lost_below.get(index, 0) < epoch:
            self._lost_below.pop(index, None)
            self._lost_below[index] = epoch
        self._lost_below.setdefault(index, epoch)

    def _forget(self, index: int, epoch: int) -> None:
        """Forget the state of a node's workers older than the last lost one."""
        self._peers.pop(index, None)
        old = epoch - 1 + self.epoch
        for counts in (self._sent, self._received):
            for each in [each for each in counts if each[0] == index and each[1] < old]:
                del counts[each]
        for key in [key for key in self._arrived if key[0] == index and key[1] < old]:
            del self._arrived[key]


_sessions: dict[str, Peers] = {}


def enter(peers: Peers) -> None:
    _sessions[peers.session] = peers


def leave(session: str) -> None:
    ended = _sessions.pop(session, None)
    if ended is not None:
        ended.close()
        ended.groups.close()


def of_session(session: str) -> Peers:
    return _sessions[session]


# -- functions called through RPC ------------------------------------------------------------------


def deliver(session: str, key: _Key, value: Any) -> None:
    peers = _sessions.get(session)
    if peers is not None:
        peers.deliver(key, value)


def add_node(session: str, index: int, epoch: int, name: str) -> None:
    peers = _sessions.get(session)
    if peers is not None:
        peers.add_node(index, name, epoch)


def lose_node(session: str, index: int, epoch: int) -> None:
    peers = _sessions.get(session)
    if peers is not None:
        peers.lose_node(index, epoch)


def relay(to: str, session: str, key: _Key, why: str) -> None:
    """On the master: notify a node that a message will not arrive."""
    from ...rpc import current

    with contextlib.suppress(ShoalError):
        current().agent.peer(to, 0.0).post(deliver, session, key, why)


def _is_dense(x: torch.Tensor) -> bool:
    return bool(torch.ops.aten.is_non_overlapping_and_dense(x))
