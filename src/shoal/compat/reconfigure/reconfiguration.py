"""One reconfiguration: from a list of handles to a connected group.

There are two ways.  All members choose the same one, because they compute it from the same list
(:func:`~shoal.compat.reconfigure.handles.common_world`):

- If all members share connections, the new group uses these, as a subgroup does, and a barrier in it shows
  that all members take part.  The store is not used.
- Otherwise the members connect through torch's store, under a key derived from the uuid.

Connections belong to a group without operations, the *base*.  The program's groups are subgroups of the base,
so an abort or failure of a subgroup leaves the connections usable.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Store as TorchStore
from torch._C._distributed_c10d import TCPStore

from ...backend.identity import Tuning
from ...backend.registry import BackendFactory
from ...errors import GroupError, RendezvousError, RendezvousTimeout, ShoalError, StoreError, UsageError
from ...future import Future
from ...group import ProcessGroup
from ...initialize import world_group
from ...net import Deadline
from ...rendezvous import rendezvous_at
from ...store import PrefixStore, Store, adopt
from ..launcher_store import rendezvous_point
from .handles import GroupHandle, common_world, digest

#: timeout, in seconds, of closing a group that was not completely created
_CLOSE_TIMEOUT_S = 1.0
#: minimum remaining time, in seconds
_MIN_REMAINING_S = 0.001
#: maximum wait for a process whose connections were lost to end, and polling interval, in seconds
_EXIT_WAIT_S, _POLL_INTERVAL_S = 1.0, 0.01
#: maximum number of members that a timeout message lists
_MAX_MEMBERS_LISTED = 16
_ADVICE = "call torch.distributed._reconfigure again with a new uuid and the handles of the surviving members"
#: Keys of a reconfiguration in the store: the list of the first caller, and the reason for a failure.
_LIST, _REFUSED = "list", "refused"
#: replaces the list once all members are connected
_USED = b"used"


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of all groups of one torch process group."""

    store: TorchStore  # torch's store, through which the members of a new group connect
    name: str  # name of the groups, for errors
    #: factory, options: the backend and its settings
    factory: BackendFactory
    tuning: Tuning
    options: Mapping[str, Any]


@dataclass(frozen=True, eq=False, slots=True)
class Connections:
    """Connections that groups can use."""

    base: ProcessGroup  # the group of all members that owns the connections
    ident: str  # identifies the connections; equal on all members
    members: tuple[GroupHandle, ...]  # ordered by rank in the base

    def lost(self) -> frozenset[int]:
        """Return the ranks of the base that are lost."""
        return self.base._links.lost()

    def unsafe_member(self) -> GroupHandle | None:
        """Return a lost member that may still be running and shares memory with this process, or None.

        It could still write to that memory, so new groups must not use it.  ``ProcessGroup.rebuild`` kills
        such a process; here it may be in use by other groups.
        """
        own = self.base.rank
        patience = Deadline(_EXIT_WAIT_S)
        while lost := sorted(self.lost()):
            hosts = self.base._links.backend.hosts(range(self.base.size))
            near = [self.members[rank] for rank in lost if hosts[rank] == hosts[own]]
            alive = [member for member in near if not member.is_dead()]
            if not alive or patience.expired:
                return alive[0] if alive else None
            time.sleep(_POLL_INTERVAL_S)
        return None


@dataclass(eq=False, slots=True)
class Reconfiguration:
    """One call of reconfigure."""

    settings: Settings
    #: uuid, members: the arguments of the call
    uuid: int
    members: tuple[GroupHandle, ...]
    rank: int  # this process's rank among the members
    #: the process's connections at the call; None: it had none, or waiting has ended
    connections: Connections | None
    deadline: Deadline  # limit for connecting all members
    timeout: float  # default timeout of operations in the new group, in seconds
    #: completes when the new group is in use, or with the error
    future: Future[None] = field(default_factory=Future)
    #: the new group, during the barrier of its members
    _group: ProcessGroup | None = None
    _cancelled: str = ""

    def connect(self) -> tuple[ProcessGroup, Connections]:
        """Wait for the other members; return the new group and its connections.

        Raises ShoalError if a member failed, did not connect in time, or cancelled its call.
        """
        try:
            if common_world(self.members) is not None and self.connections is not None:
                return self._connect_over(self.connections), self.connections
            return self._connect_through_store()
        finally:
            # New connections refer to this object through their callbacks.  It must not refer to older
            # connections, which in turn refer to still older ones.
            self.connections = None

    def cancel(self, why: str) -> None:
        """Cancel the reconfiguration on all members; ``why``: the action of this process ("aborted ...")."""
        self._cancelled = f"{self._me} {why}"
        if (group := self._group) is not None:
            group.abort(self._cancelled)

    def with_members_named(self, error: ShoalError) -> ShoalError:
        """Return a copy of ``error`` with the handles of the ranks that it names."""
        text = f"reconfigure with uuid {self.uuid} on rank {self.rank} of {len(self.members)}: {error}"
        ranks: tuple[int, ...] = getattr(error, "ranks", ())
        if isinstance(error, RendezvousTimeout) and len(self.members) <= _MAX_MEMBERS_LISTED:
            ranks = tuple(range(len(self.members)))
        if ranks:
            text += "; " + ", ".join(f"rank {rank} is {self.members[rank]}" for rank in ranks)
        if isinstance(error, GroupError):
            text += f"; {_ADVICE}"
        told = copy(error).with_traceback(None)
        told.args = (text,)
        return told

    @property
    def _me(self) -> str:
        return f"rank {self.rank} ({self.members[self.rank]})"

    @property
    def _remaining(self) -> float:
        return max(self.deadline.remaining(), _MIN_REMAINING_S)

    def _check(self) -> None:
        if self._cancelled:
            raise RendezvousError(self._cancelled)

    # -- existing connections ------------------------------------------------------------------

    def _connect_over(self, connections: Connections) -> ProcessGroup:
        places = [each.place for each in self.members]
        group = connections.base._subgroup(places, f"reconfigure {self.uuid}", self.timeout)
        try:
            if (member := connections.unsafe_member()) is not None:
                group.abort(
                    f"{self._me} lost {member}, which may still be running and write to shared memory; "
                    "exchange new handles"
                )
            self._group = group
            if self._cancelled:
                group.abort(self._cancelled)
            group.barrier(timeout=self._remaining).wait()
        except BaseException:
            group.close(_CLOSE_TIMEOUT_S)
            raise
        finally:
            self._group = None
            connections.base._made.clear()  # the name contains the uuid, so no member list is reused
        return group

    # -- new connections -----------------------------------------------------------------------

    def _connect_through_store(self) -> tuple[ProcessGroup, Connections]:
        settings, found, rank = self.settings, self.members, self.rank
        store = _separate_client(settings.store)
        keys = PrefixStore(f"reconfigure/{self.uuid}", store)
        self._claim(keys)
        name = f"reconfigure/{self.uuid}"
        point = rendezvous_point(store, rank, len(found), name, self.deadline, advice=_ADVICE)
        membership = rendezvous_at(replace(point, meeting=name), self._rendezvous_check(keys))

        def still_possible(*ranks: Any) -> None:
            self._check()
            membership.check(*ranks)

        base = world_group(
            replace(membership, check=still_possible), settings.factory, name=settings.name,
            timeout=self.timeout, tuning=settings.tuning, options=dict(settings.options),
            within=self._remaining,
        )  # fmt: skip
        try:
            group = base._subgroup(list(range(base.size)), f"reconfigure {self.uuid}", self.timeout)
            if rank == 0:
                with contextlib.suppress(StoreError):  # the list is no longer needed
                    keys.set(_LIST, _USED)
        except BaseException:
            base.close(_CLOSE_TIMEOUT_S)
            raise
        return group, Connections(base, digest(self.uuid, *(each.ident for each in found)), found)

    def _claim(self, keys: Store) -> None:
        """Claim the uuid for the members of the list."""
        listed = [digest(each.encode()) for each in self.members]
        own = ",".join(listed).encode()
        claimed = keys.compare_set(_LIST, b"", own)
        if claimed == own:
            return
        if listed[self.rank].encode() not in claimed.split(b","):
            raise UsageError(
                f"the uuid {self.uuid} was already used, for a group without this process; each reconfigure "
                "needs a new one, and all members must pass the same handles"
            )
        reason = f"{self._me} passed other handles than the others, or in another order"
        keys.set(_REFUSED, reason)
        raise UsageError(f"{reason}; all members must pass the same")

    def _rendezvous_check(self, keys: Store) -> Callable[[], None]:
        """Return a check for the rendezvous, which raises if a member cannot connect any more."""
        own = self.members[self.rank]
        # Losses in the handle were known when the list was made; that process is in the list nevertheless.
        known = frozenset(own.lost)
        if self.connections is not None and own.world is None:
            known = self.connections.lost()

        def lost(member: GroupHandle) -> bool:
            """Return whether the connection to a member on another host was lost since the call."""
            connections = self.connections
            return (
                connections is not None
                and (member.world, member.machine != own.machine) == (connections.ident, True)
                and member.place in connections.lost() - known
            )

        def check() -> None:
            self._check()
            (refused,) = keys.peek([_REFUSED])
            if refused is not None:
                raise RendezvousError(refused.decode("utf-8", "replace"))
            gone = [
                f"rank {rank} ({member}) {how}"
                for rank, member in enumerate(self.members)
                if (how := "ended" if member.is_dead() else "was lost" if lost(member) else "")
            ]
            if gone:
                raise RendezvousError(f"{', '.join(gone)} before all members were connected; {_ADVICE}")

        return check


def _separate_client(store: TorchStore) -> Store:
    """Return a separate client of a torch store, for a thread that must not wait for other threads' calls.

    The client of a TCPStore serves one call at a time, and the program may block in a call until other
    members have finished.  Other stores are used as they are: a clone of a FileStore can delete the file.
    """
    bottom: Any = store
    while (below := getattr(bottom, "underlying_store", None)) is not None:
        bottom = below
    if not isinstance(bottom, TCPStore):
        return adopt(store)
    try:
        return adopt(store.clone())  # type: ignore[attr-defined] # torch 2.13 has no stub of it
    except dist.DistError as error:
        raise StoreError(f"torch's store cannot be reached: {error}") from error
