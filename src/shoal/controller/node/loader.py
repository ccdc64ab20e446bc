"""A node's half of ``Master.load``: a loader that a thread reads ahead of the master's requests."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from ...common.formatting import describe_error, traceback_of

#: number of batches read ahead
PREFETCH_BATCHES = 2

_END = object()


class _Loading:
    """A loader, and its batches that the master has not requested yet."""

    def __init__(self, make: Callable[[int, int], Iterable[Any]], index: int, count: int) -> None:
        self._changed = threading.Condition()
        self._batches: deque[Any] = deque()
        self._error: BaseException | None = None
        self._read = self._stopped = False
        threading.Thread(
            target=self._read_all, args=(make, index, count), name="shoal-node-loader", daemon=True
        ).start()

    def following(self) -> Any:
        """Wait for the next batch, or ``_END`` after the last one; raises the loader's error, if any."""
        with self._changed:
            self._changed.wait_for(lambda: self._batches or self._read)
            if self._batches:
                batch = self._batches.popleft()
                self._changed.notify_all()
                return batch
            if self._error is not None:
                raise self._error
            return _END

    def stop(self) -> None:
        """End the thread and drop the batches."""
        with self._changed:
            self._stopped = True
            self._batches.clear()
            self._changed.notify_all()

    def _read_all(self, make: Callable[[int, int], Iterable[Any]], index: int, count: int) -> None:
        try:
            for batch in make(index, count):
                if not self._offer(batch):
                    break
        except BaseException as error:
            self._error = error
        with self._changed:
            self._read = True
            self._changed.notify_all()

    def _offer(self, batch: Any) -> bool:
        """Wait for room and keep a batch; return False if the loader was stopped."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or len(self._batches) < PREFETCH_BATCHES)
            if not self._stopped:
                self._batches.append(batch)
                self._changed.notify_all()
            return not self._stopped


_loadings: dict[str, _Loading] = {}


def begin(name: str, make: Callable[[int, int], Iterable[Any]], index: int, count: int) -> None:
    _loadings[name] = _Loading(make, index, count)


def following(name: str) -> tuple[Any, ...]:
    """Return ("batch", batch), ("end",), or ("failed", error text, traceback text).

    A failure is a value, not an exception: if the loop ends before its batch, it must not be reported.
    """
    try:
        batch = _loadings[name].following()
    except BaseException as error:
        return "failed", describe_error(error), traceback_of(error, error.__traceback__)
    return ("end",) if batch is _END else ("batch", batch)


def stop(name: str) -> None:
    """Stop a loader, if it was created."""
    loading = _loadings.pop(name, None)
    if loading is not None:
        loading.stop()
