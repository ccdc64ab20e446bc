"""A group whose channel only takes note of what it is given: for what groups do by themselves."""

from __future__ import annotations

from typing import Any

from shoal.backend.base import Backend, DataChannel, GroupSpec
from shoal.errors import GroupAborted, GroupError
from shoal.future import Future
from shoal.group import ProcessGroup
from shoal.rendezvous import Membership
from shoal.spec import Operation
from shoal.store import MemoryStore
from shoal.world import World

_worlds: list[World] = []


class NullChannel(DataChannel):
    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self.futures: list[Future[Any]] = []
        self.broken: GroupError | None = None
        self.closed_within: list[float] = []

    def submit(self, operation: Operation) -> Future[Any]:
        self.operations.append(operation)
        self.futures.append(Future())
        return self.futures[-1]

    def failure(self) -> GroupError | None:
        return self.broken

    def abort(self, reason: str) -> None:
        self.broken = self.broken or GroupAborted(reason)

    def close(self, timeout: float) -> None:
        self.closed_within.append(timeout)


class NullBackend(Backend):
    name = "null"

    def __init__(self) -> None:
        self.channels: list[NullChannel] = []
        self.specs: list[GroupSpec] = []
        self.forks = 0

    def channel(self, group: GroupSpec) -> NullChannel:
        self.specs.append(group)
        self.channels.append(NullChannel())
        return self.channels[-1]

    def close(self, timeout: float) -> None:
        """Nothing to close."""

    def after_fork_in_child(self) -> None:
        self.forks += 1


def _connect(membership: Membership, *, timeout: float) -> NullBackend:
    return NullBackend()


def null_group(rank: int = 1, size: int = 4, owner: Any = None) -> tuple[ProcessGroup, NullChannel]:
    """A group and its channel, which is in ``group._backend.channels`` with those of its subgroups.

    Args:
        owner: called with the seconds that are left when the world is released.
    """
    backend = NullBackend()
    membership = Membership(
        rank=rank,
        size=size,
        local_rank=0,
        local_size=size,
        store=MemoryStore(),
        job="null",
        epoch=0,
        secret=b"",
        interface="127.0.0.1",
        host="here",
        release=owner or (lambda seconds: None),
    )
    spec = GroupSpec("null", 77, rank, tuple(range(size)))
    world = World(membership, backend, _connect, {})
    _worlds.append(world)
    return ProcessGroup._in(world, world.links, spec, membership.store, timeout=9.0), backend.channels[0]


def close_all() -> None:
    """Close whatever a test has left open."""
    while _worlds:
        _worlds.pop().close(1.0)
