"""The processes that wait to join a session, and their discovery and invitation by its rank 0.

Keys in the job's store::

    wanted                        number of ranks that the launcher wants, if it has written it
    session                       the job's session: its identifier, and whether it has ended or is void
    IDENT/beat                    changes every few seconds while rank 0 of the session is alive
    IDENT/arrivals                number of candidates that have registered
    IDENT/candidate/N             candidate N, which waits for the next key
    IDENT/go/N                    its invitation; "again": register again; empty: the session has ended

Rank 0 reads the candidates in a thread; after a failure the new rank 0 continues.  The thread reconnects to a
store that is not reachable, and writes the session's keys again if they are lost.  Training never waits for
the store.

Any process with the job's secret can write these keys, also one of another version or program.  Invalid
values are ignored, with one warning for each kind.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import re
import secrets
import threading
import time
from collections.abc import Callable
from typing import Annotated, NamedTuple, TypeVar

import msgspec

from ...common.formatting import counted, format_seconds
from ...common.process_identity import ProcessIdentity
from ...config import ALGORITHMS
from ...errors import (
    RendezvousError,
    RendezvousTimeout,
    ShoalError,
    StateLost,
    StoreError,
    StoreTimeout,
    WireError,
)
from ...net import Deadline
from ...rendezvous import RendezvousPoint
from ...rendezvous.records import LOBBY, WANTED, Text, decode
from ...store import PrefixStore, Store

T = TypeVar("T")

SESSION = "session"
AGAIN = b"again"
#: seconds for which one request waits before it is repeated
POLL_TIMEOUT_S = 1.0
#: seconds between two heartbeats of a session; seconds without one after which the session is lost
HEARTBEAT_INTERVAL_S, HEARTBEAT_TIMEOUT_S = 5.0, 60.0
#: seconds within which the store must answer
STORE_TIMEOUT_S = 5.0
#: seconds between two attempts to reach a store that is not reachable
MIN_RETRY_DELAY_S, MAX_RETRY_DELAY_S = 0.05, 0.5

#: largest valid rank, size or number of lanes
_MOST = 2**31
_NUMBER = re.compile(rb"0|[1-9][0-9]{0,17}")
_logger = logging.getLogger("shoal")

Count = Annotated[int, msgspec.Meta(ge=1, le=_MOST)]
_Seconds = Annotated[float, msgspec.Meta(gt=0, le=1e9)]
#: an option of a backend that can be sent to other processes
Option = str | int | float | bool | None


class SessionRecord(msgspec.Struct, frozen=True):
    """The job's session; ``over``: it has ended; ``void``: before its first step, so it may be replaced."""

    ident: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{16}\Z")]
    over: bool = False
    void: bool = False


class Invitation(msgspec.Struct, frozen=True):
    """The information that a candidate needs to connect to the ranks of the session.

    Attributes:
        meeting: name of the rendezvous, for :func:`shoal.rendezvous.rendezvous_again_at`.
        epoch: epoch of the old group; all else is of the new one.
        within: seconds within which all must be connected.
    """

    meeting: Text
    rank: Count
    size: Count
    epoch: Annotated[int, msgspec.Meta(ge=0, le=2**62)]
    name: Text
    timeout: _Seconds
    concurrency: Count
    algorithm: Text
    backend: Text
    options: dict[str, Option]
    within: _Seconds

    def __post_init__(self) -> None:
        if self.rank >= self.size:
            raise ValueError(f"rank {self.rank} of {self.size}")
        if self.algorithm not in ALGORITHMS:
            raise ValueError(f"algorithm {self.algorithm!r}")

    @property
    def verdict_key(self) -> str:
        """The key of the ranks' decision for or against the new group."""
        return f"{self.meeting}/verdict"


def open_keys(place: RendezvousPoint) -> Store:
    """Return the store of these keys over a new connection; raises StoreError or WireError."""
    return PrefixStore(LOBBY, place.store).clone(STORE_TIMEOUT_S, accept_new_data=True)


def heartbeat_key(ident: str) -> str:
    return f"{ident}/beat"


def arrivals_key(ident: str) -> str:
    return f"{ident}/arrivals"


def candidate_key(ident: str, number: int | None = None) -> str:
    """Return the key of candidate ``number``; None: the common prefix of all candidates' keys."""
    return f"{ident}/candidate/" + ("" if number is None else str(number))


def invitation_key(ident: str, number: int) -> str:
    return f"{ident}/go/{number}"


class ValueDecoder:
    """Decodes the values of the keys, or returns None for invalid ones, with one warning for each kind."""

    def __init__(self) -> None:
        self._warned: set[str] = set()

    def session(self, store: Store, timeout: float = 0.0) -> tuple[bytes, SessionRecord | None]:
        """Read the job's session, which must exist within ``timeout`` seconds; also return its raw value."""
        try:
            raw = store.get(SESSION, timeout)
        except StoreTimeout:
            return b"", None
        return raw, self.decode(SESSION, raw, SessionRecord)

    def number(self, what: str, raw: bytes | str) -> int | None:
        """Decode a count, or the number in a key."""
        text = raw if isinstance(raw, bytes) else raw.encode()
        if _NUMBER.fullmatch(text):
            return int(text)
        self.warn_ignored(what, f"{text[:40]!r} is not a number")
        return None

    def warn_ignored(self, what: str, why: object) -> None:
        """Warn, once for each ``what``, that a value is ignored."""
        if what not in self._warned:
            self._warned.add(what)
            _logger.warning("the session ignores a value of '%s' in the store: %s", what, why)

    def decode(self, what: str, raw: bytes, kind: type[T]) -> T | None:
        """Decode the value of ``what``."""
        try:
            return decode(raw, kind, what)
        except StoreError as error:
            self.warn_ignored(what, error)
            return None


class StartedSession(NamedTuple):
    """The session that this process starts."""

    ident: int


class InvitationWaiter:
    """This process as a candidate.

    Args:
        deadline: time until which there must be a session; then the wait for an invitation has no limit.  Its
            timeout also limits the wait for a store that is not reachable, the wait for the session to be
            published again after that, and, if it exceeds HEARTBEAT_TIMEOUT_S, the time without a heartbeat.
        may_start: whether this process starts a session if there has been none since it came.
    """

    def __init__(self, place: RendezvousPoint, deadline: Deadline, may_start: bool = False) -> None:
        self._place = place
        self.deadline = deadline
        self._can_start = may_start
        #: the session and its heartbeat as last read, and the time of their last change
        self._seen: tuple[bytes, bytes | None] | None = None
        self._since = 0.0
        #: identifier of a session of which this process has seen a heartbeat
        self._live_session = ""
        self._me = msgspec.json.encode(place.identity)
        self._ident = ""
        self._number: int | None = None
        self._reader = ValueDecoder()

    def await_invitation(self) -> Invitation | StartedSession:
        """Wait until the ranks of the job's session invite this process; reconnect to a lost store.

        Called again if the rendezvous after an invitation failed.

        Raises:
            SystemExit: with exit code 0; the session has ended without this process.
            RendezvousTimeout: there is no session.
            StateLost: there was a session, and its ranks are lost.  A process that may start a session does
                not start one then, as the checkpoint that it has loaded may be outdated.
            StoreError, WireError: the store is not reachable.
        """
        self.reset_heartbeat()
        pause = MIN_RETRY_DELAY_S
        while True:
            try:
                with open_keys(self._place) as store:
                    while (found := self.poll(store)) is None:
                        pause = MIN_RETRY_DELAY_S
                    return found
            except (StoreError, WireError):
                self.reset_heartbeat()
                if self.deadline.expired:
                    raise
            time.sleep(pause)
            pause = min(2 * pause, MAX_RETRY_DELAY_S)

    def poll(self, store: Store) -> Invitation | StartedSession | None:
        """Find the session, register as a candidate, and wait up to POLL_TIMEOUT_S for the invitation."""
        timeout = 0.0 if self._can_start else min(self.deadline.remaining(), POLL_TIMEOUT_S)
        raw, session = self._reader.session(store, timeout)
        if session is not None and session.void:
            self._live_session = self._ident = ""
        if self._can_start:
            is_over = session is not None and (
                session.void or (session.over and session.ident not in (self._live_session, self._ident))
            )
            if is_over or self._may_start(store, raw, session):
                return self._start_session(store, raw)
        if session is None or session.void:
            if self.deadline.expired:
                raise RendezvousTimeout(
                    f"job {self._place.job!r}: within {format_seconds(self.deadline.timeout)} no session "
                    "began here that this process (SHOAL_JOIN=1) could join"
                )
            time.sleep(MIN_RETRY_DELAY_S)  # the session writes it again
            return None
        if session.over:
            raise SystemExit(0)
        if not self._can_start and self._seconds_since_heartbeat(store, raw, session) >= max(
            HEARTBEAT_TIMEOUT_S, self.deadline.timeout
        ):
            raise self._lost()
        self.deadline = Deadline(self.deadline.timeout)
        self._ident = session.ident
        if not self._is_registered(store):
            number = store.add(arrivals_key(self._ident), 1) - 1
            # If the key has another value, the session has already read it, and does not read it again.
            if store.compare_set(candidate_key(self._ident, number), b"", self._me) != self._me:
                return None
            self._number = number
        assert self._number is not None
        try:
            raw = store.get(invitation_key(self._ident, self._number), POLL_TIMEOUT_S)
        except StoreTimeout:
            return None
        self._number = None  # the next response has another number
        return self._reader.decode("go", raw, Invitation) if raw not in (AGAIN, b"") else None

    def reset_heartbeat(self) -> None:
        """Discard the last heartbeat, as the store was not reachable since."""
        self._seen = None

    def _may_start(self, store: Store, raw: bytes, session: SessionRecord | None) -> bool:
        """Whether no session is running; raises StateLost if the one that this process waited for is lost."""
        silence = self._seconds_since_heartbeat(store, raw, session)
        # A running session publishes itself again in a restarted store, so a known one gets more time.
        known = bool(raw or self._live_session or self._ident)
        if silence < (HEARTBEAT_TIMEOUT_S if known else 2 * MAX_RETRY_DELAY_S):
            return False
        if self._live_session or (self._ident and not raw):
            raise self._lost()
        return True

    def _seconds_since_heartbeat(self, store: Store, raw: bytes, session: SessionRecord | None) -> float:
        """Return the seconds since the last heartbeat of the session, or since this process came."""
        beat = None if session is None else store.peek([heartbeat_key(session.ident)])[0]
        now = time.monotonic()
        if self._seen is None or self._seen != (raw, beat):
            if self._seen is not None and session is not None:
                self._live_session = session.ident
            self._seen, self._since = (raw, beat), now
        return now - self._since

    def _lost(self) -> StateLost:
        silence = format_seconds(
            HEARTBEAT_TIMEOUT_S if self._can_start else max(HEARTBEAT_TIMEOUT_S, self.deadline.timeout)
        )
        joins, again = "1", "all ranks again, from"
        if self._can_start:
            joins, again = "auto", "this process again: it then begins a session with"
        return StateLost(
            f"job {self._place.job!r}: the session that this process (SHOAL_JOIN={joins}) waited for has "
            f"given no sign of life for {silence}.  Start {again} the newest checkpoint"
        )

    def _start_session(self, store: Store, before: bytes) -> StartedSession | None:
        """Start a session, replacing the value ``before``; None: another process has started one."""
        ident = secrets.randbits(62)
        mine = msgspec.json.encode(SessionRecord(f"{ident:016x}"))
        if store.compare_set(SESSION, before, mine) != mine:
            return None
        if before and (session := self._reader.decode(SESSION, before, SessionRecord)) is not None:
            store.delete_prefix(f"{session.ident}/")
        return StartedSession(ident)

    def _is_registered(self, store: Store) -> bool:
        """Whether this process is registered; a restarted store has lost the registration."""
        if self._number is not None and store.peek([candidate_key(self._ident, self._number)]) != [self._me]:
            self._number = None
        return self._number is not None


_LOST = (StoreError, WireError)


class CandidateRegistry:
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
        self._wanted_raw = b""
        self.ident = 0
        #: whether this rank starts the session, and has not published it yet
        self._begins = False
        self._reader = ValueDecoder()
        self._lock = threading.Lock()
        self._waiting: dict[int, ProcessIdentity] = {}
        self._invited: list[ProcessIdentity] = []
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()
        #: the thread's connection, while the store is reachable
        self._store: Store | None = None

    def open(self) -> None:
        """Start and publish a session; called by one rank, before others use it."""
        self.ident = secrets.randbits(62)
        self._begins = True
        with contextlib.suppress(*_LOST), open_keys(self._place) as store:
            self._announce(store)

    def start(self) -> None:
        """Start to look for candidates, on rank 0; later calls have no effect."""
        if self._thread is None:
            self._closing.clear()
            self._thread = threading.Thread(target=self._run, name="shoal-candidates", daemon=True)
            self._thread.start()

    def rendezvous_name(self, token: int) -> str:
        """Return the name of a rendezvous; its keys are deleted when the next session of the job starts."""
        return f"{LOBBY}/{self._name}/meeting/{token:x}"

    @property
    def waiting(self) -> int:
        """Number of candidates, without access to the store."""
        return len(self._waiting)

    def refresh_wanted(self) -> None:
        """Update ``wanted`` from the store."""
        if (store := self._store) is not None:
            with contextlib.suppress(*_LOST):
                self._refresh_wanted(store)

    def invite(self, max_count: int, make_invitation: Callable[[int, int], Invitation]) -> int:
        """Invite at most ``max_count`` candidates whose processes are alive, and return their number.

        ``make_invitation`` returns an invitation, given the index and the number of the candidates.
        """
        with self._lock:
            store = self._store
            for number in [n for n, each in self._waiting.items() if each.is_dead()]:
                del self._waiting[number]
            if store is None:
                return 0
            numbers = sorted(self._waiting)[:max_count]
            try:
                for index, number in enumerate(numbers):
                    store.set(
                        invitation_key(self._name, number),
                        msgspec.json.encode(make_invitation(index, len(numbers))),
                    )
            except _LOST:
                self._waiting.clear()  # so that the next step does not wait for the store again
                return 0
            self._invited = [self._waiting.pop(number) for number in numbers]
        return len(numbers)

    def check_invited_alive(self) -> None:
        """Raise RendezvousError if one of the candidates invited last has died."""
        if gone := sum(each.is_dead() for each in self._invited):
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
            with contextlib.suppress(*_LOST), open_keys(self._place) as store:
                found, session = self._reader.session(store)
                if session is not None and not self.ident and not (session.over or session.void):
                    self.ident = int(session.ident, 16)  # the thread had not read it yet
                if session is None or session.ident == self._name:  # another session may have replaced it
                    ended = SessionRecord(self._name, over=over, void=void)
                    store.compare_set(SESSION, found, msgspec.json.encode(ended))
                for number in self._numbers(store):
                    store.compare_set(invitation_key(self._name, number), b"", b"")

    @property
    def _name(self) -> str:
        return f"{self.ident:016x}"

    # -- the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        pause, warned = MIN_RETRY_DELAY_S, False
        while not self._closing.is_set():
            try:
                with open_keys(self._place) as store:
                    self._announce(store)
                    with self._lock:
                        if self._closing.is_set():
                            return
                        self._store = store
                    pause, warned = MIN_RETRY_DELAY_S, False
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
            pause = min(2 * pause, MAX_RETRY_DELAY_S)

    def _serve(self, store: Store) -> None:
        """Find candidates, until the store is closed or not reachable."""
        #: numbers of candidates that were read, and of candidates whose key is overdue
        seen: set[int] = set()
        late: set[int] = set()
        beaten = -HEARTBEAT_INTERVAL_S
        while True:
            self._announce(store)
            if (now := time.monotonic()) >= beaten + HEARTBEAT_INTERVAL_S:
                store.set(heartbeat_key(self._name), secrets.token_hex(4))
                beaten = now
            self._refresh_wanted(store)
            for number in self._numbers(store):
                if number not in seen:
                    seen.add(number)
                    self._read(store, number)
            awaited = next(each for each in itertools.count() if each not in seen and each not in late)
            try:
                store.wait([candidate_key(self._name, awaited)], POLL_TIMEOUT_S)
            except StoreTimeout:
                if self._arrivals(store, seen) > awaited:
                    late.add(awaited)  # it died before it wrote, or hangs

    def _announce(self, store: Store) -> None:
        """Publish the session, also in a store that was restarted or holds invalid values."""
        found, session = self._reader.session(store)
        if self._begins:
            if session is not None:
                store.delete_prefix(f"{session.ident}/")
            store.set(SESSION, msgspec.json.encode(SessionRecord(self._name)))
            self._begins = False
        elif session is None or session.over or session.void:
            self.ident = self.ident or secrets.randbits(62)
            store.compare_set(SESSION, found, msgspec.json.encode(SessionRecord(self._name)))
        elif not self.ident:
            self.ident = int(session.ident, 16)
        elif session.ident != self._name:
            self._reader.warn_ignored(
                "session",
                "another session was started when this one had not been seen for a minute; no process can "
                "join this one any more, and both are training: end one of them",
            )

    def _refresh_wanted(self, store: Store) -> None:
        if self.wanted is None:
            return
        (said,) = store.peek([WANTED])
        if said is None:
            if self._wanted_raw:
                store.compare_set(WANTED, b"", self._wanted_raw)  # lost with the store
        elif (wanted := self._reader.decode(WANTED, said, Count)) is not None:
            self.wanted, self._wanted_raw = wanted, said

    def _numbers(self, store: Store) -> list[int]:
        """Return the numbers of the candidates in the store."""
        start = candidate_key(self._name)
        found = (self._reader.number("candidate", key[len(start) :]) for key in store.list_keys(start))
        return sorted(number for number in found if number is not None)

    def _arrivals(self, store: Store, seen: set[int]) -> int:
        """Return the number of registered candidates; repair an invalid count, which blocks all others."""
        (raw,) = store.peek([key := arrivals_key(self._name)])
        if raw is None:
            return 0
        count = self._reader.number("arrivals", raw)
        if count is None:
            count = max(seen, default=-1) + 1
            store.compare_set(key, raw, str(count))
        return count

    def _read(self, store: Store, number: int) -> None:
        raw, invitation = store.peek([candidate_key(self._name, number), invitation_key(self._name, number)])
        if raw is None or invitation is not None:
            return  # deleted, or invited already
        candidate = self._reader.decode("candidate", raw, ProcessIdentity)
        if candidate is None:
            return
        with self._lock:
            for other in [n for n, each in self._waiting.items() if each.process == candidate.process]:
                del self._waiting[other]  # the process has registered again
            self._waiting[number] = candidate
