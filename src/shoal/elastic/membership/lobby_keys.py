"""The keys in the job's store for processes that join a session, and the validation of their values.

    wanted                        number of ranks that the launcher wants, if it has written it
    session                       the job's session: its identifier, and whether it has ended or is void
    IDENT/beat                    changes every few seconds while rank 0 of the session is alive
    IDENT/arrivals                number of candidates that have registered
    IDENT/candidate/N             candidate N, which waits for the next key
    IDENT/go/N                    its invitation; "again": register again; empty: the session has ended

Any process with the job's secret can write these keys, also one of another version or program.  Invalid
values are ignored, with one warning for each kind.
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
#: seconds for which one request waits before it is repeated
LOOK = 1.0
#: seconds between two heartbeats of a session; seconds without one after which the session is lost
BEAT, SILENCE = 5.0, 60.0
#: seconds within which the store must answer
PATIENCE = 5.0
#: seconds between two attempts to reach a store that is not reachable
SHORTEST_PAUSE, LONGEST_PAUSE = 0.05, 0.5

#: largest valid rank, size or number of lanes
_MOST = 2**31
_NUMBER = re.compile(rb"0|[1-9][0-9]{0,17}")
_logger = logging.getLogger("shoal")

Count = Annotated[int, msgspec.Meta(ge=1, le=_MOST)]
_Seconds = Annotated[float, msgspec.Meta(gt=0, le=1e9)]
#: an option of a backend that can be sent to other processes
Option = str | int | float | bool | None


class SessionNote(msgspec.Struct, frozen=True):
    """The job's session; ``over``: it has ended; ``void``: before its first step, so it may be replaced."""

    ident: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{16}\Z")]
    over: bool = False
    void: bool = False


class Candidate(msgspec.Struct, frozen=True):
    """A process that waits to join; attributes as in :class:`shoal.rendezvous.host.Here`."""

    machine: Text
    process: Process


class Invitation(msgspec.Struct, frozen=True):
    """The information that a candidate needs to connect to the ranks of the session.

    Attributes:
        meeting: name of the rendezvous, for :func:`shoal.rendezvous.meet_beside`.
        rank, size: rank of the candidate in the new group, and its size.
        epoch: epoch of the old group.
        name, timeout, concurrency, backend, options: properties of the new group.
        within: seconds within which all must be connected.
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
    """Return the store of these keys over a new connection; raises StoreError or WireError."""
    return PrefixStore(LOBBY, place.store).clone(PATIENCE, accept_new_data=True)


def beat_key(ident: str) -> str:
    """Return the key of a session's heartbeat."""
    return f"{ident}/beat"


def arrivals_key(ident: str) -> str:
    """Return the key that counts the candidates of a session."""
    return f"{ident}/arrivals"


def candidate_key(ident: str, number: int | None = None) -> str:
    """Return the key of candidate ``number``; None: the common prefix of all candidates' keys."""
    return f"{ident}/candidate/" + ("" if number is None else str(number))


def go_key(ident: str, number: int) -> str:
    """Return the key of the response to a candidate."""
    return f"{ident}/go/{number}"


class LobbyReader:
    """Decodes the values of the keys, or returns None for invalid ones, with one warning for each kind."""

    def __init__(self) -> None:
        self._warned: set[str] = set()

    def session(self, raw: bytes) -> SessionNote | None:
        """Decode the value of ``session``."""
        return self._checked(SESSION, raw, SessionNote)

    def wanted(self, raw: bytes) -> int | None:
        """Decode the number of ranks that the launcher wants."""
        count = self._checked(WANTED, raw, int)
        if count is None or 1 <= count <= _MOST:
            return count
        self.passes_over(WANTED, f"{count} ranks")
        return None

    def candidate(self, raw: bytes) -> Candidate | None:
        """Decode a candidate."""
        return self._checked("candidate", raw, Candidate)

    def invitation(self, raw: bytes) -> Invitation | None:
        """Decode the response to a candidate."""
        return self._checked("go", raw, Invitation)

    def number(self, what: str, raw: bytes | str) -> int | None:
        """Decode a count, or the number in a key."""
        text = raw if isinstance(raw, bytes) else raw.encode()
        if _NUMBER.fullmatch(text):
            return int(text)
        self.passes_over(what, f"{text[:40]!r} is not a number")
        return None

    def passes_over(self, what: str, why: object) -> None:
        """Warn, once for each ``what``, that a value is ignored."""
        if what not in self._warned:
            self._warned.add(what)
            _logger.warning("the session ignores a value of '%s' in the store: %s", what, why)

    def _checked(self, what: str, raw: bytes, kind: type[T]) -> T | None:
        try:
            return decode(raw, kind)
        except StoreError as error:
            self.passes_over(what, error)
            return None
