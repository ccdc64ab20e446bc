"""One reconfigure: from a list of handles to a group.

There are two ways, and all members take the same one, because they compute it from the same list
(:func:`~shoal.compat.reconfigure.handles.common_world`):

- All members are in the same connections: the new group uses these, as a subgroup does, and a barrier in it
  shows that all have come.  The store is not used.
- Else the members meet in torch's store, at a place that the uuid names, and connect.

Connections belong to a group that carries no operations, the *base*.  Groups of the program are subgroups of
it, so that abort() or a failure of one of those leaves the connections usable.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import urlsplit

import torch.distributed as dist
from torch._C._distributed_c10d import Store as TorchStore
from torch._C._distributed_c10d import TCPStore

from ... import config
from ...backend.registry import BackendFactory
from ...errors import GroupError, RendezvousError, RendezvousTimeout, ShoalError, StoreError, UsageError
from ...future import Future
from ...group import ProcessGroup
from ...initialize import world_group
from ...net import Deadline
from ...rendezvous import RendezvousPoint, Request, Venue, meet_at
from ...rendezvous.caller_store import store_address
from ...store import PrefixStore, Store, adopt
from ...torch_terms import BACKEND
from .handles import GroupHandle, common_world, digest

#: seconds for closing what was not completely made
_SHORT = 1.0
#: seconds that are left of a deadline at least
_SHORTEST = 0.001
#: seconds for a process whose connections ended to end too, and between two looks at it
_DYING, _PAUSE = 1.0, 0.01
#: members that a message about a timeout lists
_LISTED = 16
_ADVICE = "call torch.distributed._reconfigure again with a new uuid and the handles of the living members"
#: keys of a reconfigure in the store: the list that it was first called with, and why it cannot succeed
_LIST, _REFUSED = "list", "refused"
#: takes the place of the list once all members are connected
_USED = b"used"


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of every group that one process group of torch gets.

    Attributes:
        store: torch's, in which the members of a new group meet.
        name: of the groups, for errors.
        factory, concurrency, options: of the backend.
    """

    store: TorchStore
    name: str
    factory: BackendFactory
    concurrency: int
    options: Mapping[str, Any]


@dataclass(frozen=True, eq=False, slots=True)
class Connections:
    """Connections that groups are made over.

    Attributes:
        base: the group that holds them, of all members.
        ident: of them; equal on all members.
        members: in the order of their ranks in the base.
    """

    base: ProcessGroup
    ident: str
    members: tuple[GroupHandle, ...]

    def lost(self) -> frozenset[int]:
        """Return the ranks of the base that are known to be lost."""
        return self.base._links.lost()

    def hazard(self) -> GroupHandle | None:
        """Return a member that is lost, may be alive, and shares memory with this process.

        It could still write into that memory, so new groups must not use it.  ``ProcessGroup.rebuild`` kills
        such a process; here it may be in use elsewhere.
        """
        own = self.base.rank
        patience = Deadline(_DYING)
        while lost := sorted(self.lost()):
            hosts = self.base._links.backend.hosts(range(self.base.size))
            near = [self.members[rank] for rank in lost if hosts[rank] == hosts[own]]
            alive = [member for member in near if not member.has_ended(self.members[own].machine)]
            if not alive or patience.expired:
                return alive[0] if alive else None
            time.sleep(_PAUSE)
        return None


@dataclass(eq=False, slots=True)
class Reconfiguration:
    """One call of reconfigure.

    Attributes:
        uuid, members: the arguments of the call.
        rank: of this process among the members.
        connections: those that the process had at the call; None: it had none, or it does not wait any more.
        deadline: until when all members must be connected.
        timeout: default of operations in the new group, in seconds.
        future: completes when the new group is in use, or with the error.
    """

    settings: Settings
    uuid: int
    members: tuple[GroupHandle, ...]
    rank: int
    connections: Connections | None
    deadline: Deadline
    timeout: float
    future: Future[None] = field(default_factory=Future)
    #: the new group, while the members wait for one another in it
    _group: ProcessGroup | None = None
    _cancelled: str = ""

    def connect(self) -> tuple[ProcessGroup, Connections]:
        """Wait for the other members; return the new group and the connections that it uses.

        Raises:
            ShoalError: a member ended, did not come in time, or cancelled its call.
        """
        try:
            if common_world(self.members) is not None and self.connections is not None:
                return self._connect_over(self.connections), self.connections
            return self._connect_anew()
        finally:
            # New connections keep this object, by what they call while they connect.  It must not keep older
            # ones, which would keep still older ones.
            self.connections = None

    def cancel(self, why: str) -> None:
        """End it on all members.

        Args:
            why: what this process did: ``"aborted the process group"``.
        """
        self._cancelled = f"{self._me} {why}"
        if (group := self._group) is not None:
            group.abort(self._cancelled)

    def explained(self, error: ShoalError) -> ShoalError:
        """Return a copy of ``error`` that names the members concerned."""
        text = f"reconfigure with uuid {self.uuid} on rank {self.rank} of {len(self.members)}: {error}"
        ranks: tuple[int, ...] = getattr(error, "ranks", ())
        if isinstance(error, RendezvousTimeout) and len(self.members) <= _LISTED:
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
        return max(self.deadline.remaining(), _SHORTEST)

    def _check(self) -> None:
        if self._cancelled:
            raise RendezvousError(self._cancelled)

    # -- over connections that there are -------------------------------------------------------

    def _connect_over(self, connections: Connections) -> ProcessGroup:
        places = [each.place for each in self.members]
        group = connections.base._subgroup(places, f"reconfigure {self.uuid}", self.timeout)
        try:
            if (hazard := connections.hazard()) is not None:
                group.abort(
                    f"{self._me} lost {hazard}, which may be alive and write to memory that they share; "
                    "exchange new handles"
                )
            self._group = group
            if self._cancelled:
                group.abort(self._cancelled)
            group.barrier(timeout=self._remaining).wait()
        except BaseException:
            group.close(_SHORT)
            raise
        finally:
            self._group = None
            connections.base._made.clear()  # the uuid is in the name, so no list comes twice
        return group

    # -- over new ones -------------------------------------------------------------------------

    def _connect_anew(self) -> tuple[ProcessGroup, Connections]:
        settings, found, rank = self.settings, self.members, self.rank
        store = _connection_of_its_own(settings.store)
        keys = PrefixStore(f"reconfigure/{self.uuid}", store)
        self._claim(keys)
        venue = Venue(
            store, rank=rank, size=len(found), job=f"{BACKEND}/reconfigure/{self.uuid}", epoch=0,
            private=True, brief=True, advice=_ADVICE, address=store_address(store),
        )  # fmt: skip
        request = Request(urlsplit("store://"), rank, len(found), config.secret(), self.deadline)
        place = replace(RendezvousPoint.at(venue, request), meeting=f"reconfigure/{self.uuid}")
        membership = meet_at(place, self._look(keys))

        def still_possible(*ranks: Any) -> None:
            self._check()
            membership.look(*ranks)

        base = world_group(
            replace(membership, look=still_possible), settings.factory, name=settings.name,
            timeout=self.timeout, concurrency=settings.concurrency, options=dict(settings.options),
            within=self._remaining,
        )  # fmt: skip
        try:
            group = base._subgroup(list(range(base.size)), f"reconfigure {self.uuid}", self.timeout)
            if rank == 0:
                with contextlib.suppress(StoreError):  # nobody needs the list any more
                    keys.set(_LIST, _USED)
        except BaseException:
            base.close(_SHORT)
            raise
        return group, Connections(base, digest(self.uuid, *(each.ident for each in found)), found)

    def _claim(self, keys: Store) -> None:
        """Claim the uuid, together with the others of the list and with nobody else."""
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
        reason = f"{self._me} passed other handles than the others, or another order of them"
        keys.set(_REFUSED, reason)
        raise UsageError(f"{reason}; all members must pass the same")

    def _look(self, keys: Store) -> Callable[[], None]:
        """Return a function that raises if a member will not come; the members call it while they meet."""
        own = self.members[self.rank]
        # Losses in the handle were known when the list was made, and the process is in it all the same.
        known = frozenset(own.lost)
        if self.connections is not None and own.world is None:
            known = self.connections.lost()

        def lost(member: GroupHandle) -> bool:
            """Whether the connection to a member on another host ended since."""
            connections = self.connections
            return (
                connections is not None
                and (member.world, member.machine != own.machine) == (connections.ident, True)
                and member.place in connections.lost() - known
            )

        def look() -> None:
            self._check()
            (refused,) = keys.peek([_REFUSED])
            if refused is not None:
                raise RendezvousError(refused.decode("utf-8", "replace"))
            gone = [
                f"rank {rank} ({member}) {how}"
                for rank, member in enumerate(self.members)
                if (how := "ended" if member.has_ended(own.machine) else "was lost" if lost(member) else "")
            ]
            if gone:
                raise RendezvousError(f"{', '.join(gone)} before all members were connected; {_ADVICE}")

        return look


def _connection_of_its_own(store: TorchStore) -> Store:
    """Return a torch store for a thread that must not wait for calls of others.

    The client of a TCPStore serves one call at a time, and the program may block in one until other members
    are through.  Other stores are used as they are: a clone of a FileStore can delete its file.
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
