"""What a rendezvous tells a process: who it is, and how to reach the others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ..store import Store


def _nothing(timeout: float) -> None:
    """Release nothing: the default of ``Membership.release``."""


@dataclass(frozen=True, slots=True)
class Membership:
    """One process's place in its job's world group.

    Attributes:
        rank, size: in the job's world group.
        local_rank, local_size: among the ranks that run on this host.
        store: already prefixed by job id and epoch, shared by all ranks.
        job, epoch: identify this incarnation of the job; traffic of another one is refused.
        secret: the job's secret; b"" at most for a group of one.
        interface: the address that listeners bind to (loopback unless ranks are elsewhere).
        host: identity of the host; ranks with equal values try shared memory first.
        release: called once, with seconds to spend, when the world group is closed: says goodbye in
            the store, closes it, and stops the server if this rank hosts it.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    store: Store
    job: str
    epoch: int
    secret: bytes = field(repr=False)
    interface: str
    host: str
    release: Callable[[float], None] = field(default=_nothing, compare=False, repr=False)
