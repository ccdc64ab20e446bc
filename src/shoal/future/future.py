"""The public interface of a future."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Generator, Mapping
from functools import partial
from types import TracebackType
from typing import Any, Literal, TypeVar

import torch

from ..errors import InvalidFutureState, UsageError, WaitTimeout
from ..streams import DeviceEvents, all_current_streams
from .pool import pool
from .scope import CallbackScope, callback_scope, derive_key
from .state import WAIT_SLICE_S, FutureState, drop_outer_frames

T = TypeVar("T")
U = TypeVar("U")

#: The priority of the streams that a callback runs under.
Priority = Literal["high", "low"]

#: The streams that a callback runs under: new ones, or those that were current where it was registered.
CallbackStreams = Literal["new", "current"]


class Future(FutureState[T]):
    """The result of an operation that may still be running.

    Args:
        source: the operation of an engine; None: the future is completed by :meth:`set_result` or
            :meth:`set_exception`.
        finish: returns the value once ``source`` is complete.  It runs to completion exactly once, before the
            completion is visible, in the thread that first detects it; Ctrl-C makes it run again.
        value: the value once ``source`` is complete, if there is no ``finish``.
        key: the identity of the operation, equal on all ranks.  The keys of operations issued in callbacks
            are derived from it (see :mod:`shoal.future.scope`).  May be assigned until the first callback is
            registered.
        keep: kept alive until completion; the memory of device tensors is also not reused until the work on
            them is done.
        device: the events of results on devices.

    Attributes:
        record: the flight recorder's record, or None (see :meth:`set_record`).

    Ending a wait (by a timeout, Ctrl-C, a cancelled ``await``) never affects the operation.
    """

    __slots__ = ()

    # -- waiting -------------------------------------------------------------------------------

    def wait(self, timeout: float | None = None, *, blocking: bool = True) -> T:
        """Wait for completion and return the value, or raise the operation's error.

        Args:
            timeout: seconds, for results on devices too; ``None``: only the operation's own timeout applies.
            blocking: for results on devices: True blocks until they are computed; False returns once they are
                enqueued and makes the current streams of this thread wait for them.

        Raises:
            WaitTimeout: ``timeout`` expired.  The operation continues, and can be waited for again.
        """
        begun = 0.0 if timeout is None else time.monotonic()
        if not self._done:
            source = self._source
            if timeout is None and source is not None and source.wait(WAIT_SLICE_S):
                self._complete_from_source()
            del source
            if not self._done and not self._complete(timeout):
                raise WaitTimeout(
                    f"timed out after {timeout} s waiting for {self!r}; "
                    "the operation continues, call wait() again"
                )
        device = self._device
        if device is not None:
            if blocking:
                self._synchronize(device, begun, timeout)
            else:
                self._order(device)
        error = self._error
        if error is not None:
            # Otherwise traceback, this frame, the future and the error would form a reference cycle, which
            # only the garbage collector frees.
            origin = self._value
            del self
            try:
                raise error.with_traceback(_traceback(origin))
            finally:
                del error
        return self._value

    #: Alias of :meth:`wait`.
    result = wait

    def value(self) -> T:
        """Return the value of a completed future.  Neither this thread nor its streams wait.

        Raises:
            InvalidFutureState: the future is not complete.
            BaseException: the operation's error.
        """
        if not self.done():
            raise InvalidFutureState(f"{self!r} has no value yet; call wait(), or check done() first")
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
        """Return the error of a completed future, or None.

        Raises:
            InvalidFutureState: the future is not complete.
        """
        if not self.done():
            raise InvalidFutureState(f"{self!r} has no outcome yet; call wait(), or check done() first")
        return self._error

    def __await__(self) -> Generator[Any, None, T]:
        """Wait without blocking the asyncio loop; for results on devices like ``wait(blocking=False)``."""
        if not self.done():
            loop = asyncio.get_running_loop()
            waiter = loop.create_future()

            def wake(_: Future[T]) -> None:
                # A closed loop raises RuntimeError; then there is no waiter left.
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

    def then(
        self,
        fn: Callable[[Future[T]], U],
        *,
        priority: Priority | None = None,
        streams: CallbackStreams = "new",
    ) -> Future[U]:
        """Run ``fn(self)`` in a separate thread once this future is complete; return a future of its result.

        ``fn`` also runs if the operation failed (``value()`` then raises).  An exception of ``fn`` becomes
        the exception of the returned future; a future that ``fn`` returns is an ordinary value.  ``fn`` may
        block, issue operations and wait for them.  The callbacks of one future start in the order of
        registration.  Thread-local settings of torch (``no_grad``, ``inference_mode``, the current device)
        are not passed to ``fn``.

        For results on devices, ``fn`` runs when their work is enqueued, with current streams that wait for
        it.  Call ``wait()`` in ``fn`` to block until the work is done.

        Operations issued in callbacks are matched across ranks by their position in the callback, so every
        rank must register the same callbacks on a future in the same order.

        Args:
            priority: the priority of new streams, ``"high"`` or ``"low"``; None: as the engine chose.
            streams: for results on devices, ``"new"`` runs ``fn`` with new current streams, ``"current"``
                with those that are current in the thread that calls ``then``.  Work of ``fn`` is then
                enqueued behind all work that these streams have when ``fn`` runs.  No effect for results on
                the host.

        Raises:
            UsageError: ``fn`` cannot be called, another ``priority`` or ``streams``, or a ``priority`` with
                ``streams="current"``.
        """
        _check_callback("then", fn)
        child: Future[U] = Future()
        self._register(fn, child, *_chosen_streams("then", priority, streams))
        return child

    def add_done_callback(
        self,
        fn: Callable[[Future[T]], object],
        *,
        priority: Priority | None = None,
        streams: CallbackStreams = "new",
    ) -> None:
        """Run ``fn(self)`` like :meth:`then`, but discard its result and log its exception."""
        _check_callback("add_done_callback", fn)
        self._register(fn, None, *_chosen_streams("add_done_callback", priority, streams))

    # -- cancelling ----------------------------------------------------------------------------

    def cancel(self) -> bool:
        """Try to cancel the operation.

        Returns:
            Whether it is cancelled: the future then fails, at once or soon, with the engine's error for that.
            False if the operation is complete or cannot be cancelled (no collective can: its other members
            would wait for this one); the call then has no effect.
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

    def _order(self, device: DeviceEvents) -> None:
        """Make the current streams wait for the work on devices; if that is known to have failed, so does the
        future.
        """
        try:
            device.order(self._payload())
        except UsageError:  # the call is wrong, not the work
            raise
        except Exception as failure:
            self._fail_late(failure.with_traceback(None))

    def _synchronize(self, device: DeviceEvents, begun: float, timeout: float | None) -> None:
        """Block until the work on devices is done, for at most ``timeout`` seconds after ``begun``.

        If that work fails, so does the future.
        """
        left = None if timeout is None else max(0.0, begun + timeout - time.monotonic())
        try:
            in_time = device.synchronize(self._payload(), left)
        except UsageError:  # the call is wrong, not the work
            raise
        except Exception as failure:
            self._fail_late(failure.with_traceback(None))
            return
        if not in_time:
            raise WaitTimeout(
                f"timed out after {timeout} s waiting for {self!r}: its work on the device is not done; "
                "the work continues, call wait() again"
            )

    def _register(
        self,
        fn: Callable[[Future[T]], Any],
        child: Future[Any] | None,
        high_priority: bool | None,
        streams: Mapping[torch.device, Any] | None,
    ) -> None:
        with pool.lock:
            index = self._callbacks
            self._callbacks += 1
        if child is not None and self.key is not None:
            child.key = derive_key(b"then", self.key, index)
        callback = partial(_run_callback, fn, index, child, high_priority, streams, [1])
        self._subscribe(lambda future: pool.submit(partial(callback, future)))


def _run_callback(
    fn: Callable[[Any], Any],
    index: int,
    child: FutureState[Any] | None,
    high_priority: bool | None,
    streams: Mapping[torch.device, Any] | None,
    run_token: list[int],
    future: FutureState[Any],
) -> None:
    """Call ``fn(future)`` in its scope and complete ``child``.  Runs in a thread of the pool.

    Args:
        high_priority: whether its streams have high priority; None: as the future's engine chose.
        streams: the streams that it runs under; None: new ones.
        run_token: Ctrl-C may cause the callback to be queued twice; only the run that pops its element
            proceeds.
    """

    def call() -> None:
        value = fn(future)
        if child is not None:
            # Within the callback's streams: the events of the result are recorded on them.
            child.set_result(value)

    try:
        run_token.pop()
    except IndexError:
        return
    token = callback_scope.set(None if future.key is None else CallbackScope(future.key, index))
    try:
        device = future._device
        if device is None:
            call()
        else:
            if child is not None:
                child._device = device.successor()
            with device.ordered_streams(future._payload(), high_priority, streams):
                call()
    except BaseException as error:
        if child is None or child.done():
            raise
        # The future's own error must not reference the future through the callback's frame.
        passed_on = error is future._error
        child.set_exception(drop_outer_frames(error, None if passed_on else 2))
        del child  # the frames of ``fn`` reference this one, and the error references them
    finally:
        callback_scope.reset(token)


def _check_callback(caller: str, fn: object) -> None:
    if not callable(fn):
        raise UsageError(f"{caller}: expected a function that takes the future, got {type(fn).__name__}")


def _chosen_streams(
    caller: str, priority: Priority | None, streams: CallbackStreams
) -> tuple[bool | None, Mapping[torch.device, Any] | None]:
    """Validate the arguments of ``then``; return the priority of new streams, and the streams if not new."""
    if priority not in (None, "high", "low"):
        raise UsageError(f'{caller}: priority must be "high", "low" or None, got {priority!r}')
    if streams not in ("new", "current"):
        raise UsageError(f'{caller}: streams must be "new" or "current", got {streams!r}')
    if streams == "new":
        return None if priority is None else priority == "high", None
    if priority is not None:
        raise UsageError(
            f"{caller}: priority={priority!r} is for new streams, but streams='current' uses existing ones; "
            "leave one of the two out"
        )
    return None, all_current_streams()


def _traceback(value: object) -> TracebackType | None:
    """The traceback that a failed future has as its value; None if a device failed after completion."""
    return value if isinstance(value, TracebackType) else None


def _resolve(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
