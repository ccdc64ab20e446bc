"""The part of an external store's client that does not depend on the kind of server (Redis or etcd)."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Iterator, Sequence
from typing import Any, Generic, Protocol, TypeVar

from ...common.wording import in_seconds
from ...errors import AuthenticationError, StoreError, StoreTimeout
from ...net import Deadline
from ..backing import Backing
from ..base import timed_out
from ..requests import Blocking, StoreRequest
from .job import OutsideJob

T = TypeVar("T")
J = TypeVar("J", bound=OutsideJob[Any])
_Self = TypeVar("_Self", bound="OutsideClient[Any]")

#: seconds without an event after which a watch ends and the store reads again: its server may be cut off
SILENCE = 5.0
#: limits in seconds of the pause between two attempts at a change, or between a broken watch and a read
_MIN_RETRY_DELAY_S, _MAX_RETRY_DELAY_S = 0.001, 0.1


class CancellableWait(Protocol):
    """A wait that another thread can cancel."""

    def shutdown(self) -> None:
        """End the wait, from another thread."""


class OutsideClient(Backing, Generic[J]):
    """A backing that shares its job with its clones."""

    def __init__(self, job: J) -> None:
        super().__init__()
        self.job = job
        self.host = job.host
        self._lock = threading.Lock()
        self._streams: set[CancellableWait] = set()
        self._released = False
        job.acquire()

    def __str__(self) -> str:
        return f"store in {self.job}"

    def clone(self: _Self, timeout: float) -> _Self:
        return type(self)(self.job)

    def clone_accepting_new_data(self: _Self, timeout: float) -> _Self:
        return type(self)(self.job.again(Deadline(timeout)))

    def close(self) -> None:
        with self._lock:
            for stream in self._streams:
                stream.shutdown()
            released, self._released = self._released, True
        if not released:
            self.job.release()

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

    def refused(self, key: str, times: int) -> None:
        deadline = self._calls.deadline
        if deadline.expired:
            raise StoreTimeout(
                f"key {key!r} could not be changed within {in_seconds(deadline.timeout)}: other clients have "
                f"changed it {times} times meanwhile"
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
