"""A membership: the result of a rendezvous, by which a process knows its rank and how to reach the others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ..store import Store
from .place import RendezvousPoint
from .venue import START_AGAIN


def _nothing(*_: object) -> None:
    """Do nothing: the default of what a membership can be told."""


@dataclass(frozen=True, slots=True)
class Membership:
    """One process's place in its job's world group.

    Attributes:
        rank, size: in the job's world group.
        local_rank, local_size: among the ranks that run on this host.
        store: already prefixed by job id and epoch, shared by all ranks.
        job, epoch: the job, and the number of its incarnation; traffic of another epoch is refused.
        secret: the job's secret; b"" at most for a group of one.
        interface: the address that listeners bind to (loopback unless ranks are elsewhere).
        ranks: where only some ranks of the world connect, their ranks in the world; empty: all do.
        waits_for_stopped: whoever made the membership decides when a rank of this host is lost whose
            process is stopped; the others wait for it.
        host: identity of the host; ranks with equal values try shared memory first.
        place: where the ranks have met, and others can come later; None: nobody can.
        meeting: name of the meeting that numbered the ranks; "": the first one of the job.
        advice: what a user does when the ranks cannot connect, as the end of a sentence.
        release: called once, with seconds to spend, when the world group is closed: says goodbye in
            the store, closes it, and stops the server if this rank hosts it.
        abandon: called in the place of ``release``, with the error, when this rank could not connect:
            also tells the others, whose own connecting then fails with the reason.
        look: for backends, to be called a few times a second while they wait for other ranks in order to
            connect: raises RendezvousError when a rank died or abandoned the meeting.  Takes the ranks whose
            death counts (all): those that are connected to all others may have ended in good order.
        connected: called, perhaps more than once, when this rank will not read the store any more in order
            to connect: by backends, before they tell the other ranks so, and when the backend is made.
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
