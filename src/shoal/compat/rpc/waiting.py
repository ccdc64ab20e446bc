"""Torch's futures of calls, and torch's functions that wait for several.

Torch's C++ sees of a failure that Python set a value only, so its own functions for several futures are
replaced by those below wherever a future of a call is among them.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from ...common.wording import in_words
from ...errors import CallTimeout
from ...future import Future
from ..work import KeyedFuture, for_torch

_logger = logging.getLogger("shoal")


class CallFuture(KeyedFuture):
    """The future of a call, or of a callback on one, with torch's errors and torch's order of callbacks.

    Args:
        future: shoal's.
        value: gives the value once ``future`` is complete, or raises; called once.
    """

    def __init__(self, future: Future[Any], value: Callable[[Future[Any]], Any]) -> None:
        super().__init__(future, _Once(value))
        self._order = threading.Lock()
        #: the callback that was registered last, and the thread in which one runs
        self._last: Future[Any] = future
        self._runner = 0

    def wait(self) -> Any:
        try:
            return super().wait()
        except CallTimeout:
            return self.value()  # which raises it in torch's words

    def then(self, callback: Callable[[Any], Any]) -> CallFuture:
        _check("then", callback)

        def run() -> Any:
            try:
                return callback(self)
            except Exception as error:
                raise RuntimeError(
                    f"Got the following error when running the callback: {in_words(error)}"
                ) from error

        return CallFuture(self._in_turn(run), lambda future: future.value())

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        _check("add_done_callback", callback)

        def run() -> None:
            try:
                callback(self)
            except BaseException:
                with contextlib.suppress(BaseException):  # of a logging handler of the user
                    _logger.exception("a callback of the future of a call raised")

        self._in_turn(run)

    def _in_turn(self, run: Callable[[], Any]) -> Future[Any]:
        """The future of ``run()``, which runs after the callbacks before it; at once if they have ended."""

        def after(_: object) -> Any:
            self._complete(self._future)
            self._runner = threading.get_ident()
            try:
                return run()
            finally:
                self._runner = 0

        with self._order:
            if not self._last.done() and self._runner != threading.get_ident():
                self._last = self._last.then(after)
                return self._last
        # Torch too runs it in the thread that registers it.
        self._complete(self._future)
        ended: Future[Any] = Future()
        try:
            ended.set_result(run())
        except Exception as error:
            ended.set_exception(error)
        return ended


class _Once:
    """Calls a function once, and gives what came of it ever after."""

    def __init__(self, fn: Callable[[Future[Any]], Any]) -> None:
        self._fn: Callable[[Future[Any]], Any] | None = fn
        self._lock = threading.Lock()
        self._value: Any = None
        self._error: Exception | None = None

    def __call__(self, future: Future[Any]) -> Any:
        with self._lock:
            if self._fn is not None:
                try:
                    self._value = self._fn(future)
                except CallTimeout as error:
                    self._error = torchs_timeout(error)
                except Exception as error:
                    self._error = error.with_traceback(None)
                self._fn = None
        if self._error is not None:
            raise self._error
        return self._value


def torchs_timeout(error: CallTimeout) -> RuntimeError:
    """A timeout in the words of torch's, which programs look for."""
    return CallTimeout(f"RPC ran for more than set timeout and will now be marked with an error: {error}")


def collect_all(original: Callable[[Any], Any], futures: Sequence[Any]) -> Any:
    """``torch.futures.collect_all``: a future of the list, as soon as all are complete or one has failed."""
    if not any(isinstance(future, CallFuture) for future in futures):
        return original(futures)
    all_of_them: torch.futures.Future[Any] = torch.futures.Future()
    lock, left = threading.Lock(), len(futures)
    ended = False

    def done(future: Any) -> None:
        nonlocal left, ended
        error = _error_of(future)
        with lock:
            left -= 1
            if ended or (left and error is None):
                return
            ended = True
        if error is None:
            all_of_them.set_result(list(futures))
        else:
            all_of_them.set_exception(error)

    for future in futures:
        future.add_done_callback(done)
    return all_of_them


def wait_all(original: Callable[[Any], Any], futures: Sequence[Any]) -> list[Any]:
    """``torch.futures.wait_all``: the values of all, or the first failure."""
    if not any(isinstance(future, CallFuture) for future in futures):
        values: list[Any] = original(futures)
        return values
    return [future.wait() for future in collect_all(original, futures).wait()]


def replacements() -> dict[str, Callable[..., Any]]:
    """The functions that take the place of those of ``torch.futures``."""
    theirs = torch.futures
    return {
        "collect_all": partial(collect_all, theirs.collect_all),
        "wait_all": partial(wait_all, theirs.wait_all),
    }


def _error_of(future: Any) -> Exception | None:
    try:
        future.value()
    except BaseException as error:
        return for_torch(error)
    return None


def _check(method: str, callback: object) -> None:
    if not callable(callback):
        raise TypeError(
            f"{method}(): incompatible function arguments. The following argument types are supported:\n"
            f"    1. (callback: Callable)\n\nInvoked with: {callback!r}"
        )
