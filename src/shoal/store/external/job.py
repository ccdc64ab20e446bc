"""The common part of the stores in Redis and etcd: the state of a job, and the backing of its stores.

Each process that has a store open keeps the job's keys alive from a background thread; they expire
:data:`KEY_TTL_S` seconds after the last call. The time from the creation of the keys to their expiry is a
*life* of the job. A store belongs to one life and never confuses it with a later one of the same name.

Writes are sent on *write channels*, one at a time, and are numbered. The server stores the number of each
channel's last write, which shows whether a write without an answer was executed.
"""

from __future__ import annotations

import abc
import contextlib
import random
import threading
from collections.abc import Iterator, Sequence
from secrets import token_hex
from typing import Any, Generic, Protocol, TypeVar

from ...common.formatting import format_seconds
from ...errors import AuthenticationError, StoreError, StoreTimeout
from ...net import Deadline
from ..backing import Backing
from ..base import timed_out
from ..requests import Blocking, StoreRequest

#: seconds for which all keys outlive the last process that has the store open
KEY_TTL_S = 60.0
#: seconds between two keep-alive calls: a third of KEY_TTL_S
KEEP_ALIVE_INTERVAL_S = 20.0
#: seconds for which closing waits for a keep-alive call
CLOSE_TIMEOUT_S = 2.0
#: seconds without an event after which a watch ends and the store reads again: its server may be cut off
WATCH_TIMEOUT_S = 5.0
#: limits in seconds of the pause between two attempts at a change, or between a broken watch and a read
_MIN_RETRY_DELAY_S, _MAX_RETRY_DELAY_S = 0.001, 0.1

T = TypeVar("T")
_Client = TypeVar("_Client", bound="ServerClient")
_Self = TypeVar("_Self", bound="ExternalJob[Any, Any]")
_SelfBacking = TypeVar("_SelfBacking", bound="ExternalBacking[Any]")


class ServerClient(Protocol):
    """Connections to the servers; its text names them in messages."""

    def clone(self: _Client) -> _Client:
        """Return another client of the same servers, to be closed separately."""

    def close(self) -> None:
        """Close all connections."""


class CancellableWait(Protocol):
    """A wait that another thread can cancel."""

    def shutdown(self) -> None:
        """End the wait, from another thread."""


class WriteChannel:
    """A sequence of numbered writes, sent one at a time.

    Attributes:
        name: under which the server stores the number of the last write.
        number: of the last write.
        may_be_in_transit: a copy of a write may still be executed. The channel is then not used again, and
            its number stays on the server, which keeps the copy from being executed.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.number = 0
        self.may_be_in_transit = False

    def mark_unclear(self) -> None:
        """Record that an attempt at a write got no answer."""
        self.may_be_in_transit = True


ClientT = TypeVar("ClientT", bound=ServerClient)
ChannelT = TypeVar("ChannelT", bound=WriteChannel)


class ExternalJob(abc.ABC, Generic[ClientT, ChannelT]):
    """One life of a job, shared by the stores of this process.

    Args:
        client: owned by the job.
        name: of the job.
    """

    #: name or address of the server; None: unknown
    host: str | None = None
    #: further reasons for the end of a life, for the message of :meth:`expired_error`
    other_reasons = ""

    def __init__(self, client: ClientT, name: str, deadline: Deadline) -> None:
        self.client = client
        self.name = name
        self._lock = threading.Lock()
        self._idle: list[ChannelT] = []
        self._users = 0
        self._closing = threading.Event()
        self._keeper = threading.Thread(target=self._keep, name="shoal-store-keeper", daemon=True)
        try:
            self._join(deadline)
        except BaseException:
            client.close()
            raise

    def __str__(self) -> str:
        return f"{self.client}, job {self.name!r}"

    def acquire(self) -> None:
        """Add a user; the first one starts the keep-alive thread."""
        with self._lock:
            self._users += 1
            if self._users == 1:
                self._keeper.start()

    def release(self) -> None:
        """Remove a user; the last one leaves the job and closes the connections."""
        with self._lock:
            self._users -= 1
            if self._users:
                return
        self._closing.set()
        self._keeper.join(CLOSE_TIMEOUT_S)
        with contextlib.suppress(StoreError, AuthenticationError):  # the keys then expire
            self._leave([channel.name for channel in self._idle], Deadline(0.0))  # one attempt
        self.client.close()

    @contextlib.contextmanager
    def channel(self) -> Iterator[ChannelT]:
        """Yield a channel for one write, with its next number."""
        with self._lock:
            channel = self._idle.pop() if self._idle else self._new_channel(token_hex(12))
        channel.number += 1
        yield channel  # after an error the write may be in transit: the channel is not used again
        if not channel.may_be_in_transit:
            with self._lock:
                self._idle.append(channel)

    def current(self: _Self, deadline: Deadline) -> _Self:
        """Return the current life of the job: this one, or a later or new one if this one has ended."""
        return self if self._exists(deadline) else type(self)(self.client.clone(), self.name, deadline)

    def expired_error(self) -> StoreError:
        """Return the error of a store whose keys have expired."""
        return StoreError(
            f"{self}: all its keys have expired, because no process of the job has kept them alive for "
            f"{format_seconds(KEY_TTL_S)}: this process and the others were suspended or cut off from the "
            f"server{self.other_reasons}.  Start the job again"
        )

    def _keep(self) -> None:
        pause = KEEP_ALIVE_INTERVAL_S
        while not self._closing.wait(pause):
            try:
                if not self._keep_alive(Deadline(KEEP_ALIVE_INTERVAL_S)):
                    return  # the next call of a store raises the error
                pause = KEEP_ALIVE_INTERVAL_S
            except (StoreError, AuthenticationError):
                pause = KEEP_ALIVE_INTERVAL_S / 20  # retry soon: the keys will expire

    @abc.abstractmethod
    def _join(self, deadline: Deadline) -> None:
        """Join the current life of the job; begin one if there is none."""

    @abc.abstractmethod
    def _new_channel(self, ident: str) -> ChannelT:
        """Return an unused channel, named after ``ident``."""

    @abc.abstractmethod
    def _keep_alive(self, deadline: Deadline) -> bool:
        """Extend the life of the job to :data:`KEY_TTL_S` seconds from now; False: it has ended."""

    def _exists(self, deadline: Deadline) -> bool:
        """Return whether this life of the job still exists."""
        return self._keep_alive(deadline)

    def _leave(self, channels: list[str], deadline: Deadline) -> None:
        """Remove this process and its ``channels`` from the job; it sends nothing afterwards."""


JobT = TypeVar("JobT", bound=ExternalJob[Any, Any])


class ExternalBacking(Backing, Generic[JobT]):
    """A backing that shares its job with its clones."""

    def __init__(self, job: JobT) -> None:
        super().__init__()
        self.job = job
        self.host = job.host
        self._lock = threading.Lock()
        self._streams: set[CancellableWait] = set()
        self._released = False
        job.acquire()

    def __str__(self) -> str:
        return f"store in {self.job}"

    def clone(self: _SelfBacking, timeout: float) -> _SelfBacking:
        return type(self)(self.job)

    def clone_accepting_new_data(self: _SelfBacking, timeout: float) -> _SelfBacking:
        return type(self)(self.job.current(Deadline(timeout)))

    def close(self) -> None:
        with self._lock:
            for stream in self._streams:
                stream.shutdown()
            released, self._released = self._released, True
        if not released:
            self.job.release()

    def get_now(self, key: str) -> bytes | None:
        return self.get_many([key])[0]

    def set(self, key: str, value: bytes) -> None:
        self.set_many([(key, value)])

    def execute(self, request: StoreRequest[T], deadline: Deadline) -> T:
        try:
            return super().execute(request, deadline)
        except AuthenticationError as error:  # access has changed since the store was opened
            raise StoreError(str(error)) from error
        except StoreTimeout as error:
            if isinstance(request, Blocking):
                missing = timed_out(request.keys, deadline.timeout)
                raise StoreTimeout(f"{missing} (as far as known: {error})") from None
            raise

    def swap_failed(self, key: str, times: int) -> None:
        deadline = self._calls.deadline
        if deadline.expired:
            raise StoreTimeout(
                f"key {key!r} could not be changed within {format_seconds(deadline.timeout)}: other clients "
                f"have changed it {times} times meanwhile"
            )
        if self._paused(deadline, times):
            raise StoreError("closed")  # Store replaces the message

    @contextlib.contextmanager
    def _watching(self, stream: CancellableWait) -> Iterator[bool]:
        """Let :meth:`close` end the wait on ``stream``; yield False if the store is closed already."""
        with self._lock:
            if not self.closed.is_set():
                self._streams.add(stream)
        try:
            yield not self.closed.is_set()
        finally:
            with self._lock:
                self._streams.discard(stream)

    def _paused(self, deadline: Deadline, times: int = 4) -> bool:
        """Pause for a moment; return whether the store was closed meanwhile."""
        longest = min(_MIN_RETRY_DELAY_S * 2 ** min(times, 10), _MAX_RETRY_DELAY_S)
        return self.closed.wait(min(random.uniform(0, longest), deadline.remaining()))


def parts(keys: Sequence[str], most: int, longest: int) -> Iterator[Sequence[str]]:
    """Yield ``keys`` in parts of at most ``most`` keys and ``longest`` bytes, at least one key each."""
    part: list[str] = []
    length = 0
    for key in keys:
        size = len(key.encode())
        if part and (len(part) == most or length + size > longest):
            yield part
            part, length = [], 0
        part.append(key)
        length += size
    if part:
        yield part
