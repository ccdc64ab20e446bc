"""Torch's handles of an operation, over a :class:`shoal.Future`.

``Work.wait`` goes straight into the engine, as ``Future.wait`` does: no thread stands between.  Only who
asks for a ``torch.futures.Future`` pays for the thread that completes it.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..errors import UsageError, WaitTimeout
from ..future import Future, Source, collect_all, derive_key, enter_scope, leave_scope
from ..group import Message
from .uncompiled import uncompiled

_NONE = timedelta(0)

#: works that ended in Python and may live on in C++ (see Work.__del__), and how many bytes one may keep
_dropped: deque[Work] = deque(maxlen=64)
_DROPPED_BYTES = 1024


@uncompiled
class Work(dist.Work):
    """One operation of a :class:`~shoal.compat.TorchProcessGroup`.

    Args:
        future: of the operation.
        result: what ``result()`` and the torch future give: the list of the tensors that were written.
    """

    def __init__(self, future: Future[Any], result: Any) -> None:
        super().__init__()
        self._future = future
        self._result = result
        self._handed_out: KeyedFuture | None = None
        self._waited = False

    #: whether somebody waited for it; nothing is to be kept of one that was not made completely
    _waited = True

    def __del__(self, dropped: deque[Work] = _dropped) -> None:
        # A work that Python hands to C++ loses its Python half with Python's last reference, and what C++
        # then has never completes.  torch's DDP does this in a Join context with the number of ranks that
        # still train: nobody in Python waits for it, and the backward pass does.  So small works that
        # nobody waited for live on for a while.
        if not self._waited and _bytes(self._result) <= _DROPPED_BYTES:
            dropped.append(self)

    @property
    def future(self) -> Future[Any]:
        """The :class:`shoal.Future` of the operation."""
        return self._future

    def wait(self, timeout: timedelta = _NONE) -> bool:
        """Block until the operation is complete.

        Args:
            timeout: zero or less waits as long as the operation's own timeout lets it run.

        Returns:
            True.

        Raises:
            WaitTimeout: the time ran out; the operation goes on.
            GroupError: what went wrong with the operation.
        """
        self._waited = True
        if timeout <= _NONE:
            self._future.wait()
        else:
            self._future.wait(timeout.total_seconds())
        return True

    def synchronize(self) -> None:
        """The same as :meth:`wait`: there is no stream to wait for it in the host's place."""
        self._future.wait()

    def block_current_stream(self) -> None:
        """The same as :meth:`wait`."""
        self._future.wait()

    def is_completed(self) -> bool:
        """Whether the operation is complete, well or not.  Never blocks."""
        return self._future.done()

    def is_success(self) -> bool:
        """Whether the operation is complete and went well."""
        return self._future.done() and self._future.exception() is None

    def exception(self) -> BaseException | None:
        """What went wrong with the operation; None if nothing did, or if it is not complete."""
        return self._future.exception() if self._future.done() else None

    def result(self) -> Any:
        """Wait, and return the list of the tensors that were written."""
        self._future.wait()
        return self._result

    def source_rank(self) -> int:
        """The rank in the group whose message a receive took; waits for it.

        Raises:
            UsageError: the operation is no receive.
        """
        message = self._future.wait()
        if not isinstance(message, Message):
            raise UsageError("source_rank: only a receive has a source, and this work is another operation")
        return message.source

    _source_rank = source_rank

    def get_future(self) -> Any:
        """A ``torch.futures.Future`` of :meth:`result`."""
        # Torch's C++ takes a failure only from a future that C++ itself completed with one: an exception
        # set from Python is a value to it, and DDP's reducer dies of a value that is no tensor.  The class
        # that Python users need cannot be such a future.  C++ calls this with no code of Python between
        # it and whatever called C++, so the calling frame tells the two apart.
        if self._handed_out is None:
            self._handed_out = KeyedFuture(self._future, _giving(self._result))
        # The future of what was waited for has its value at once: C++ does not wait for it again.
        self._handed_out.done()
        if "get_future" in sys._getframe(1).f_code.co_names:
            return self._handed_out
        return self._handed_out.plain()


def _giving(result: Any) -> Callable[[Future[Any]], Any]:
    """Gives ``result`` if the future it is called with went well.

    It does not know the work, which knows the torch future: together they would hold the tensors until Python
    looks for cycles.
    """

    def value(future: Future[Any]) -> Any:
        future.value()
        return result

    return value


def _bytes(result: Any) -> int:
    """What keeping a result keeps in memory."""
    if isinstance(result, torch.Tensor):
        return sys.maxsize if result.layout != torch.strided else result.untyped_storage().nbytes()
    return sum(map(_bytes, result)) if isinstance(result, list) else 0


class KeyedFuture(torch.futures.Future[Any]):
    """A torch future whose callbacks may issue operations, as those of a shoal future may.

    Torch runs a callback in whichever thread completes the future, or registers the callback; so the
    operations that it issues would be numbered in an order that differs from rank to rank.  Callbacks
    registered here run as those of :class:`shoal.Future` do, where operations are matched by key.
    """

    def __init__(self, future: Future[Any], value: Callable[[Future[Any]], Any]) -> None:
        super().__init__()
        self._future = future
        self._value = value
        self._claim = threading.Lock()
        future.add_done_callback(self._settle)

    def _settle(self, future: Future[Any]) -> None:
        """Complete the torch future, once; returns when it is complete."""
        if not self._claim.acquire(blocking=False):
            # C++ marks it complete before it calls what was registered there.
            with contextlib.suppress(Exception):
                torch._C.Future.wait(self)
            return
        # What waits for this future in C++ may issue operations, but has no place of its own in the order
        # of callbacks that is the same on every rank.
        token = enter_scope(None)
        try:
            try:
                value = self._value(future)
            except Exception as error:
                self.set_exception(error)
            else:
                self.set_result(value)
        finally:
            leave_scope(token)

    def done(self) -> bool:
        if not self._future.done():
            return False
        self._settle(self._future)
        return True

    def wait(self) -> Any:
        try:
            self._future.wait()
        finally:
            if self._future.done():
                self._settle(self._future)
        return self._value(self._future)

    def value(self) -> Any:
        return self._value(self._future)

    def then(self, callback: Callable[[Any], Any]) -> KeyedFuture:
        def run(future: Future[Any]) -> Any:
            self._settle(future)
            return callback(self)

        return KeyedFuture(self._future.then(run), lambda future: future.value())

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        def run(future: Future[Any]) -> None:
            self._settle(future)
            callback(self)

        self._future.add_done_callback(run)

    def plain(self) -> Any:
        """A future of the same outcome that C++ completed, so that C++ can see a failure."""
        return torch._C.Future.then(self, lambda _: self._value(self._future))


def together(futures: Sequence[Future[Any]]) -> Future[Any]:
    """One future for several; who waits for it drives each of them, without a thread between."""
    result: Future[Any] = Future(_Several(futures))
    keys = [future.key for future in futures]
    if None not in keys:
        result.key = derive_key(b"together", *(key for key in keys if key is not None))
    return result


class _Several(Source):
    """Several operations as one."""

    def __init__(self, futures: Sequence[Future[Any]]) -> None:
        self._futures = futures

    def wait(self, timeout: float | None) -> bool:
        deadline = None if timeout is None else time.monotonic() + timeout
        for future in self._futures:
            try:
                future.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
            except WaitTimeout:
                if not future.done():
                    return False
            except Exception:
                return True  # exception() tells
        return True

    def done(self) -> bool:
        failed = any(future.done() and future.exception() is not None for future in self._futures)
        return failed or all(future.done() for future in self._futures)

    def exception(self) -> BaseException | None:
        errors = (future.exception() for future in self._futures if future.done())
        return next((error for error in errors if error is not None), None)

    def notify(self, fn: Callable[[], None]) -> None:
        collect_all(self._futures)._subscribe(lambda _: fn())
