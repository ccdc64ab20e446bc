"""The backing of a store: the part that depends on where the data is (a dictionary, a file or a server).

A :class:`~shoal.store.Store` checks arguments, turns each call into a request (``requests.py``) and passes
it to a :class:`RequestExecutor`. There are two ways to write one:

- A :class:`Backing` implements three operations on single keys and inherits the rest. Use it for a further
  kind of store, such as a dictionary or a database.
- A :class:`RequestExecutor` receives whole requests. Use it for a store that sends requests elsewhere and can
  block there, as the TCP store does.
"""

from __future__ import annotations

import abc
import random
import threading
from collections.abc import Sequence
from typing import TypeVar

from ..common.copy_refusal import refuses_copies
from ..common.formatting import format_seconds
from ..errors import StoreError, StoreTimeout
from ..net import Deadline
from .requests import MAX_VALUE, Operations, StoreRequest

T = TypeVar("T")

#: limits in seconds of the pause between two polls, which is an eighth of the time waited so far
_MIN_POLL_INTERVAL_S, _MAX_POLL_INTERVAL_S = 0.0005, 0.02
#: limit in seconds of the pause between two attempts to reach a server
_MAX_BACKOFF_S = 0.5
#: number of attempts at a change before the store pauses between them
_IMMEDIATE_ATTEMPTS = 8


class RequestExecutor(abc.ABC):
    """Executes the requests of one :class:`~shoal.store.Store`, from several threads at once.

    Attributes:
        closed: set when the store is closed, before :meth:`close` is called.
        longest_key: longest permitted key in bytes; None: unlimited.
        longest_value: longest permitted value in bytes.
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
            KeysMissing: the request waits for keys that do not exist. The store calls :meth:`watch` and then
                this method again. An executor that can block waits itself instead, and raises StoreTimeout
                at the deadline.
            StoreError: the data cannot be reached, or cannot be changed in this way.
        """

    def watch(self, keys: Sequence[str], deadline: Deadline) -> None:
        """Return when one of ``keys`` may exist, at the deadline, or when the store is closed.

        This default makes the store poll: it returns after a pause that grows with the time waited so far.
        """
        left = deadline.remaining()
        self.closed.wait(
            min(max((deadline.timeout - left) / 8, _MIN_POLL_INTERVAL_S), _MAX_POLL_INTERVAL_S, left)
        )

    @abc.abstractmethod
    def clone(self, timeout: float) -> RequestExecutor:
        """Return another executor of the same data, to be closed separately, within ``timeout`` seconds."""

    def clone_accepting_new_data(self, timeout: float) -> RequestExecutor:
        """Like :meth:`clone`, but accept other data: the server may have restarted empty meanwhile."""
        return self.clone(timeout)

    def close(self) -> None:
        """Release all resources and wake the threads in :meth:`execute` and :meth:`watch`.

        Called once for each time that the store is closed.
        """

    def __str__(self) -> str:
        """Return the store's name for messages."""
        return type(self).__name__


class Backoff:
    """The pauses between attempts to reach a server: random, and doubled each time.

    Args:
        closed: set when the attempts must end.
        shortest: seconds of the first pause, before randomization.
    """

    def __init__(self, closed: threading.Event, shortest: float = 0.01) -> None:
        self._closed = closed
        self.seconds = shortest

    def pause(self, limit: float) -> None:
        """Wait, for at most ``limit`` seconds. StoreError if the store is closed meanwhile."""
        if self._closed.wait(min(self.seconds * random.uniform(0.5, 1.0), limit)):
            raise StoreError("closed")  # Store replaces the message
        self.seconds = min(2 * self.seconds, _MAX_BACKOFF_S)


class _Calls(threading.local):
    deadline = Deadline(0.0)


@refuses_copies("a backing of a store", "a connection, a file or memory", "Call clone() for another one")
class Backing(Operations, RequestExecutor):
    """A store that is defined by :meth:`get_now`, :meth:`swap`, :meth:`list_keys` and :meth:`clone`.

    A subclass overrides operations that its store can do in fewer steps, and :meth:`watch` if the store can
    notify.
    """

    def __init__(self) -> None:
        super().__init__()
        self._calls = _Calls()

    def execute(self, request: StoreRequest[T], deadline: Deadline) -> T:
        """Execute the request by the three operations."""
        self._calls.deadline = deadline
        return request.apply(self)

    def swap_failed(self, key: str, times: int) -> None:
        """Pause after a failed :meth:`swap`, except the first few times. StoreTimeout at the deadline."""
        deadline = self._calls.deadline
        if times <= _IMMEDIATE_ATTEMPTS:
            return
        if deadline.expired:
            raise StoreTimeout(
                f"key {key!r} could not be changed within {format_seconds(deadline.timeout)}: "
                f"{type(self).__name__}.swap returned False {times} times for the value that get_now had "
                "just returned. Either other clients change the key constantly, or swap compares incorrectly"
            )
        if self.closed.wait(min(_MIN_POLL_INTERVAL_S * times, _MAX_POLL_INTERVAL_S, deadline.remaining())):
            raise StoreError("closed")  # Store replaces the message
