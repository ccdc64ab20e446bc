"""Functions on several futures (wait for all, wait for any, collect), and futures derived from others."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, TypeVar, cast

from ..errors import InvalidFutureState, UsageError, WaitTimeout
from ..streams import DeviceEvents
from .future import Future
from .scope import derive_key
from .state import WAIT_SLICE_S, Latch

T = TypeVar("T")


def wait_all(futures: Iterable[Future[T]], timeout: float | None = None, *, blocking: bool = True) -> list[T]:
    """Wait for all ``futures`` and return their values, in order.

    Args:
        timeout: seconds for all futures together; ``None`` for no limit.
        blocking: for results on devices, as for :meth:`Future.wait`.

    Raises:
        UsageError: ``futures`` has something else than futures.
        BaseException: the error of a failed future, within a fraction of a second and before others complete.
        WaitTimeout: ``timeout`` expired; the operations continue.
    """
    futures = _listed("wait_all", futures)
    deadline = None if timeout is None else time.monotonic() + timeout
    for position, future in enumerate(futures):
        while True:
            left = WAIT_SLICE_S if deadline is None else max(0.0, deadline - time.monotonic())
            if future._done or future._complete(min(WAIT_SLICE_S, left)):
                break
            for other in futures[position + 1 :]:
                if other.done():
                    other.value()
            if left == 0.0:
                pending = sum(not other.done() for other in futures)
                raise WaitTimeout(
                    f"timed out after {timeout} s with {pending} of {len(futures)} futures pending; "
                    "their operations continue"
                )
        future.value()
    # All are complete; only work on devices may remain.
    return [
        future.wait(None if deadline is None else max(0.0, deadline - time.monotonic()), blocking=blocking)
        for future in futures
    ]


def wait_any(futures: Iterable[Future[T]], timeout: float | None = None) -> Future[T]:
    """Wait until one of ``futures`` has completed or failed; return the first such in the given order.

    Args:
        timeout: seconds; ``None`` for no limit.

    Raises:
        UsageError: ``futures`` is empty, or has something else than futures.
        WaitTimeout: ``timeout`` expired; the operations continue.
    """
    futures = _listed("wait_any", futures)
    if not futures:
        raise UsageError("wait_any needs at least one future, got none")
    latch = Latch()
    wake = latch.set
    subscribed: list[Future[T]] = []
    try:
        for future in futures:
            if latch.is_set() or future.done():
                break
            subscribed.append(future)
            future._subscribe(wake)
        else:
            if not latch.wait(timeout):
                raise WaitTimeout(
                    f"timed out after {timeout} s waiting for any of {len(futures)} futures; "
                    "their operations continue"
                )
    finally:
        for future in subscribed:
            future._unsubscribe(wake)
    return next(future for future in futures if future.done())


def collect_all(futures: Iterable[Future[T]]) -> Future[list[Future[T]]]:
    """Return a future of the list of ``futures`` that completes when all of them have.

    If one fails, the returned future fails at once with the same exception (as in torch).

    Raises:
        UsageError: ``futures`` has something else than futures.
    """
    futures = _listed("collect_all", futures)
    keys = [future.key for future in futures]
    result: Future[list[Future[T]]] = Future()
    if all(key is not None for key in keys):
        result.key = derive_key(b"all", *(cast(int, key) for key in keys))
    pending = set(range(len(futures)))
    counting = threading.Lock()

    def count(index: int, future: Future[T]) -> None:
        with counting:
            pending.discard(index)
            last = not pending
        try:
            if future._error is not None:
                result.set_exception(future._error)
            elif last:
                _complete_collection(result, futures)
        except InvalidFutureState:
            pass  # an earlier failure already set the result

    for index, future in enumerate(futures):
        future._subscribe(partial(count, index))
    if not futures:
        result.set_result([])
    return result


def _listed(caller: str, futures: Iterable[Future[T]]) -> list[Future[T]]:
    if isinstance(futures, Future):
        raise UsageError(f"{caller}: expected a list of futures, got one future")
    listed = list(futures)
    for future in listed:
        if not isinstance(future, Future):
            raise UsageError(
                f"{caller}: expected futures of shoal, got {type(future).__name__}: pass what the operations "
                "return (of a Work of shoal.distributed, its get_future())"
            )
    return listed


def _complete_collection(result: Future[list[Future[T]]], futures: list[Future[T]]) -> None:
    parts = [future._device for future in futures if future._device is not None]
    result._set(futures, None, DeviceEvents.merged(parts) if parts else None)


class FutureAsSource:
    """The completion of a future, as the :class:`~shoal.future.FutureSource` of a derived future.

    ``Future(FutureAsSource(f), finish=lambda: g(f.value()))`` is ``f`` with another value.  It needs no
    callback thread, so ``g`` must be quick.
    """

    __slots__ = ("_future",)

    def __init__(self, future: Future[Any]) -> None:
        self._future = future

    def wait(self, timeout: float | None) -> bool:
        return self._future.done() or self._future._complete(timeout)

    def done(self) -> bool:
        return self._future.done()

    def exception(self) -> BaseException | None:
        return self._future.exception()

    def events(self) -> tuple[DeviceEvents | None, object]:
        return self._future._device, self._future._payload()

    def cancel(self) -> bool:
        return self._future.cancel()

    def notify(self, fn: Callable[[], None]) -> None:
        self._future._subscribe(lambda _: fn())
