"""The state that the stores of one job on external servers (Redis or etcd) share in a process.

Each process that has a store open keeps the job's keys alive from a background thread; they expire
:data:`KEY_TTL_S` seconds after the last call. The time from the creation of the keys to their expiry is a
*life* of the job. A store belongs to one life and never confuses it with a later one of the same name.

Writes are sent on *write channels*, one at a time, and are numbered. The server stores the number of each
channel's last write, which shows whether a write without an answer was executed.
"""

from __future__ import annotations

import abc
import contextlib
import threading
from collections.abc import Iterator
from secrets import token_hex
from typing import Generic, TypeVar

from ...common.wording import in_seconds
from ...errors import AuthenticationError, StoreError
from ...net import Deadline

#: seconds for which all keys outlive the last process that has the store open
KEY_TTL_S = 60.0
#: seconds between two keep-alive calls: a third of KEY_TTL_S
KEEP_ALIVE_INTERVAL_S = 20.0
#: seconds for which closing waits for a keep-alive call
CLOSE_TIMEOUT_S = 2.0

_Self = TypeVar("_Self", bound="OutsideJob[WriteChannel]")


class WriteChannel:
    """A sequence of numbered writes, sent one at a time.

    Attributes:
        name: under which the server stores the number of the last write.
        number: of the last write.
        unclear: a copy of a write may still be in transit. The channel is then not used again, and its
            number stays on the server, which keeps the copy from being executed.
    """

    __slots__ = ("name", "number", "unclear")

    def __init__(self, name: str) -> None:
        self.name = name
        self.number = 0
        self.unclear = False

    def doubt(self) -> None:
        """Record that an attempt at a write got no answer."""
        self.unclear = True


L = TypeVar("L", bound=WriteChannel)


class OutsideJob(abc.ABC, Generic[L]):
    """One life of a job, shared by the stores of this process.

    ``name`` is that of the job; ``where`` names the servers in messages; ``host`` may be unknown (None).
    """

    host: str | None = None

    def __init__(self, name: str, where: str) -> None:
        self.name = name
        self._where = where
        self._lock = threading.Lock()
        self._idle: list[L] = []
        self._users = 0
        self._ended = threading.Event()
        self._keeper = threading.Thread(target=self._keep, name="shoal-store-keeper", daemon=True)

    def __str__(self) -> str:
        return f"{self._where}, job {self.name!r}"

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
        self._ended.set()
        self._keeper.join(CLOSE_TIMEOUT_S)
        with contextlib.suppress(StoreError, AuthenticationError):  # the keys then expire
            self._leave([line.name for line in self._idle], Deadline(0.0))  # one attempt
        self.disconnect()

    @contextlib.contextmanager
    def line(self) -> Iterator[L]:
        """Yield a channel for one write, with its next number."""
        with self._lock:
            line = self._idle.pop() if self._idle else self._new_line(token_hex(12))
        line.number += 1
        yield line  # after an error the write may be in transit: the channel is not used again
        if not line.unclear:
            with self._lock:
                self._idle.append(line)

    def again(self: _Self, deadline: Deadline) -> _Self:
        """Return the current life of the job: this one, or a later or new one if this one has ended."""
        return self if self._lives(deadline) else self._anew(deadline)

    def gone(self) -> StoreError:
        """Return the error of a store whose keys have expired."""
        return StoreError(
            f"{self}: all its keys have expired, because no process of the job has kept them alive for "
            f"{in_seconds(KEY_TTL_S)}: this process and the others were suspended or cut off from the server"
            f"{self.other_ends}.  Start the job again"
        )

    #: further reasons, for the message of :meth:`gone`
    other_ends = ""

    def _keep(self) -> None:
        pause = KEEP_ALIVE_INTERVAL_S
        while not self._ended.wait(pause):
            try:
                if not self._keep_alive(Deadline(KEEP_ALIVE_INTERVAL_S)):
                    return  # the next call of a store raises the error
                pause = KEEP_ALIVE_INTERVAL_S
            except (StoreError, AuthenticationError):
                pause = KEEP_ALIVE_INTERVAL_S / 20  # retry soon: the keys will expire

    @abc.abstractmethod
    def disconnect(self) -> None:
        """Close all connections."""

    @abc.abstractmethod
    def _new_line(self, ident: str) -> L:
        """Return an unused channel, named after ``ident``."""

    @abc.abstractmethod
    def _keep_alive(self, deadline: Deadline) -> bool:
        """Extend the life of the job to :data:`KEY_TTL_S` seconds from now; False: it has ended."""

    @abc.abstractmethod
    def _lives(self, deadline: Deadline) -> bool:
        """Return whether this life of the job still exists."""

    @abc.abstractmethod
    def _anew(self: _Self, deadline: Deadline) -> _Self:
        """Join the current life of the job, with new connections."""

    def _leave(self, lines: list[str], deadline: Deadline) -> None:
        """Remove this process and its ``lines`` from the job; it sends nothing afterwards."""
