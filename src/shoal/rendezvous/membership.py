"""The result of a rendezvous: the rank of a process, and how it reaches the others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ..store import Store
from .place import RendezvousPoint
from .venue import START_AGAIN


def _nothing(*_: object) -> None:
    """Do nothing: the default of a membership's callbacks."""


@dataclass(frozen=True, slots=True)
class Membership:
    """One process's place in its job's world group.

    Attributes:
        rank, size: in the job's world group.
        local_rank, local_size: among the ranks on this host.
        store: shared by all ranks, with a prefix of job and epoch.
        job, epoch: the job, and the number of its restarts; traffic of another epoch is refused.
        secret: the job's secret; b"" only for a group of one.
        interface: the address that listeners bind to (loopback if all ranks are on this machine).
        ranks: if only some ranks of the world connect, their ranks in the world; empty: all do.
        waits_for_stopped: the creator of the membership decides when a rank of this host whose process is
            stopped is lost; until then the others wait for it.
        host: identity of the host; ranks with equal values try shared memory first.
        place: the rendezvous point, where other ranks can join later; None: they cannot.
        meeting: name of the meeting that numbered the ranks; "": the first one of the job.
        advice: what the user should do if the ranks cannot connect, as the end of a sentence.
        release: called once, with a timeout in seconds, when the world group is closed: leaves the meeting,
            closes the store, and stops the server if this rank hosts it.
        abandon: called instead of ``release``, with the error, if this rank could not connect: also notifies
            the other ranks, which then fail to connect for the same reason.
        look: called by backends a few times a second while they connect: raises RendezvousError if a rank
            died or abandoned the meeting. Takes the ranks whose deaths count (default: all): a rank that is
            connected to all others may have ended normally.
        connected: called, possibly more than once, when this rank no longer needs the store to connect: by
            backends before they notify the other ranks of that, and when the backend is created.
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
    ranks: tuple[int, ...] = ()
    waits_for_stopped: bool = False
    place: RendezvousPoint | None = None
    meeting: str = ""
    advice: str = START_AGAIN
    release: Callable[[float], None] = field(default=_nothing, compare=False, repr=False)
    abandon: Callable[[BaseException], None] = field(default=_nothing, compare=False, repr=False)
    look: Callable[..., None] = field(default=_nothing, compare=False, repr=False)
    connected: Callable[[], None] = field(default=_nothing, compare=False, repr=False)
