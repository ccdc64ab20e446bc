"""The future of one operation, as its users see it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Generator
from functools import partial
from types import TracebackType
from typing import Any, Literal, TypeVar

from ..errors import InvalidFutureState, UsageError, WaitTimeout
from ..streams import DeviceEvents
from .callback import Callback
from .pool import pool
from .scope import derive_key
from .state import WAIT_SLICE, FutureState

T = TypeVar("T")
U = TypeVar("U")

#: The priority of the streams that a callback runs under.
Priority = Literal["high", "low"]


class Future(FutureState[T]):
    """The result of an operation that may still be running.

    Args:
        source: the operation, if an engine answers for it; else somebody calls :meth:`set_result` or
            :meth:`set_exception`.
        finish: gives the value once ``source`` is complete.  Runs to its end exactly once, before anybody
            sees the completion, in whichever thread meets it first; a run that Ctrl-C cuts off is repeated.
        value: without ``finish``, what the future has once ``source`` is complete.
        key: the identity of the operation, equal on all ranks, from which those of operations issued
            in callbacks are derived (see :mod:`shoal.callbacks`).  May be assigned until the first
            callback is registered.
        keep: kept alive until completion; for device tensors their memory is also kept from reuse
            until the work on them is done.
        device: for results on devices.

    Attributes:
        record: the flight recorder's record, or None (see :meth:`note_in`).

    Giving up a wait (a timeout, Ctrl-C, a cancelled ``await``) never affects the operation.
    """

    __slots__ = ()

    # -- asking --------------------------------------------------------------------------------

    def wait(self, timeout: float | None = None, *, blocking: bool = True) -> T:
        """Wait for completion and return the value, or raise what went wrong.

        Args:
            timeout: seconds, for results on devices too; ``None`` waits as long as the operation's own
                timeout lets it run.
            blocking: for results on devices: whether to block until they are computed, or to return
                once they are enqueued, with the current streams of this thread waiting for them.

        Raises:
            WaitTimeout: ``timeout`` ran out.  The operation goes on, and can be waited for again.
        """
        begun = 0.0 if timeout is None else time.monotonic()
        if not self._done:
            source = self._source
            if timeout is None and source is not None and source.wait(WAIT_SLICE):
                self._settle()
            del source
            if not self._done and not self._complete(timeout):
                raise WaitTimeout(
                    f"gave up waiting after {timeout} s for {self!r}; "
                    "the operation goes on, wait again for it"
                )
        device = self._device
        if device is not None:
            if blocking:
                self._synchronize(device, begun, timeout)
            else:
                device.order(self._payload())
        error = self._error
        if error is not None:
            # Without this the traceback would refer to this frame, which refers to the future, which
            # refers to the error: a cycle that lives until the garbage collector comes by.
            origin = self._value
            del self
            try:
                raise error.with_traceback(_traceback(origin))
            finally:
                del error
        return self._value

    #: The same as :meth:`wait`.
    result = wait

    def value(self) -> T:
        """The value of a completed future; does not wait, nor make streams wait.

        Raises:
            InvalidFutureState: it is not complete.
            BaseException: what went wrong.
        """
        if not self.done():
            raise InvalidFutureState(f"{self!r} has no value yet; call wait(), or ask done() first")
        error = self._error
        if error is not None:
            origin = self._value
            del self  # see wait
            try:
                raise error.with_traceback(_traceback(origin))
            finally:
                del error
        return self._value

    def exception(self) -> BaseException | None:
        """The error of a completed future, or None.

        Raises:
            InvalidFutureState: it is not complete.
        """
        if not self.done():
            raise InvalidFutureState(f"{self!r} has no outcome yet; call wait(), or ask done() first")
        return self._error

    def __await__(self) -> Generator[Any, None, T]:
        """Wait in asyncio, without blocking the loop; results on devices as with ``blocking=False``."""
        if not self.done():
            loop = asyncio.get_running_loop()
            waiter = loop.create_future()

            def wake(_: Future[T]) -> None:
                # A loop that was closed meanwhile has nobody left to wake.
                with contextlib.suppress(RuntimeError):
                    loop.call_soon_threadsafe(_resolve, waiter)

            self._subscribe(wake)
            try:
                yield from waiter
            finally:
                self._unsubscribe(wake)
        error = self._error
        if error is not None:
            origin = self._value
            del self  # see wait
            try:
                raise error.with_traceback(_traceback(origin))
            finally:
                del error
        return self.wait(blocking=False)

    # -- callbacks -----------------------------------------------------------------------------

    def then(self, fn: Callable[[Future[T]], U], *, priority: Priority | None = None) -> Future[U]:
        """A future of ``fn(self)``, which runs in a thread of its own once this future is complete.

        ``fn`` runs also if the operation failed (``value()`` then raises).  What it raises becomes
        the exception of the returned future; a future that it returns is a value like any other.
        It may block, issue operations and wait for them.  The callbacks of one future start in the
        order of registration.  Thread-local settings of torch (``no_grad``, ``inference_mode``, the
        current device) do not reach it, except that for results on devices, fresh streams are
        current which already wait for the work.

        Operations issued in callbacks are matched across ranks by their place in the callback, so
        every rank must register the same callbacks on a future in the same order.

        Args:
            priority: of those fresh streams, ``"high"`` or ``"low"``; None: as the engine chose.
        """
        if priority not in (None, "high", "low"):
            raise UsageError(f'then: priority must be "high", "low" or None, got {priority!r}')
        child: Future[U] = Future()
        self._register(fn, child, priority)
        return child

    def add_done_callback(self, fn: Callable[[Future[T]], object]) -> None:
        """Run ``fn(self)`` like :meth:`then`, for its effect: an exception is logged, not kept."""
        self._register(fn, None, None)

    # -- ending -------------------------------------------------------------------------------

    def cancel(self) -> bool:
        """Try to end the operation before its time.

        Returns:
            Whether it will end as cancelled: the future then fails, at once or soon, with what its engine
            says of that.  False if the operation is complete or cannot be cancelled (no collective can: its
            other members would wait for this one); it goes on as if nobody had asked.
        """
        ask = getattr(self._source, "cancel", None)
        return ask is not None and not self.done() and bool(ask())

    def __repr__(self) -> str:
        state = "pending"
        if self._done:
            ended, by = ("done", self._value) if self._error is None else ("failed", self._error)
            state = f"{ended} with {type(by).__name__}"
        words = [state] if self.key is None else [f"{self.key:#x}", state]
        if (record := self.record) is not None:
            words.insert(0, f"of {record.kind.name.lower()}" + f" #{record.number}" * (record.number >= 0))
        return f"<shoal.Future {' '.join(words)}>"

    # -- inside --------------------------------------------------------------------------------

    def _synchronize(self, device: DeviceEvents, begun: float, timeout: float | None) -> None:
        """Block until the work on devices is done, ``timeout`` seconds at most from ``begun`` on.

        A failure of that work is the future's own afterwards.
        """
        left = None if timeout is None else max(0.0, begun + timeout - time.monotonic())
        try:
            in_time = device.synchronize(self._payload(), left)
        except Exception as failure:
            self._fail_late(failure.with_traceback(None))
            return
        if not in_time:
            raise WaitTimeout(
                f"gave up waiting after {timeout} s for {self!r}, whose work on the device is not done; "
                "it goes on, wait again for it"
            )

    def _register(
        self, fn: Callable[[Future[T]], Any], child: Future[Any] | None, priority: Priority | None
    ) -> None:
        with pool.lock:
            index = self._callbacks
            self._callbacks += 1
        if child is not None and self.key is not None:
            child.key = derive_key(b"then", self.key, index)
        callback = Callback(fn, index, child, None if priority is None else priority == "high")
        self._subscribe(lambda future: pool.submit(partial(callback.run, future)))


def _traceback(value: object) -> TracebackType | None:
    """The traceback of a failure: the failed future's value, unless a device failed after completion."""
    return value if isinstance(value, TracebackType) else None


def _resolve(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
