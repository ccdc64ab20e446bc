"""The wait of a process that joins a session for its invitation."""

from __future__ import annotations

import contextlib
import secrets
import time
from typing import NamedTuple

import msgspec

from ...common.wording import in_seconds
from ...errors import RendezvousTimeout, StateLost, StoreError, StoreTimeout, WireError
from ...net import Deadline
from ...rendezvous import RendezvousPoint
from ...store import Store
from .lobby_keys import (
    AGAIN,
    LONGEST_PAUSE,
    LOOK,
    SESSION,
    SHORTEST_PAUSE,
    SILENCE,
    Candidate,
    Invitation,
    LobbyReader,
    SessionNote,
    arrivals_key,
    beat_key,
    candidate_key,
    go_key,
    keys_of,
)


class Begun(NamedTuple):
    """The session that this process starts."""

    ident: int


def await_invitation(
    place: RendezvousPoint, deadline: Deadline, *, begins: bool = False
) -> Invitation | Begun:
    """Wait until the ranks of the job's session invite this process.

    If the store is not reachable, reconnect until it is back.

    Args:
        deadline: time until which there must be a session; then the wait for an invitation has no limit.  Its
            timeout also limits the wait for a store that is not reachable, the wait for the session to be
            published again after that, and, if it exceeds SILENCE, the time without a heartbeat.
        begins: whether this process starts a session if there has been none since it came.

    Raises:
        SystemExit: with exit code 0; the session has ended without this process.
        RendezvousTimeout: there is no session.
        StateLost: there was a session, and its ranks are lost.  A process that may start a session does not
            start one then, as the checkpoint that it has loaded may be outdated.
        StoreError, WireError: the store is not reachable.
    """
    return WaitingProcess(place, deadline, begins).await_invitation()


class WaitingProcess:
    """This process as a candidate; ``deadline``: time until which the session must be found again."""

    def __init__(self, place: RendezvousPoint, deadline: Deadline, begins: bool) -> None:
        self._place = place
        self.deadline = deadline
        self._begins = begins
        #: the session and its heartbeat as last read, and the time of their last change
        self._seen: tuple[bytes, bytes] | None = None
        self._since = 0.0
        #: identifier of a session of which this process has seen a heartbeat
        self._lived = ""
        self._me = msgspec.json.encode(Candidate(place.here.machine, place.here.process))
        self._ident = ""
        self._number: int | None = None
        self._reader = LobbyReader()

    def await_invitation(self) -> Invitation | Begun:
        """As :func:`await_invitation`; called again if the rendezvous after an invitation failed."""
        self.hears_nothing()
        pause = SHORTEST_PAUSE
        while True:
            try:
                with keys_of(self._place) as store:
                    while (found := self.look(store)) is None:
                        pause = SHORTEST_PAUSE
                    return found
            except (StoreError, WireError):
                self.hears_nothing()
                if self.deadline.expired:
                    raise
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    def look(self, store: Store) -> Invitation | Begun | None:
        """Find the session, register as a candidate, and wait for the invitation for up to LOOK seconds."""
        raw, session = b"", None
        with contextlib.suppress(StoreTimeout):
            raw = store.get(SESSION, 0.0 if self._begins else min(self.deadline.remaining(), LOOK))
            session = self._reader.session(raw)
        if session is not None and session.void:
            self._lived = self._ident = ""
        if self._begins:
            is_over = session is not None and (
                session.void or (session.over and session.ident not in (self._lived, self._ident))
            )
            if is_over or self._may_begin(store, raw, session):
                return self._begin(store, raw)
        if session is None or session.void:
            self._check_deadline()
            time.sleep(SHORTEST_PAUSE)  # the session writes it again
            return None
        if session.over:
            raise SystemExit(0)
        if not self._begins and self._silence(store, raw, session) >= max(SILENCE, self.deadline.timeout):
            raise self._lost()
        self.deadline = Deadline(self.deadline.timeout)
        self._ident = session.ident
        if not self._has_come(store):
            number = store.add(arrivals_key(self._ident), 1) - 1
            # If the key has another value, the session has already read it, and does not read it again.
            if store.compare_set(candidate_key(self._ident, number), b"", self._me) != self._me:
                return None
            self._number = number
        assert self._number is not None
        try:
            raw = store.get(go_key(self._ident, self._number), LOOK)
        except StoreTimeout:
            return None
        self._number = None  # the next response has another number
        return self._reader.invitation(raw) if raw not in (AGAIN, b"") else None

    def hears_nothing(self) -> None:
        """Discard the last heartbeat, as the store was not reachable since."""
        self._seen = None

    def _may_begin(self, store: Store, raw: bytes, session: SessionNote | None) -> bool:
        """Whether no session is running; raises StateLost if the one that this process waited for is lost."""
        silence = self._silence(store, raw, session)
        # A running session publishes itself again in a restarted store, so a known one gets more time.
        known = bool(raw or self._lived or self._ident)
        if silence < (SILENCE if known else 2 * LONGEST_PAUSE):
            return False
        if self._lived or (self._ident and not raw):
            raise self._lost()
        return True

    def _silence(self, store: Store, raw: bytes, session: SessionNote | None) -> float:
        """Return the seconds since the last heartbeat of the session, or since this process came."""
        beat = b""
        if session is not None:
            with contextlib.suppress(StoreTimeout):
                beat = store.get(beat_key(session.ident), 0.0)
        now = time.monotonic()
        if self._seen is None or self._seen != (raw, beat):
            if self._seen is not None and session is not None:
                self._lived = session.ident
            self._seen, self._since = (raw, beat), now
        return now - self._since

    def _lost(self) -> StateLost:
        silence = in_seconds(SILENCE if self._begins else max(SILENCE, self.deadline.timeout))
        joins, again = "1", "all ranks again, from"
        if self._begins:
            joins, again = "auto", "this process again: it then begins a session with"
        return StateLost(
            f"job {self._place.job!r}: the session that this process (SHOAL_JOIN={joins}) waited for has "
            f"given no sign of life for {silence}.  Start {again} the newest checkpoint"
        )

    def _begin(self, store: Store, before: bytes) -> Begun | None:
        """Start a session, replacing the value ``before``; None: another process has started one."""
        ident = secrets.randbits(62)
        mine = msgspec.json.encode(SessionNote(f"{ident:016x}"))
        if store.compare_set(SESSION, before, mine) != mine:
            return None
        if before and (session := self._reader.session(before)) is not None:
            store.delete_prefix(f"{session.ident}/")
        return Begun(ident)

    def _has_come(self, store: Store) -> bool:
        """Whether this process is registered; a restarted store has lost the registration."""
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
