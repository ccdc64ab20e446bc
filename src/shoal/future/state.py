"""The state of a future, and its completion exactly once by one of several threads.

Any number of threads may find a source complete at the same time.  Each appends a new list, its claim, to the
future's claims, and the first claim wins: only its thread runs ``finish`` and publishes the outcome.  This
takes no lock, which would cost more than the rest.  It relies only on list appends and on reads and writes of
attributes being atomic.

Subscribers are queued and called under one lock, which all futures and the callback pool share.  Publishing
writes the state and then reads the subscribers; subscribing writes the subscribers and then reads the state;
so at least one of the two sees the other.  The flight recorder's list is set in the same way.  Subscribers
are internal and run on the completing thread, so they only wake or enqueue.  Users' callbacks run in
:mod:`shoal.future.pool`.

Ctrl-C may interrupt the main thread between any two steps.  A thread of the pool then resumes with the
interrupted thread's claim, so each step must be repeatable.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from functools import partial
from itertools import starmap
from time import monotonic_ns
from typing import Any, Generic, NoReturn, Protocol, TypeVar, cast

from .. import _core
from ..common.copy_refusal import refuses_copies
from ..common.formatting import describe_error
from ..errors import InvalidFutureState, UsageError
from ..streams import DeviceEvents, completion_events
from .pool import pool

T = TypeVar("T")

_logger = logging.getLogger("shoal")

#: The argument lists of one call without arguments.
_NO_ARGUMENTS: tuple[tuple[()], ...] = ((),)

#: Seconds for which a source blocks at a time, without the GIL.  Ctrl-C is handled in between.
WAIT_SLICE_S = 0.1


class FutureSource(Protocol):
    """The operation that completes a future.  All methods may be called from any thread.

    Three more methods are optional:

    - ``cancel() -> bool``: cancel the operation if possible; return whether it will fail as cancelled.
    - ``events() -> tuple[DeviceEvents | None, object]``, for a source that represents another future: the
      events after which that future's value is usable, and its tensors.  Called only after completion.
    - ``ended() -> int``: when it was complete, in nanoseconds of CLOCK_MONOTONIC.  Called only then.
    """

    def wait(self, timeout: float | None) -> bool:
        """Block without the GIL until the operation is complete; False after ``timeout`` s (or earlier)."""

    def done(self) -> bool:
        """Whether the operation is complete.  Never blocks."""

    def exception(self) -> BaseException | None:
        """The operation's error, or None.  Called only after completion."""

    def notify(self, fn: Callable[[], None]) -> None:
        """Call ``fn()`` once when the operation is complete (at once if it is), then drop ``fn``.

        ``fn`` is quick and does not raise.  The calling thread must not be one that users wait for.
        """


class Latch:
    """Like ``threading.Event``, but ``wait`` is a single C call.

    Ctrl-C inside ``wait`` of ``threading.Event`` or ``Condition`` can raise RuntimeError, because the lock
    that they released is then not held.
    """

    __slots__ = ("_is_set", "_lock")

    def __init__(self) -> None:
        self._is_set = False
        self._lock = threading.Lock()
        self._lock.acquire()

    def set(self, *_: object) -> None:
        """Wake all waiting threads; later waits return at once.  Can be used as a subscriber of a future."""
        self._is_set = True
        with contextlib.suppress(RuntimeError):  # already set
            self._lock.release()

    def clear(self) -> None:
        """Make later waits block until the next :meth:`set`.  No thread may be waiting."""
        self._is_set = False
        self._lock.acquire(blocking=False)

    def is_set(self) -> bool:
        """Whether :meth:`wait` would return at once."""
        return self._is_set

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the latch is set, for at most ``timeout`` seconds; return whether it is set."""
        if not self._is_set:
            seconds = -1 if timeout is None else max(0.0, min(timeout, threading.TIMEOUT_MAX))
            if self._lock.acquire(timeout=seconds):
                self.set()  # for the next waiting thread
        return self._is_set


@refuses_copies("a future", "an operation in progress", "Wait for it and copy its value")
class FutureState(_core.FutureFields, Generic[T]):
    """The private base of :class:`~shoal.Future`, with the same arguments."""

    __slots__ = ("__weakref__",)  # the core has the other fields

    _value: T

    def __init__(
        self,
        source: FutureSource | None = None,
        *,
        finish: Callable[[], T] | None = None,
        value: T | None = None,
        key: int | None = None,
        keep: object = None,
        device: DeviceEvents | None = None,
    ) -> None:
        self._source = source
        self._finish = finish
        self._value = cast(T, value)
        self.key = key
        self._keep = keep
        self._device = device

    # -- waiting -------------------------------------------------------------------------------

    def _complete(self, timeout: float | None) -> bool:
        """Wait in the engine, in slices, so that signal handlers run; False after ``timeout`` s."""
        source = self._source
        if source is None:
            return self._wait_for_completion(timeout)
        if timeout is None:
            while not source.wait(WAIT_SLICE_S):
                pass
        else:
            deadline = time.monotonic() + timeout
            while not source.wait(min(WAIT_SLICE_S, max(0.0, deadline - time.monotonic()))):
                if time.monotonic() >= deadline:
                    return False
        self._complete_from_source()
        # Another thread may still be in `finish`.
        return self._done or self._wait_for_completion(None)

    def _wait_for_completion(self, timeout: float | None) -> bool:
        """Wait until another thread has completed the future; False after ``timeout`` s."""
        latch = Latch()
        wake = latch.set
        self._subscribe(wake)
        try:
            return latch.wait(timeout)
        finally:
            self._unsubscribe(wake)

    def done(self) -> bool:
        """Whether the operation has completed or failed (on devices: is enqueued).  Never blocks."""
        if not self._done:
            source = self._source
            if source is not None and source.done():
                self._complete_from_source()
        return self._done

    # -- completing ----------------------------------------------------------------------------

    def set_result(self, value: T) -> None:
        """Complete the future with ``value``.

        For tensors on devices, the value is usable after the work enqueued on the current streams.  If no
        event can be recorded there, because the device failed, the future fails with that error.

        Raises:
            InvalidFutureState: the future is complete, or an engine completes it.
        """
        self._check_unset()
        try:
            device = completion_events(value, self._device, self._keep)
        except BaseException as error:
            if _is_interrupt(error):
                raise
            self._set(None, drop_outer_frames(error, 1), None)
        else:
            self._set(value, None, device)

    def set_exception(self, error: BaseException) -> None:
        """Complete the future with an exception; ``wait`` raises this same object.

        Raises:
            InvalidFutureState: the future is complete, or an engine completes it.
        """
        if not isinstance(error, BaseException):
            raise UsageError(f"set_exception takes an exception, got {type(error).__name__}: {error!r}")
        self._set(None, error, None)

    def _complete_from_source(self) -> None:
        """Publish the outcome of the completed source, unless another thread does or did."""
        source, claims = self._source, self._claims
        if claims or source is None:
            return
        claim: list[Any] = []
        try:
            claims.append(claim)
            if claims[0] is claim:
                plain = self._finish is None and self._device is None and not hasattr(source, "events")
                if plain and source.exception() is None:
                    self._publish(self._value, None, None)
                else:
                    self._publish_source_outcome(source, claim)
        except KeyboardInterrupt:
            pool.submit(partial(self._resume_completion, source, claim))
            raise

    def _publish_source_outcome(self, source: FutureSource, claim: list[Any]) -> None:
        """Publish the outcome of ``source``.  On a repeated run ``claim`` may already hold the value."""
        finish, value = self._finish, self._value
        events = None
        try:
            error = source.exception()
            if error is not None:
                # Engines may give one exception to many futures; its traceback may belong to another one.
                error.__traceback__ = None
            # A single C call each: Ctrl-C cannot occur between the return of `finish` and storing its value.
            elif self._device is not None or hasattr(source, "events"):
                if not claim:
                    claim.extend(starmap(self._finish_on_devices, ((source,),)))
                value, events = claim[0] if claim else _raise_stop_iteration()
            elif finish is not None:
                if not claim:
                    claim.extend(starmap(finish, _NO_ARGUMENTS))
                value = claim[0] if claim else _raise_stop_iteration()
        except BaseException as raised:
            if _is_interrupt(raised):
                raise
            error = drop_outer_frames(raised, 1)
        self._publish(value, error, events)

    def _finish_on_devices(self, source: FutureSource) -> tuple[T, DeviceEvents | None]:
        """Run ``finish`` under streams that wait for its inputs; return the value and the value's events."""
        finish, keep = self._finish, self._keep
        events, read = source.events() if hasattr(source, "events") else (self._device, keep)
        if events is None:
            return self._value if finish is None else finish(), None
        events.complete(None, keep)
        if finish is None:
            value, own = self._value, DeviceEvents.merged([events])
            own.complete(value, keep)
        else:
            with events.ordered_streams(read):
                value, own = finish(), events.successor()
                own.complete(value, keep)
        return value, own

    def _fail_late(self, failure: Exception) -> None:
        """Make a completed future fail because a device failed later; the first failure is kept."""
        with pool.lock:
            if self._error is None:
                self._error = failure
                self._device = None
                if self.record is not None:
                    self.record.failure = describe_error(failure)

    def _resume_completion(self, source: FutureSource, claim: list[Any]) -> None:
        """Resume :meth:`_complete_from_source` where Ctrl-C interrupted it."""
        if self._done:
            self._source = self._finish = self._keep = None
            self._notify_subscribers()
        elif self._claims and self._claims[0] is claim:
            self._publish_source_outcome(source, claim)
        else:
            self._complete_from_source()

    def _set(self, value: T | None, error: BaseException | None, device: DeviceEvents | None) -> None:
        """Publish a value or error that does not come from a source."""
        self._check_unset()
        claim: list[Any] = []
        try:
            self._claims.append(claim)
            if self._claims[0] is claim:
                self._publish(value, error, device)
                return
        except KeyboardInterrupt:
            if self._done:
                pool.submit(self._notify_subscribers)
            elif self._claims and self._claims[0] is claim:
                pool.submit(partial(self._publish, value, error, device))
            raise
        self._check_unset()

    def _publish(self, value: T | None, error: BaseException | None, device: DeviceEvents | None) -> None:
        """Store the outcome and notify.  Called only by the owner of the first claim."""
        if error is not None:
            # Keep the traceback with which the error arrived: each raise of the same object makes it longer.
            value = cast(T, error.__traceback__)
        self._value = cast(T, value)
        self._error = error
        self._device = device
        record = self.record
        if record is not None:
            if error is not None:
                record.failure = describe_error(error)
            ended = getattr(self._source, "ended", monotonic_ns)
            record.ended = ended()
        self._done = True
        self._source = self._finish = self._keep = None
        if self.record is not record:  # set by set_record() in the meantime
            self._write_record()
        if self._subscribers is not None:
            self._notify_subscribers()

    # -- the flight recorder -------------------------------------------------------------------

    def set_record(self, record: _core.Record) -> None:
        """Write the time of completion and the failure to ``record``, once; now if the future is complete."""
        # In words, because an exception would keep alive what its traceback refers to.
        self.record = record
        if self._done:
            self._write_record()

    def _write_record(self) -> None:
        """Write a completion that happened before or while the record was set."""
        with pool.lock:
            record = self.record
            if record is not None and not record.ended:
                if self._error is not None:
                    record.failure = describe_error(self._error)
                record.ended = monotonic_ns()

    # -- subscribers ---------------------------------------------------------------------------

    def _notify_subscribers(self) -> None:
        """Call the subscribers, in order; one that Ctrl-C interrupts is called again."""
        with pool.lock:
            while self._subscribers:
                subscriber = self._subscribers[0]
                try:
                    subscriber(self)
                except Exception:
                    with contextlib.suppress(Exception):  # raised by a user's logging handler
                        _logger.exception("a subscriber failed on the completion of %r", self)
                if self._subscribers and self._subscribers[0] is subscriber:
                    del self._subscribers[0]
            self._subscribers = None

    def _subscribe(self, subscriber: Callable[[Any], None]) -> None:
        """Call ``subscriber(self)`` on completion, in the completing thread; immediately if done."""
        source = None
        try:
            with pool.lock:
                if self._subscribers is None:
                    if not self._claims:
                        source = self._source
                    self._subscribers = []
                self._subscribers.append(subscriber)
                if self._done:
                    self._notify_subscribers()
            if source is not None:
                source.notify(self._complete_from_source)
        except KeyboardInterrupt:
            if self._done:
                pool.submit(self._notify_subscribers)
            elif source is not None:
                pool.submit(partial(source.notify, self._complete_from_source))
            raise

    def _unsubscribe(self, subscriber: Callable[[Any], None]) -> None:
        with pool.lock:
            if self._subscribers is not None and subscriber in self._subscribers:
                self._subscribers.remove(subscriber)

    def _check_unset(self) -> None:
        if self._source is not None:
            raise InvalidFutureState(f"{self!r} is completed by its engine; its outcome cannot be set")
        if self._claims:
            raise InvalidFutureState(f"{self!r} has an outcome already; it can be set only once")

    def _payload(self) -> object:
        """The value, or for a collection of futures the list of their values."""
        value = self._value
        if isinstance(value, list) and value and isinstance(value[0], FutureState):
            return [future._value for future in value]
        return value


def _is_interrupt(error: BaseException) -> bool:
    return isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread()


def _raise_stop_iteration() -> NoReturn:
    """Raise instead of a StopIteration of ``finish``, which only ended the ``starmap`` that called it."""
    raise RuntimeError("the function that computes the value of a future (finish) raised StopIteration")


def drop_outer_frames(error: BaseException, count: int | None) -> BaseException:
    """Drop the outermost ``count`` frames of the traceback of ``error`` (None: all frames); return ``error``.

    These frames are shoal's own and reference the future that will store the error: a reference cycle.
    """
    traceback = None if count is None else error.__traceback__
    for _ in range(count or 0):
        if traceback is not None:
            traceback = traceback.tb_next
    return BaseException.with_traceback(error, traceback)  # a user's exception may override the method
