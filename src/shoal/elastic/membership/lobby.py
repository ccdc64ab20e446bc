"""Discovery of candidates by rank 0 of a session, and their invitation.

Rank 0 reads the candidates from the store in a thread; after a failure the new rank 0 continues.  The thread
reconnects to a store that is not reachable, and writes the session's keys again if they are lost.  Training
never waits for the store.
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
    """The candidates of a session, as rank 0 knows them.

    No method raises if the store is not reachable: no process can join until it is back.

    Attributes:
        wanted: number of ranks to grow to, until the launcher writes another number; None: no limit.
        ident: identifier of the session; 0: not known to this rank.
    """

    def __init__(self, place: RendezvousPoint, wanted: int | None = None) -> None:
        self._place = place
        self.wanted = wanted
        #: the value of ``wanted`` that the launcher has written
        self._said = b""
        self._machine = place.here.machine
        self.ident = 0
        #: whether this rank starts the session, and has not published it yet
        self._begins = False
        self._reader = LobbyReader()
        self._lock = threading.Lock()
        self._waiting: dict[int, Candidate] = {}
        self._invited: list[Candidate] = []
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()
        #: the thread's connection, while the store is reachable
        self._store: Store | None = None

    def open(self) -> None:
        """Start and publish a session; called by one rank, before others use it."""
        self.ident = secrets.randbits(62)
        self._begins = True
        with contextlib.suppress(*_LOST), keys_of(self._place) as store:
            self._announce(store)

    def listen(self) -> None:
        """Start to look for candidates, on rank 0; later calls have no effect."""
        if self._thread is None:
            self._closing.clear()
            self._thread = threading.Thread(target=self._run, name="shoal-lobby", daemon=True)
            self._thread.start()

    def name_of_meeting(self, token: int) -> str:
        """Return the name of a rendezvous; its keys are deleted when the next session of the job starts."""
        return f"{LOBBY}/{self._name}/meeting/{token:x}"

    @property
    def waiting(self) -> int:
        """Number of candidates, without access to the store."""
        return len(self._waiting)

    def look_up_wanted(self) -> None:
        """Update ``wanted`` from the store."""
        if (store := self._store) is not None:
            with contextlib.suppress(*_LOST):
                self._look_up_wanted(store)

    def invite(self, most: int, compose: Callable[[int, int], Invitation]) -> int:
        """Invite at most ``most`` candidates whose processes are alive, and return their number.

        ``compose`` returns an invitation, given the index of the candidate and the number of candidates.
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
                self._waiting.clear()  # so that the next step does not wait for the store again
                return 0
            self._invited = [self._waiting.pop(number) for number in numbers]
        return len(numbers)

    def check_invited(self) -> None:
        """Raise RendezvousError if one of the candidates invited last has died."""
        if gone := sum(map(self._is_gone, self._invited)):
            raise RendezvousError(f"{counted(gone, 'candidate')} died after the invitation")

    def close(self, *, over: bool, void: bool = False) -> None:
        """Stop looking for candidates; if the session has ended, notify them, on rank 0.

        ``over``: the session has ended; ``void``: before its first step, so candidates may start another one.
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
                    self.ident = int(session.ident, 16)  # the thread had not read it yet
                if session is None or session.ident == self._name:  # another session may have replaced it
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
                        "no process can join the session until its store is back; training continues (%s)",
                        error,
                    )
                    warned = True
            finally:
                with self._lock:
                    self._store = None
                    self._waiting.clear()  # candidates register again, or are found again
            self._closing.wait(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    def _serve(self, store: Store) -> None:
        """Find candidates, until the store is closed or not reachable."""
        #: numbers of candidates that were read, and of candidates whose key is overdue
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
                    late.add(awaited)  # it died before it wrote, or hangs

    def _announce(self, store: Store) -> None:
        """Publish the session, also in a store that was restarted or holds invalid values."""
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
                "another session was started when this one had not been seen for a minute; no process can "
                "join this one any more, and both are training: end one of them",
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
        """Return the numbers of the candidates in the store."""
        start = candidate_key(self._name)
        found = (self._reader.number("candidate", key[len(start) :]) for key in store.list_keys(start))
        return sorted(number for number in found if number is not None)

    def _arrivals(self, store: Store, seen: set[int]) -> int:
        """Return the number of registered candidates; repair an invalid count, which blocks all others."""
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
        with contextlib.suppress(StoreTimeout):  # the key has been deleted
            candidate = self._reader.candidate(store.get(candidate_key(self._name, number), 0.0))
            if candidate is None or store.check([go_key(self._name, number)]):
                return
            with self._lock:
                for other in [n for n, each in self._waiting.items() if each.process == candidate.process]:
                    del self._waiting[other]  # the process has registered again
                self._waiting[number] = candidate
