"""The lobby as the ranks of a session see it: rank 0 reads there which processes wait to join.

It reads in a thread of its own; when rank 0 has died, the new rank 0 does.  The thread outlives the store: it
looks for one that is gone until it is back, and what the lobby keeps there it writes again if that is lost.
Training does not wait for any of it.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import secrets
import threading
import time
from collections.abc import Callable

import msgspec

from ...common.wording import counted
from ...errors import RendezvousError, ShoalError, StoreError, StoreTimeout, WireError
from ...rendezvous import RendezvousPoint
from ...rendezvous.host import process_is_gone
from ...rendezvous.record import LOBBY, WANTED
from ...store import Store
from .lobby_keys import (
    BEAT,
    LONGEST_PAUSE,
    LOOK,
    SESSION,
    SHORTEST_PAUSE,
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

_LOST = (StoreError, WireError)
_logger = logging.getLogger("shoal")


class Lobby:
    """The lobby of a session's ranks.

    Args:
        place: where they have met.
        wanted: how many ranks the session shall have, until the launcher says otherwise; None: as many as
            come.

    Attributes:
        wanted: as above, as far as this rank knows.

    Nothing here raises because the store is gone: then nobody can come until it is back.
    """

    def __init__(self, place: RendezvousPoint, wanted: int | None = None) -> None:
        self._place = place
        self.wanted = wanted
        #: what a launcher has written about it
        self._said = b""
        self._machine = place.here.machine
        #: of the session; 0: not known to this rank
        self.ident = 0
        #: whether the session begins with this rank, and the store does not know it yet
        self._begins = False
        self._reader = LobbyReader()
        self._lock = threading.Lock()
        self._waiting: dict[int, Candidate] = {}
        self._invited: list[Candidate] = []
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()
        #: the thread's connection, while the store is there
        self._store: Store | None = None

    def open(self) -> None:
        """Begin a session at this place; for one rank, before the others use it."""
        self.ident = secrets.randbits(62)
        self._begins = True
        with contextlib.suppress(*_LOST), keys_of(self._place) as store:
            self._announce(store)

    def listen(self) -> None:
        """Look for candidates from now on; on one rank.  It may be called again."""
        if self._thread is None:
            self._closing.clear()
            self._thread = threading.Thread(target=self._run, name="shoal-lobby", daemon=True)
            self._thread.start()

    def name_of_meeting(self, token: int) -> str:
        """The name of a meeting with candidates; its keys go when the next session begins here."""
        return f"{LOBBY}/{self._name}/meeting/{token:x}"

    @property
    def waiting(self) -> int:
        """How many candidates wait.  Cheap."""
        return len(self._waiting)

    def look_up_wanted(self) -> None:
        """Learn what the launcher has said by now."""
        if (store := self._store) is not None:
            with contextlib.suppress(*_LOST):
                self._look_up_wanted(store)

    def invite(self, most: int, compose: Callable[[int, int], Invitation]) -> int:
        """Invite candidates that live.

        Args:
            most: so many.
            compose: the invitation of the candidate with this number among so many.

        Returns:
            How many were invited.
        """
        with self._lock:
            store = self._store
            for number in [n for n, each in self._waiting.items() if self._is_gone(each)]:
                del self._waiting[number]
            if store is None:
                return 0
            numbers = sorted(self._waiting)[:most]
            try:
                for index, number in enumerate(numbers):
                    store.set(go_key(self._name, number), msgspec.json.encode(compose(index, len(numbers))))
            except _LOST:
                self._waiting.clear()  # or the next step would wait for the store again
                return 0
            self._invited = [self._waiting.pop(number) for number in numbers]
        return len(numbers)

    def check_invited(self) -> None:
        """Find out whether those that were invited last may still come.

        Raises:
            RendezvousError: one has died.
        """
        if gone := sum(map(self._is_gone, self._invited)):
            raise RendezvousError(f"{counted(gone, 'newcomer')} died after the invitation")

    def close(self, *, over: bool, void: bool = False) -> None:
        """Look for candidates no more.

        Args:
            over: the session has come to its end; who still waits is told so, by the rank that listens.
            void: it has ended before its first step; who still waits may begin another one.
        """
        if self._thread is None:
            return
        with self._lock:
            self._closing.set()
            if self._store is not None:
                self._store.close()
        self._thread.join()
        self._thread = None
        if over or void:
            with contextlib.suppress(*_LOST), keys_of(self._place) as store:
                found = self._session(store)
                session = self._reader.session(found) if found else None
                if session is not None and not self.ident and not (session.over or session.void):
                    self.ident = int(session.ident, 16)  # the thread had not come so far
                if session is None or session.ident == self._name:  # another one may have begun meanwhile
                    ended = SessionNote(self._name, over=over, void=void)
                    store.compare_set(SESSION, found, msgspec.json.encode(ended))
                for key in store.list_keys(start := candidate_key(self._name)):
                    if (number := self._reader.number("candidate", key.removeprefix(start))) is not None:
                        store.compare_set(go_key(self._name, number), b"", b"")

    @property
    def _name(self) -> str:
        return f"{self.ident:016x}"

    def _is_gone(self, candidate: Candidate) -> bool:
        return candidate.machine == self._machine and process_is_gone(candidate.process)

    # -- the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        pause, warned = SHORTEST_PAUSE, False
        while not self._closing.is_set():
            try:
                with keys_of(self._place) as store:
                    self._announce(store)
                    with self._lock:
                        if self._closing.is_set():
                            return
                        self._store = store
                    pause, warned = SHORTEST_PAUSE, False
                    self._serve(store)
            except (ShoalError, OSError) as error:
                if self._closing.is_set():
                    return
                if not warned:
                    _logger.warning(
                        "nobody can join the session until its store is back; training goes on (%s)", error
                    )
                    warned = True
            finally:
                with self._lock:
                    self._store = None
                    self._waiting.clear()  # they come again, or are found again
            self._closing.wait(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    def _serve(self, store: Store) -> None:
        """Find candidates, until the store is gone or closed."""
        #: numbers of candidates that were read, and numbers under which a candidate is late to write
        seen: set[int] = set()
        late: set[int] = set()
        beaten = -BEAT
        while True:
            self._announce(store)
            if (now := time.monotonic()) >= beaten + BEAT:
                store.set(beat_key(self._name), secrets.token_hex(4))
                beaten = now
            self._look_up_wanted(store)
            for number in self._numbers(store):
                if number not in seen:
                    seen.add(number)
                    self._read(store, number)
            awaited = next(each for each in itertools.count() if each not in seen and each not in late)
            try:
                store.wait([candidate_key(self._name, awaited)], LOOK)
            except StoreTimeout:
                if self._arrivals(store, seen) > awaited:
                    late.add(awaited)  # it died on the way, or stands still

    def _announce(self, store: Store) -> None:
        """See to it that newcomers find the session, also in a store that began anew or holds junk."""
        if self._begins:
            with contextlib.suppress(StoreTimeout):
                if (before := self._reader.session(store.get(SESSION, 0.0))) is not None:
                    store.delete_prefix(f"{before.ident}/")
            store.set(SESSION, msgspec.json.encode(SessionNote(self._name)))
            self._begins = False
            return
        found = self._session(store)
        session = self._reader.session(found) if found else None
        if session is None or session.over or session.void:
            self.ident = self.ident or secrets.randbits(62)
            store.compare_set(SESSION, found, msgspec.json.encode(SessionNote(self._name)))
        elif not self.ident:
            self.ident = int(session.ident, 16)
        elif session.ident != self._name:
            self._reader.passes_over(
                "session",
                "another one began here when this one had not been seen for a minute; nobody can join this "
                "one any more, and both train: end one of them",
            )

    def _session(self, store: Store) -> bytes:
        with contextlib.suppress(StoreTimeout):
            return store.get(SESSION, 0.0)
        return b""

    def _look_up_wanted(self, store: Store) -> None:
        if self.wanted is None:
            return
        try:
            said = store.get(WANTED, 0.0)
        except StoreTimeout:
            if self._said:
                store.compare_set(WANTED, b"", self._said)  # lost with the store
            return
        if (wanted := self._reader.wanted(said)) is not None:
            self.wanted, self._said = wanted, said

    def _numbers(self, store: Store) -> list[int]:
        """Those under which candidates have written."""
        start = candidate_key(self._name)
        found = (self._reader.number("candidate", key[len(start) :]) for key in store.list_keys(start))
        return sorted(number for number in found if number is not None)

    def _arrivals(self, store: Store, seen: set[int]) -> int:
        """How many have come; a count that is none is mended, or nobody could come any more."""
        try:
            raw = store.get(key := arrivals_key(self._name), 0.0)
        except StoreTimeout:
            return 0
        count = self._reader.number("arrivals", raw)
        if count is None:
            count = max(seen, default=-1) + 1
            store.compare_set(key, raw, str(count))
        return count

    def _read(self, store: Store, number: int) -> None:
        with contextlib.suppress(StoreTimeout):  # it has been deleted
            candidate = self._reader.candidate(store.get(candidate_key(self._name, number), 0.0))
            if candidate is None or store.check([go_key(self._name, number)]):
                return
            with self._lock:
                for other in [n for n, each in self._waiting.items() if each.process == candidate.process]:
                    del self._waiting[other]  # it has come again
                self._waiting[number] = candidate
