"""The lobby as a process sees it that waits there to join a session."""

from __future__ import annotations

import contextlib
import time

import msgspec

from ..errors import RendezvousTimeout, StoreError, StoreTimeout, WireError
from ..rendezvous import Place
from ..store import Store
from ..wire import Deadline
from ..wording import in_seconds
from .lobby_keys import (
    AGAIN,
    LONGEST_PAUSE,
    LOOK,
    SESSION,
    SHORTEST_PAUSE,
    Candidate,
    Invitation,
    Reader,
    arrivals_key,
    candidate_key,
    go_key,
    keys_of,
)


def await_invitation(place: Place, deadline: Deadline) -> Invitation:
    """Wait in the lobby until the ranks of the session there invite this process.

    A store that is gone is looked for until it is back.

    Args:
        deadline: until when there must be a session; it may then take any time until it needs this process.
            As many seconds are left to a store that is gone, and then to the session to be found there again.

    Raises:
        SystemExit: with the exit code 0; the session has come to its end without this process.
        RendezvousTimeout: there is none.
        StoreError, WireError: the store is gone.
    """
    candidate, pause = _Waiting(place, deadline), SHORTEST_PAUSE
    while True:
        try:
            with keys_of(place) as store:
                while (invitation := candidate.look(store)) is None:
                    pause = SHORTEST_PAUSE
                return invitation
        except (StoreError, WireError):
            if candidate.deadline.expired:
                raise
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE)


class _Waiting:
    """This process as a candidate.

    Attributes:
        deadline: until when the session must be seen again.
    """

    def __init__(self, place: Place, deadline: Deadline) -> None:
        self._place = place
        self.deadline = deadline
        self._me = msgspec.json.encode(Candidate(place.here.machine, place.here.process))
        self._ident = ""
        self._number: int | None = None
        self._reader = Reader()

    def look(self, store: Store) -> Invitation | None:
        """Look for the session, come, and wait a moment for the invitation."""
        try:
            raw = store.get(SESSION, min(self.deadline.remaining(), LOOK))
        except StoreTimeout:
            self._check_deadline()
            return None
        session = self._reader.session(raw)
        if session is None:
            self._check_deadline()
            time.sleep(SHORTEST_PAUSE)  # the session writes it again
            return None
        if session.over:
            raise SystemExit(0)
        self.deadline = Deadline(self.deadline.timeout)
        self._ident = session.ident
        if not self._has_come(store):
            number = store.add(arrivals_key(self._ident), 1) - 1
            # Where something stands already, the session has read it, and looks there no more.
            if store.compare_set(candidate_key(self._ident, number), b"", self._me) != self._me:
                return None
            self._number = number
        assert self._number is not None
        try:
            raw = store.get(go_key(self._ident, self._number), LOOK)
        except StoreTimeout:
            return None
        self._number = None  # another answer comes under another number
        return self._reader.invitation(raw) if raw not in (AGAIN, b"") else None

    def _has_come(self, store: Store) -> bool:
        """Whether the session can read of this process: not so in a store that began anew."""
        if self._number is not None:
            with contextlib.suppress(StoreTimeout):
                if store.get(candidate_key(self._ident, self._number), 0.0) == self._me:
                    return True
            self._number = None
        return False

    def _check_deadline(self) -> None:
        if self.deadline.expired:
            raise RendezvousTimeout(
                f"job {self._place.job!r}: within {in_seconds(self.deadline.timeout)} no session began here "
                "that this process (SHOAL_JOIN=1) could join"
            )
