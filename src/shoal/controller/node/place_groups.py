"""The shoal groups of the nodes of a place, which execute its collectives.

A set of nodes becomes a group in its first collective. There is no rendezvous: the master's log contains the
members, which determine rank, size and the keys in the store, so the members only connect.

Before each collective, each member gathers a row from all: the number of the collective and the failure of
the member's operand, if it is poisoned. A poisoned operand of one member poisons the results of all members
with the same cause, and the group is kept. A failure in the collective itself ends the group on all members;
the next collective creates its next *generation*. A member may have completed a collective that failed on
another one; then the numbers in the rows differ: members that are behind raise, the others exchange rows
again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from ...backend.identity import Tuning
from ...backend.registry import MPI, backend_factory
from ...common.formatting import describe_error
from ...common.mpi_library import mark_broken
from ...errors import (
    GroupError,
    PeerLost,
    RendezvousError,
    ShoalError,
    StoreError,
    StoreTimeout,
    UnknownWorker,
    WireError,
    WorkerLost,
)
from ...group import ProcessGroup
from ...initialize import world_group
from ...net import Deadline
from ...rendezvous import Membership
from ...rpc.connection.directory import Worker
from ...store import PrefixStore, Store
from ..protocol.commands import LOST
from .peers import Peers, RemoteFailure

T = TypeVar("T")

#: timeout of the groups in seconds, practically infinite: the master reports losses
NO_TIMEOUT_S = 1e6
#: seconds between two checks whether a missing member was lost
POLL_INTERVAL_S = 0.2
#: seconds to close a failed group
CLOSE_TIMEOUT_S = 1.0
#: store key of the reason why a member cannot connect
_FAILURE_KEY = "failed"
#: value for the failure's node in a row: the operands are not poisoned
_NOT_POISONED = -1


@dataclass
class _PlaceGroup:
    """The group of a set of nodes.

    Attributes:
        members: the nodes, in the order of their ranks.
        epoch_sum: the sum of their epochs.
        generation: number of their failed groups.
        count: number of collectives so far.
        group: None before the first collective and after a failure.
        last_error: error of the last failure.
    """

    members: tuple[int, ...]
    epoch_sum: int
    generation: int = 0
    count: int = 0
    group: ProcessGroup | None = None
    last_error: ShoalError | None = None


class PlaceGroups:
    """The groups of a node; `backend` with `options` is their data channel."""

    def __init__(self, peers: Peers, backend: str, options: dict[str, str]) -> None:
        self._peers = peers
        self._backend = backend
        self._options = options
        self._groups: dict[tuple[int, ...], _PlaceGroup] = {}
        peers.on_lost(self._lost)

    def run(
        self,
        members: Sequence[int],
        epoch_sum: int,
        body: Callable[[ProcessGroup], T],
        poison: tuple[int, int] | None = None,
    ) -> T:
        """Run a collective with the other members; waits for them.

        Args:
            members: the participating nodes, including this one.
            epoch_sum: the sum of their epochs.
            body: runs the collective in the group.
            poison: node and number of the failure that poisoned this node's operand, if it is poisoned.

        Raises:
            RemoteFailure: a member's operand is poisoned, or a member was lost.
            ShoalError: the collective failed.
        """
        place = self._place_group(tuple(members), epoch_sum)
        mine = place.count
        place.count += 1
        group = self._synchronized_group(place, mine, (_NOT_POISONED, 0) if poison is None else poison)
        try:
            return body(group)
        except PeerLost as error:
            raise self._close_failed(place, error) from error
        except BaseException as error:
            with contextlib.suppress(ShoalError):
                group.abort(f"node {self._peers.index}: {describe_error(error)}")
            if isinstance(error, ShoalError):
                raise self._close_failed(place, error) from error
            self._close_failed(place, GroupError(describe_error(error)))
            raise

    def _lost(self, index: int) -> None:
        """Abort the groups of a lost node; if it is only stopped, its connections would not break."""
        if self._backend == MPI:
            mark_broken()
        for place in list(self._groups.values()):
            group = place.group
            if index in place.members and group is not None and self._lost_member(place) is not None:
                with contextlib.suppress(ShoalError):
                    group.abort(f"node {index} was lost")

    def close(self) -> None:
        for place in self._groups.values():
            if place.group is not None:
                place.group.close(CLOSE_TIMEOUT_S)
        self._groups.clear()

    def _place_group(self, members: tuple[int, ...], epoch_sum: int) -> _PlaceGroup:
        place = self._groups.get(members)
        if place is None or place.epoch_sum != epoch_sum:
            if place is not None and place.group is not None:
                self._close_failed(place, GroupError("the master replaced a node of the group"))
            place = self._groups[members] = _PlaceGroup(members, epoch_sum)
        return place

    def _synchronized_group(self, place: _PlaceGroup, mine: int, poison: tuple[int, int]) -> ProcessGroup:
        """Return the group once all members have reached collective number `mine` without poison."""
        while True:
            group = place.group or self._open(place)
            missing = self._lost_member(place)  # after this, _lost() aborts the group
            if missing is not None:
                raise self._close_failed(place, GroupError(str(missing)))
            table = group.empty(len(place.members), 3, dtype=torch.int64)
            try:
                group.all_gather_single(table, torch.tensor([mine, *poison], device="cpu")).wait()
            except GroupError as error:
                ended = self._close_failed(place, error)
                if isinstance(ended, RemoteFailure):
                    raise ended from error
                continue  # an earlier collective failed at another member
            rows = table.tolist()
            furthest = max(row[0] for row in rows)
            if mine < furthest:
                raise place.last_error or GroupError("the collective failed on another node")
            if all(row[0] == mine for row in rows):
                break
        for _, node, number in rows:
            if node != _NOT_POISONED:
                raise RemoteFailure(node, number)
        return group

    def _close_failed(self, place: _PlaceGroup, error: ShoalError) -> Exception:
        """Close a failed group; return the exception to raise."""
        group, place.group = place.group, None
        place.generation += 1
        place.last_error = error
        if group is not None:
            with contextlib.suppress(ShoalError):
                group.close(CLOSE_TIMEOUT_S)
        missing = self._lost_member(place)
        if missing is None and isinstance(error, PeerLost):
            for rank in error.ranks:
                if place.members[rank] != self._peers.index:
                    return RemoteFailure(place.members[rank], LOST)
        return missing or error

    def _lost_member(self, place: _PlaceGroup) -> RemoteFailure | None:
        lost = self._peers.lost(place.members, place.epoch_sum)
        return None if lost is None else RemoteFailure(lost, LOST)

    def _open(self, place: _PlaceGroup) -> ProcessGroup:
        """Connect to the other members, once they do so too."""
        agent, members = self._peers.agent, place.members
        missing = self._lost_member(place)
        if missing is not None:
            raise missing
        name = f"nodes {','.join(map(str, members))}"
        key = f"{self._peers.session}/{'-'.join(map(str, members))}/{place.epoch_sum}.{place.generation}"
        store = PrefixStore(f"controller/{key}/", agent.store.clone())
        rank = members.index(self._peers.index)
        try:
            workers = self._workers(place)
            here = [each for each, worker in enumerate(workers) if worker.host == agent.worker.host]
            membership = Membership(
                rank=rank, size=len(members), local_rank=here.index(rank), local_size=len(here), store=store,
                job=agent.job, epoch=agent.epoch, secret=agent.secret, interface=agent.interface,
                host=agent.worker.host, release=lambda seconds: store.close(),
                abandon=lambda error: _publish_failure(store, rank, error),
                check=lambda ranks=None: self._check_members(place, store), waits_for_stopped=True,
            )  # fmt: skip
        except BaseException as error:
            _publish_failure(store, rank, error)
            if isinstance(error, ShoalError):
                raise self._close_failed(place, error) from error
            raise
        try:
            place.group = world_group(
                membership, backend_factory(self._backend), name=f"{name} ({key})", timeout=NO_TIMEOUT_S,
                tuning=Tuning.chosen(1), options=self._options,
            )  # fmt: skip
        except ShoalError as error:
            raise self._close_failed(place, error) from error
        return place.group

    def _workers(self, place: _PlaceGroup) -> list[Worker]:
        """Return the workers of the members; waits for missing ones that are not lost."""
        agent, deadline = self._peers.agent, Deadline(self._peers.agent.timeout)
        found: list[Worker] = []
        names = self._peers.names(place.members, place.epoch_sum)
        while names is not None and len(found) < len(names):
            patience = Deadline(min(POLL_INTERVAL_S, deadline.remaining()))
            try:
                found.append(
                    agent.directory.find(names[len(found)], patience, agent.name, wait_for_replacement=False)
                )
            except WorkerLost as error:
                raise RemoteFailure(place.members[len(found)], LOST) from error
            except UnknownWorker:
                missing = self._lost_member(place)
                if missing is not None:
                    raise missing from None
                if deadline.expired:
                    raise
        if names is None:
            raise self._lost_member(place) or GroupError("the session has ended")
        return found

    def _check_members(self, place: _PlaceGroup, store: Store) -> None:
        """Raise if a member was lost or cannot connect."""
        lost = self._peers.lost(place.members, place.epoch_sum)
        if lost is not None:
            raise RendezvousError(f"node {lost} died while the members of a group were connecting")
        try:
            reason = store.get(_FAILURE_KEY, 0.0).decode()
        except StoreTimeout:
            return
        raise RendezvousError(reason)


def _publish_failure(store: Store, rank: int, error: BaseException) -> None:
    """Publish in the store why this member does not connect."""
    said = f"rank {rank} could not connect: {describe_error(error)}"
    with contextlib.suppress(StoreError, WireError):  # no store, no notification
        store.compare_set(_FAILURE_KEY, b"", said.encode("utf-8", "backslashreplace"))
    store.close()
