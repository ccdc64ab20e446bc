"""Where processes wait that want to join a session: keys in the store of the job.

    session                       the session at this place: its ident, and whether it is over
    IDENT/arrivals                counts those that have come
    IDENT/candidate/N             the N-th of them, which waits for the next key
    IDENT/go/N                    its invitation; empty: the session is over; "again": it was too slow

Rank 0 of the session reads what candidates write, in a thread of its own; when it has died, the new rank 0.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import Callable
from typing import Annotated

import msgspec

from ..errors import RendezvousError, RendezvousTimeout, StoreError, StoreTimeout, WireError
from ..rendezvous import Place
from ..rendezvous.host import process_is_gone
from ..rendezvous.record import decode
from ..store import PrefixStore, Store
from ..wire import Deadline
from ..wording import counted, in_seconds

_KEYS, _SESSION = "lobby", "session"
#: seconds for which one request waits; it is made again
_LOOK = 5.0
_AGAIN = b"again"
#: seconds in which the store must answer ranks that train
PATIENCE = 5.0
_LOST = (StoreError, WireError)

_Count = Annotated[int, msgspec.Meta(ge=1)]
_Seconds = Annotated[float, msgspec.Meta(gt=0)]
_Text = Annotated[str, msgspec.Meta(min_length=1, max_length=1000)]
#: an option of a backend that can be told to others
Option = str | int | float | bool | None


class _Session(msgspec.Struct, frozen=True):
    ident: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{16}$")]
    over: bool = False


class _Candidate(msgspec.Struct, frozen=True):
    """A process that waits: as of :class:`shoal.rendezvous.host.Here`."""

    machine: _Text
    process: Annotated[str, msgspec.Meta(pattern=r"^.+/[0-9]+/[^/]+$", max_length=1000)]


class Invitation(msgspec.Struct, frozen=True):
    """What a candidate needs in order to meet the ranks of the session.

    Attributes:
        meeting: its name, by which :func:`shoal.rendezvous.meet_beside` finds the others.
        rank, size: of the candidate, and of the group with it.
        epoch: of the group that invites.
        name, timeout, concurrency, backend, options: of the new group.
        within: seconds until all must have met.
    """

    meeting: _Text
    rank: _Count
    size: _Count
    epoch: Annotated[int, msgspec.Meta(ge=0)]
    name: _Text
    timeout: _Seconds
    concurrency: _Count
    backend: _Text
    options: dict[str, Option]
    within: _Seconds


class Lobby:
    """The lobby as the ranks of a session see it.

    Args:
        place: where they have met.

    Nothing here raises because the store is gone: then nobody can come.
    """

    def __init__(self, place: Place) -> None:
        self._place = place
        self._machine = place.here.machine
        self._store: Store | None = None
        #: of the session; 0: not known to this rank
        self.ident = 0
        self._lock = threading.Lock()
        self._waiting: dict[int, _Candidate] = {}
        self._invited: list[_Candidate] = []
        self._thread: threading.Thread | None = None
        self._connection: Store | None = None

    def open(self) -> None:
        """Begin a session at this place; for one rank, before the others use it."""
        with contextlib.suppress(*_LOST):
            store = self._keys()
            with contextlib.suppress(StoreTimeout):
                before = decode(store.get(_SESSION, 0.0), _Session)
                store.delete_prefix(f"{before.ident}/")
            self.ident = secrets.randbits(62)
            store.set(_SESSION, msgspec.json.encode(_Session(f"{self.ident:016x}")))

    def listen(self) -> None:
        """Look for candidates from now on; on one rank.  It may be called again."""
        if self._thread is not None:
            return
        with contextlib.suppress(*_LOST):
            if not self.ident:
                self.ident = int(decode(self._keys().get(_SESSION, 0.0), _Session).ident, 16)
            self._connection = self._keys().clone()
            self._thread = threading.Thread(
                target=self._run, args=(self._connection,), name="shoal-lobby", daemon=True
            )
            self._thread.start()

    def name_of_meeting(self, token: int) -> str:
        """The name of a meeting with candidates; its keys go when the next session begins here."""
        return f"{_KEYS}/{self.ident:016x}/meeting/{token:x}"

    @property
    def waiting(self) -> int:
        """How many candidates wait.  Cheap."""
        return len(self._waiting)

    def invite(self, most: int, compose: Callable[[int, int], Invitation]) -> int:
        """Invite candidates that live.

        Args:
            most: so many.
            compose: the invitation of the candidate with this number among so many.

        Returns:
            How many were invited.
        """
        with self._lock:
            for number in [n for n, each in self._waiting.items() if self._is_gone(each)]:
                del self._waiting[number]
            numbers = sorted(self._waiting)[:most]
            try:
                for index, number in enumerate(numbers):
                    raw = msgspec.json.encode(compose(index, len(numbers)))
                    self._keys().set(f"{self.ident:016x}/go/{number}", raw)
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

    def close(self, *, over: bool) -> None:
        """Look for candidates no more.

        Args:
            over: the session has come to its end; who still waits is told so, by the rank that listens.
        """
        listened = self._thread is not None
        if self._connection is not None:
            self._connection.close()
        if self._thread is not None:
            self._thread.join()
        if over and listened:
            with contextlib.suppress(*_LOST):
                self._keys().set(_SESSION, msgspec.json.encode(_Session(f"{self.ident:016x}", over=True)))
                for number in range(self._keys().add(f"{self.ident:016x}/arrivals", 0)):
                    self._keys().compare_set(f"{self.ident:016x}/go/{number}", b"", b"")
        if self._store is not None:
            self._store.close()
        self._thread = self._connection = self._store = None

    def _keys(self) -> Store:
        if self._store is None:
            self._store = keys_of(self._place).clone(PATIENCE)
        return self._store

    def _is_gone(self, candidate: _Candidate) -> bool:
        return candidate.machine == self._machine and process_is_gone(candidate.process)

    def _run(self, store: Store) -> None:
        number = 0
        with contextlib.suppress(*_LOST):  # the store was closed, or is gone
            while True:
                go = f"{self.ident:016x}/go/{number}"
                try:
                    raw = store.get(f"{self.ident:016x}/candidate/{number}", _LOOK)
                except StoreTimeout:
                    if store.add(f"{self.ident:016x}/arrivals", 0) <= number:
                        continue
                    store.compare_set(go, b"", _AGAIN)  # it died on the way, or stands still
                else:
                    if not store.check([go]):
                        self._add(number, raw)
                number += 1

    def _add(self, number: int, raw: bytes) -> None:
        with contextlib.suppress(StoreError), self._lock:  # what is no candidate is passed over
            self._waiting[number] = decode(raw, _Candidate)


def keys_of(place: Place) -> Store:
    """The lobby's keys."""
    return PrefixStore(_KEYS, place.store)


def await_invitation(place: Place, deadline: Deadline) -> Invitation:
    """Wait in the lobby until the ranks of the session there invite this process.

    Args:
        deadline: until when there must be a session; it may then take any time until it needs this process.

    Raises:
        SystemExit: with the exit code 0; the session has come to its end without this process.
        RendezvousTimeout: there is none.
        StoreError: the store is gone.
    """
    store = keys_of(place)
    try:
        session = decode(store.get(_SESSION, deadline.remaining()), _Session)
    except StoreTimeout:
        raise RendezvousTimeout(
            f"job {place.job!r}: within {in_seconds(deadline.timeout)} no session began here that this "
            "process (SHOAL_JOIN=1) could join"
        ) from None
    if session.over:
        raise SystemExit(0)
    me = msgspec.json.encode(_Candidate(place.here.machine, place.here.process))
    raw = _AGAIN
    while raw == _AGAIN:
        number = store.add(f"{session.ident}/arrivals", 1) - 1
        store.set(f"{session.ident}/candidate/{number}", me)
        raw = _await(store, f"{session.ident}/go/{number}")
    if not raw:
        raise SystemExit(0)
    return decode(raw, Invitation)


def _await(store: Store, key: str) -> bytes:
    while True:
        with contextlib.suppress(StoreTimeout):
            return store.get(key, _LOOK)
