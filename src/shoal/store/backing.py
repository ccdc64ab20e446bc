"""The backing of a store: the part that differs between a dictionary, a file and a server.

A :class:`~shoal.store.Store` checks arguments, turns each call into a request (``requests.py``) and
lets an :class:`RequestExecutor` execute it.  There are two ways to write one:

- A :class:`Backing` has three operations on single keys, and inherits the rest.  This is the way for
  a further store: a dictionary, a database.
- An :class:`RequestExecutor` takes whole requests.  This is the way for a store that carries requests
  elsewhere, as the TCP store does, and can block there.
"""

from __future__ import annotations

import abc
import threading
from collections.abc import Sequence
from typing import TypeVar

from ..common.copy_refusal import refuses_copies
from ..common.wording import in_seconds
from ..errors import StoreError, StoreTimeout
from ..net import Deadline
from .operations import MAX_VALUE, Operations
from .requests import StoreRequest

T = TypeVar("T")

#: seconds between two looks of a store that polls: an eighth of the time that it waited already, within these
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.0005, 0.02
#: so often a change is tried before the store pauses
_TRIES_AT_ONCE = 8


class RequestExecutor(abc.ABC):
    """Executes the requests of one :class:`~shoal.store.Store`, whose threads may do so at once.

    Attributes:
        closed: set when the store is closed, before :meth:`close` is called.
        longest_key: longest key in bytes that may be asked for; None: of any length.
        longest_value: longest value in bytes.
        host: name or address of the host that holds the data; None: unknown, or this one.
    """

    longest_key: int | None = None
    longest_value: int = MAX_VALUE
    host: str | None = None

    def __init__(self) -> None:
        self.closed = threading.Event()

    @abc.abstractmethod
    def execute(self, request: StoreRequest[T], deadline: Deadline) -> T:
        """Execute one request.

        Raises:
            KeysMissing: the request waits for keys that do not exist.  The store calls :meth:`watch`,
                and then this method again.  An executor that can block waits itself, and raises
                StoreTimeout at the deadline.
            StoreError: the data cannot be reached, or not be changed in this way.
        """

    def watch(self, keys: Sequence[str], deadline: Deadline) -> None:
        """Return when one of ``keys`` may exist, at the deadline, or when the store is closed.

        This default returns after a pause that grows with the time since the call began: the store polls.
        """
        left = deadline.remaining()
        self.closed.wait(min(max((deadline.timeout - left) / 8, _SHORTEST_PAUSE), _LONGEST_PAUSE, left))

    @abc.abstractmethod
    def clone(self, timeout: float) -> RequestExecutor:
        """Another executor of the same data, which is closed by itself; made within ``timeout`` seconds."""

    def clone_anew(self, timeout: float) -> RequestExecutor:
        """The same, of whatever data is there now: a server may have begun anew in the meantime."""
        return self.clone(timeout)

    def close(self) -> None:
        """Release all resources, and wake the threads in :meth:`execute` and :meth:`watch`.

        It is called as often as the store is closed.
        """

    def __str__(self) -> str:
        """The store's name in messages."""
        return type(self).__name__


class _Calls(threading.local):
    """The call of each thread."""

    deadline = Deadline(0.0)


@refuses_copies(
    "a backing of a store",
    "a connection, a file or memory",
    "Call clone() for another one",
)
class Backing(Operations, RequestExecutor):
    """A store of three operations, :meth:`get_now`, :meth:`swap` and :meth:`list_keys`, and :meth:`clone`.

    A subclass overrides whatever its store can do in fewer steps, and :meth:`watch` if the store
    can notify.
    """

    def __init__(self) -> None:
        super().__init__()
        self._calls = _Calls()

    def execute(self, request: StoreRequest[T], deadline: Deadline) -> T:
        """Apply the request to the three operations."""
        self._calls.deadline = deadline
        return request.apply(self)

    def refused(self, key: str, times: int) -> None:
        """Pause and try again: another client came between.  StoreTimeout when that goes on too long."""
        deadline = self._calls.deadline
        if times <= _TRIES_AT_ONCE:
            return
        if deadline.expired:
            raise StoreTimeout(
                f"key {key!r} could not be changed within {in_seconds(deadline.timeout)}: "
                f"{type(self).__name__}.swap refused {times} times, though it was given what get_now had "
                "returned.  Other clients change the key all the time, or swap does not compare as it should"
            )
        if self.closed.wait(min(_SHORTEST_PAUSE * times, _LONGEST_PAUSE, deadline.remaining())):
            raise StoreError("closed")  # the store says which
