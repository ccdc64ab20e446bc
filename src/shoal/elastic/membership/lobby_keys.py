"""The keys of the lobby, in the store of the job, and the one place where what stands there is checked.

    wanted                        how many ranks the session shall have, if a launcher has said so
    session                       the session at this place: its ident, and whether it is over, or void
    IDENT/beat                    changes every few seconds, as long as rank 0 of the session lives
    IDENT/arrivals                counts those that have come
    IDENT/candidate/N             the N-th of them, which waits for the next key
    IDENT/go/N                    its invitation; "again": it shall come once more; empty: the session is over

Whatever holds the job's secret can write there: another version, another program, a mistake.  A value that
cannot be right is as good as none, and one warning tells of the first of each kind.
"""

from __future__ import annotations

import logging
import re
from typing import Annotated, TypeVar

import msgspec

from ...errors import StoreError
from ...rendezvous import RendezvousPoint
from ...rendezvous.record import LOBBY, WANTED, Process, Text, decode
from ...store import PrefixStore, Store

T = TypeVar("T")

SESSION = "session"
AGAIN = b"again"
#: seconds for which one request waits; it is made again
LOOK = 1.0
#: seconds between two signs of life of a session; and seconds without one after which there is no session
BEAT, SILENCE = 5.0, 60.0
#: seconds in which the store must answer
PATIENCE = 5.0
#: seconds between two attempts to reach a store that is gone
SHORTEST_PAUSE, LONGEST_PAUSE = 0.05, 0.5

#: largest number that a rank, a size or a count of lanes can be
_MOST = 2**31
_NUMBER = re.compile(rb"0|[1-9][0-9]{0,17}")
_logger = logging.getLogger("shoal")

Count = Annotated[int, msgspec.Meta(ge=1, le=_MOST)]
_Seconds = Annotated[float, msgspec.Meta(gt=0, le=1e9)]
#: an option of a backend that can be told to others
Option = str | int | float | bool | None


class SessionNote(msgspec.Struct, frozen=True):
    """The session at this place.

    Attributes:
        over: it has come to its end.
        void: it has ended before its first step, so another one may begin in its place.
    """

    ident: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{16}\Z")]
    over: bool = False
    void: bool = False


class Candidate(msgspec.Struct, frozen=True):
    """A process that waits: as of :class:`shoal.rendezvous.host.Here`."""

    machine: Text
    process: Process


class Invitation(msgspec.Struct, frozen=True):
    """What a candidate needs in order to meet the ranks of the session.

    Attributes:
        meeting: its name, by which :func:`shoal.rendezvous.meet_beside` finds the others.
        rank, size: of the candidate, and of the group with it.
        epoch: of the group that invites.
        name, timeout, concurrency, backend, options: of the new group.
        within: seconds until all must have met.
    """

    meeting: Text
    rank: Count
    size: Count
    epoch: Annotated[int, msgspec.Meta(ge=0, le=2**62)]
    name: Text
    timeout: _Seconds
    concurrency: Count
    backend: Text
    options: dict[str, Option]
    within: _Seconds

    def __post_init__(self) -> None:
        if self.rank >= self.size:
            raise ValueError(f"rank {self.rank} of {self.size}")


def keys_of(place: RendezvousPoint) -> Store:
    """The lobby's keys, over a connection of their own to the store that is there now.

    Raises:
        StoreError, WireError: there is none, or it does not answer.
    """
    return PrefixStore(LOBBY, place.store).clone(PATIENCE, accept_new_data=True)


def beat_key(ident: str) -> str:
    """The sign of life of a session."""
    return f"{ident}/beat"


def arrivals_key(ident: str) -> str:
    """Counts the candidates of a session."""
    return f"{ident}/arrivals"


def candidate_key(ident: str, number: int | None = None) -> str:
    """A candidate's own; None: what those of all begin with."""
    return f"{ident}/candidate/" + ("" if number is None else str(number))


def go_key(ident: str, number: int) -> str:
    """Where a candidate is answered."""
    return f"{ident}/go/{number}"


class LobbyReader:
    """Reads what stands under the keys, for one process; warns once of each kind that cannot be right."""

    def __init__(self) -> None:
        self._warned: set[str] = set()

    def session(self, raw: bytes) -> SessionNote | None:
        """None: it is none, here and below."""
        return self._checked(SESSION, raw, SessionNote)

    def wanted(self, raw: bytes) -> int | None:
        """How many ranks a launcher wants."""
        count = self._checked(WANTED, raw, int)
        if count is None or 1 <= count <= _MOST:
            return count
        self.passes_over(WANTED, f"{count} ranks")
        return None

    def candidate(self, raw: bytes) -> Candidate | None:
        """A process that waits."""
        return self._checked("candidate", raw, Candidate)

    def invitation(self, raw: bytes) -> Invitation | None:
        """The answer to a candidate."""
        return self._checked("go", raw, Invitation)

    def number(self, what: str, raw: bytes | str) -> int | None:
        """A count, or the number in a key."""
        text = raw if isinstance(raw, bytes) else raw.encode()
        if _NUMBER.fullmatch(text):
            return int(text)
        self.passes_over(what, f"{text[:40]!r} is no number")
        return None

    def passes_over(self, what: str, why: object) -> None:
        """Warn, once, that something is as good as not there."""
        if what not in self._warned:
            self._warned.add(what)
            _logger.warning("the session's lobby passes over a %s in the store that is none: %s", what, why)

    def _checked(self, what: str, raw: bytes, kind: type[T]) -> T | None:
        try:
            return decode(raw, kind)
        except StoreError as error:
            self.passes_over(what, error)
            return None
