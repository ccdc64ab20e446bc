"""Torch's handles of an operation, over a :class:`shoal.Future`.

``TorchWork.wait`` goes straight into the engine, as ``Future.wait`` does: no thread stands between.  Only who
asks for a ``torch.futures.Future`` pays for the thread that completes it.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ..common.copy_refusal import refuses_copies
from ..common.uncompiled import uncompiled
from ..common.wording import in_words
from ..future import Future, enter_scope, leave_scope
from ..torch_terms.durations import Duration
from ..torch_terms.work import WorkMethods, source_of

#: works that ended in Python and may live on in C++ (see Work.__del__), and how many bytes one may keep
_dropped: deque[TorchWork] = deque(maxlen=64)
_DROPPED_BYTES = 1024


@uncompiled
class TorchWork(WorkMethods, dist.Work):
    """One operation of a :class:`~shoal.compat.TorchProcessGroup`.

    Args:
        future: of the operation.
        result: the value of ``result()`` and of the torch future: the list of the tensors that were written.
    """

    def __init__(self, future: Future[Any], result: Any) -> None:
        super().__init__()
        self._future = future
        self._result = result
        self._handed_out: KeyedFuture | None = None
        self._waited = False

    #: whether somebody waited for it; nothing is to be kept of one that was not made completely
    _waited = True

    def __del__(self, dropped: deque[TorchWork] = _dropped) -> None:
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

    def wait(self, timeout: Duration | None = None) -> bool:
        self._waited = True
        return WorkMethods.wait(self, timeout)

    def block_current_stream(self) -> None:
        """The same as :meth:`wait`."""
        self._future.wait(blocking=False)

    def result(self) -> Any:
        """Wait, and return the list of the tensors that were written."""
        self._future.wait(blocking=False)
        return self._result

    def source_rank(self) -> int:
        """The rank in the group whose message a receive took; waits for it.

        Raises:
            UsageError: the operation is no receive.
        """
        return source_of(self._future.wait())

    _source_rank = source_rank

    def get_future(self) -> Any:
        """A ``torch.futures.Future`` of :meth:`result`."""
        # Torch's C++ takes a failure only from a future that C++ itself completed with one: an exception
        # set from Python is a value to it, and DDP's reducer dies of a value that is no tensor.  The class
        # that Python users need cannot be such a future.  C++ calls this with no code of Python between
        # it and whatever called C++, so the calling frame tells the two apart.
        if self._handed_out is None:
            self._handed_out = KeyedFuture(self._future, _giving(self._result))
        # After a wait the torch future must have its value at once: C++ does not wait for it again.
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
    """The bytes that stay in memory as long as a result is kept."""
    if isinstance(result, torch.Tensor):
        return sys.maxsize if result.layout != torch.strided else result.untyped_storage().nbytes()
    return sum(map(_bytes, result)) if isinstance(result, list) else 0


def for_torch(error: BaseException) -> Exception:
    """The error as a future of torch takes it, which refuses what is not an Exception."""
    return error if isinstance(error, Exception) else RuntimeError(in_words(error))


@refuses_copies(
    "a future",
    "an operation in progress",
    "Wait for it and copy its value",
)
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
        future.add_done_callback(self._complete)

    def _complete(self, future: Future[Any]) -> None:
        """Complete the torch future, once; returns when it is complete."""
        if not self._claim.acquire(blocking=False):
            # C++ marks it complete before it calls the callbacks that were registered there.
            with contextlib.suppress(Exception):
                torch._C.Future.wait(self)
            return
        # C++ code that waits for this future may issue operations, but has no place of its own in the order
        # of callbacks that is the same on every rank.
        token = enter_scope(None)
        try:
            try:
                value = self._value(future)
            except BaseException as error:
                self.set_exception(for_torch(error))
            else:
                self.set_result(value)
        finally:
            leave_scope(token)

    def done(self) -> bool:
        if not self._future.done():
            return False
        self._complete(self._future)
        return True

    def wait(self) -> Any:
        try:
            self._future.wait(blocking=False)
        finally:
            if self._future.done():
                self._complete(self._future)
        return self._value(self._future)

    def value(self) -> Any:
        return self._value(self._future)

    def then(self, callback: Callable[[Any], Any]) -> KeyedFuture:
        def run(future: Future[Any]) -> Any:
            self._complete(future)
            return callback(self)

        return KeyedFuture(self._future.then(run), lambda future: future.value())

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        def run(future: Future[Any]) -> None:
            self._complete(future)
            callback(self)

        self._future.add_done_callback(run)

    def plain(self) -> Any:
        """A future of the same outcome that C++ completed, so that C++ can see a failure."""
        return torch._C.Future.then(self, lambda _: self._value(self._future))
