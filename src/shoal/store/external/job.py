"""What the stores of one job on servers that are not shoal's share in a process.

A job *lives* on such servers for as long as a process keeps it alive: each that has the store open does, from
a thread of its own, and what the job has written ends :data:`OUTLIVING` seconds after the last.  A store
belongs to one life.  Another life that began under the same name is told apart, and never taken for it.

Writes go on *lines*, one at a time, and are numbered: what the server notes of a line tells whether a write
whose answer was lost has been done.
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

#: seconds that all keys outlive the last process that has the store open
OUTLIVING = 60.0
#: seconds between two calls that keep the keys alive; a third of that time
KEEPING = 20.0
#: seconds in which closing waits for such a call
_CLOSING = 2.0

_Self = TypeVar("_Self", bound="OutsideJob[WriteChannel]")


class WriteChannel:
    """Carries one write at a time.

    Attributes:
        name: where the server notes the number of its last write.
        number: of the write.
        unclear: a copy of a write of it may still be on its way.  Then no other write goes on it, and what
            the server has noted of it stays there: it keeps that copy from being done.
    """

    __slots__ = ("name", "number", "unclear")

    def __init__(self, name: str) -> None:
        self.name = name
        self.number = 0
        self.unclear = False

    def doubt(self) -> None:
        """An attempt at a write got no answer."""
        self.unclear = True


L = TypeVar("L", bound=WriteChannel)


class OutsideJob(abc.ABC, Generic[L]):
    """One life of a job, as the stores of this process share it.

    Args:
        name: of the job.
        where: the servers, for messages.

    Attributes:
        host: of the server; None: unknown.
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
        """One more store uses it."""
        with self._lock:
            self._users += 1
            if self._users == 1:
                self._keeper.start()

    def release(self) -> None:
        """One store less uses it; the last one ends it."""
        with self._lock:
            self._users -= 1
            if self._users:
                return
        self._ended.set()
        self._keeper.join(_CLOSING)
        with contextlib.suppress(StoreError, AuthenticationError):  # what is left ends by itself
            self._leave([line.name for line in self._idle], Deadline(0.0))  # it is tried once
        self.disconnect()

    @contextlib.contextmanager
    def line(self) -> Iterator[L]:
        """A line for one write, with its next number."""
        with self._lock:
            line = self._idle.pop() if self._idle else self._new_line(token_hex(12))
        line.number += 1
        yield line  # a write that ended by an error may be on its way
        if not line.unclear:
            with self._lock:
                self._idle.append(line)

    def again(self: _Self, deadline: Deadline) -> _Self:
        """The job as it lives now: this one, or if it has ended, one that began after it or begins here."""
        return self if self._lives(deadline) else self._anew(deadline)

    def gone(self) -> StoreError:
        """The error of a store whose keys have ended."""
        return StoreError(
            f"{self}: all its keys have ended, as no process of the job has kept them alive for "
            f"{in_seconds(OUTLIVING)}: this process and the others were suspended or cut off from the server"
            f"{self.other_ends}.  Start the job again"
        )

    #: further reasons for :meth:`gone`
    other_ends = ""

    def _keep(self) -> None:
        pause = KEEPING
        while not self._ended.wait(pause):
            try:
                if not self._keep_alive(Deadline(KEEPING)):
                    return  # whoever uses the store is told
                pause = KEEPING
            except (StoreError, AuthenticationError):
                pause = KEEPING / 20  # the next try may succeed, and the keys end soon

    @abc.abstractmethod
    def disconnect(self) -> None:
        """Close all connections."""

    @abc.abstractmethod
    def _new_line(self, ident: str) -> L:
        """A line that nobody has used, named after ``ident``."""

    @abc.abstractmethod
    def _keep_alive(self, deadline: Deadline) -> bool:
        """Whether the job lives; for :data:`OUTLIVING` from now on."""

    @abc.abstractmethod
    def _lives(self, deadline: Deadline) -> bool:
        """Whether this life of the job goes on."""

    @abc.abstractmethod
    def _anew(self: _Self, deadline: Deadline) -> _Self:
        """Join the life that the job has now, with connections of its own."""

    def _leave(self, lines: list[str], deadline: Deadline) -> None:
        """This process uses the job no more, and its ``lines`` neither; no more is sent after it."""
