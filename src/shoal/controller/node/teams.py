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

from ...backend.registry import backend_factory
from ...common.formatting import describe_error
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
from .peers import Elsewhere, Peers

T = TypeVar("T")

#: timeout of the groups in seconds, practically infinite: the master reports losses
_PATIENCE = 1e6
#: seconds between two checks whether a missing member was lost
_LOOK = 0.2
#: seconds to close a failed group
_CLOSING = 1.0
#: store key of the reason why a member cannot connect
_FAILED = "failed"
#: value for the failure's node in a row: the operands are not poisoned
_FINE = -1


@dataclass
class _Team:
    """The group of a set of nodes.

    Attributes:
        members: the nodes, in the order of their ranks.
        base: the sum of their epochs.
        generation: number of their failed groups.
        count: number of collectives so far.
        group: None before the first collective and after a failure.
        cause: error of the last failure.
    """

    members: tuple[int, ...]
    base: int
    generation: int = 0
    count: int = 0
    group: ProcessGroup | None = None
    cause: ShoalError | None = None


class Teams:
    """The groups of a node; `backend` with `options` is their data channel."""

    def __init__(self, peers: Peers, backend: str, options: dict[str, str]) -> None:
        self._peers = peers
        self._backend = backend
        self._options = options
        self._teams: dict[tuple[int, ...], _Team] = {}
        peers.on_lost(self._lost)

    def run(
        self,
        members: Sequence[int],
        base: int,
        body: Callable[[ProcessGroup], T],
        poison: tuple[int, int] | None = None,
    ) -> T:
        """Run a collective with the other members; waits for them.

        Args:
            members: the participating nodes, including this one.
            base: the sum of their epochs.
            body: runs the collective in the group.
            poison: node and number of the failure that poisoned this node's operand, if it is poisoned.

        Raises:
            Elsewhere: a member's operand is poisoned, or a member was lost.
            ShoalError: the collective failed.
        """
        team = self._team(tuple(members), base)
        mine = team.count
        team.count += 1
        group = self._agreed(team, mine, (_FINE, 0) if poison is None else poison)
        try:
            return body(group)
        except PeerLost as error:
            raise self._ended(team, error) from error
        except BaseException as error:
            with contextlib.suppress(ShoalError):
                group.abort(f"node {self._peers.index}: {describe_error(error)}")
            if isinstance(error, ShoalError):
                raise self._ended(team, error) from error
            self._ended(team, GroupError(describe_error(error)))
            raise

    def _lost(self, index: int) -> None:
        """Abort the groups of a lost node; if it is only stopped, its connections would not break."""
        for team in list(self._teams.values()):
            group = team.group
            if index in team.members and group is not None and self._missing(team) is not None:
                with contextlib.suppress(ShoalError):
                    group.abort(f"node {index} was lost")

    def close(self) -> None:
        """Close all groups."""
        for team in self._teams.values():
            if team.group is not None:
                team.group.close(_CLOSING)
        self._teams.clear()

    def _team(self, members: tuple[int, ...], base: int) -> _Team:
        team = self._teams.get(members)
        if team is None or team.base != base:
            if team is not None and team.group is not None:
                self._ended(team, GroupError("the master replaced a node of the group"))
            team = self._teams[members] = _Team(members, base)
        return team

    def _agreed(self, team: _Team, mine: int, poison: tuple[int, int]) -> ProcessGroup:
        """Return the group once all members have reached collective number `mine` without poison."""
        while True:
            group = team.group or self._open(team)
            missing = self._missing(team)  # after this, _lost() aborts the group
            if missing is not None:
                raise self._ended(team, GroupError(str(missing)))
            table = group.empty(len(team.members), 3, dtype=torch.int64)
            try:
                group.all_gather_single(table, torch.tensor([mine, *poison], device="cpu")).wait()
            except GroupError as error:
                ended = self._ended(team, error)
                if isinstance(ended, Elsewhere):
                    raise ended from error
                continue  # an earlier collective failed at another member
            rows = table.tolist()
            furthest = max(row[0] for row in rows)
            if mine < furthest:
                raise team.cause or GroupError("the collective failed on another node")
            if all(row[0] == mine for row in rows):
                break
        for _, node, number in rows:
            if node != _FINE:
                raise Elsewhere(node, number)
        return group

    def _ended(self, team: _Team, error: ShoalError) -> Exception:
        """Close a failed group; return the exception to raise."""
        group, team.group = team.group, None
        team.generation += 1
        team.cause = error
        if group is not None:
            with contextlib.suppress(ShoalError):
                group.close(_CLOSING)
        missing = self._missing(team)
        if missing is None and isinstance(error, PeerLost):
            for rank in error.ranks:
                if team.members[rank] != self._peers.index:
                    return Elsewhere(team.members[rank], LOST)
        return missing or error

    def _missing(self, team: _Team) -> Elsewhere | None:
        lost = self._peers.lost(team.members, team.base)
        return None if lost is None else Elsewhere(lost, LOST)

    def _open(self, team: _Team) -> ProcessGroup:
        """Connect to the other members, once they do so too."""
        agent, members = self._peers.agent, team.members
        missing = self._missing(team)
        if missing is not None:
            raise missing
        name = f"nodes {','.join(map(str, members))}"
        key = f"{self._peers.session}/{'-'.join(map(str, members))}/{team.base}.{team.generation}"
        store = PrefixStore(f"controller/{key}/", agent.store.clone())
        rank = members.index(self._peers.index)
        try:
            workers = self._workers(team)
            here = [each for each, worker in enumerate(workers) if worker.host == agent.worker.host]
            membership = Membership(
                rank=rank, size=len(members), local_rank=here.index(rank), local_size=len(here), store=store,
                job=agent.job, epoch=agent.epoch, secret=agent.secret, interface=agent.interface,
                host=agent.worker.host, release=lambda seconds: store.close(),
                abandon=lambda error: _abandon(store, rank, error),
                check=lambda ranks=None: self._look(team, store), waits_for_stopped=True,
            )  # fmt: skip
        except ShoalError as error:
            _abandon(store, rank, error)
            raise self._ended(team, error) from error
        except BaseException as error:
            _abandon(store, rank, error)
            raise
        try:
            team.group = world_group(
                membership, backend_factory(self._backend), name=f"{name} ({key})", timeout=_PATIENCE,
                concurrency=1, options=self._options,
            )  # fmt: skip
        except ShoalError as error:
            raise self._ended(team, error) from error
        return team.group

    def _workers(self, team: _Team) -> list[Worker]:
        """Return the workers of the members; waits for missing ones that are not lost."""
        agent, deadline = self._peers.agent, Deadline(self._peers.agent.timeout)
        found: list[Worker] = []
        names = self._peers.names(team.members, team.base)
        while names is not None and len(found) < len(names):
            seconds = min(_LOOK, deadline.remaining())
            try:
                found.append(
                    agent.directory.find(names[len(found)], seconds, agent.name, wait_for_replacement=False)
                )
            except WorkerLost as error:
                raise Elsewhere(team.members[len(found)], LOST) from error
            except UnknownWorker:
                missing = self._missing(team)
                if missing is not None:
                    raise missing from None
                if deadline.expired:
                    raise
        if names is None:
            raise self._missing(team) or GroupError("the session has ended")
        return found

    def _look(self, team: _Team, store: Store) -> None:
        """Raise if a member was lost or cannot connect."""
        lost = self._peers.lost(team.members, team.base)
        if lost is not None:
            raise RendezvousError(f"node {lost} died while the members of a group were connecting")
        try:
            reason = store.get(_FAILED, 0.0).decode()
        except StoreTimeout:
            return
        raise RendezvousError(reason)


_sessions: dict[str, Teams] = {}


def enter(peers: Peers, backend: str, options: dict[str, str]) -> None:
    """Begin a session on this node."""
    _sessions[peers.session] = Teams(peers, backend, options)


def leave(session: str) -> None:
    """End a session on this node."""
    teams = _sessions.pop(session, None)
    if teams is not None:
        teams.close()


def of_session(session: str) -> Teams:
    """Return the groups of this node in a session that has begun here."""
    return _sessions[session]


def _abandon(store: Store, rank: int, error: BaseException) -> None:
    """Publish in the store why this member does not connect."""
    said = f"rank {rank} could not connect: {describe_error(error)}"
    with contextlib.suppress(StoreError, WireError):  # no store, no notification
        store.compare_set(_FAILED, b"", said.encode("utf-8", "backslashreplace"))
    store.close()
