"""Torch's ``Work`` and ``Future`` on top of a :class:`shoal.Future`.

``TorchWork.wait`` calls the engine directly, as ``Future.wait`` does.  Only a ``torch.futures.Future`` needs
a thread that completes it.
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
from ..common.formatting import describe_error
from ..common.never_compile import never_compile
from ..future import Future, callback_scope
from ..torch_terms.arguments import Duration
from ..torch_terms.work import WorkMethods, source_of

#: small works that Python has released but C++ may still use (see TorchWork.__del__), and their maximum size
_recently_dropped: deque[TorchWork] = deque(maxlen=64)
_DROPPED_BYTES = 1024


def settle_dropped_works() -> None:
    """Make the works that are kept observe that they are complete.

    A work that has not been observed keeps the connections and the memory of its group, also when the group
    is closed.
    """
    for work in _recently_dropped.copy():
        work._future.done()


@never_compile
class TorchWork(WorkMethods, dist.Work):
    """One operation of a :class:`~shoal.compat.TorchProcessGroup`.

    Args:
        result: the list of its outputs.
        source: the sender of a receive; None: the value of ``future`` says, if it is a receive.
    """

    def __init__(self, future: Future[Any], result: Any, source: int | None = None) -> None:
        super().__init__()
        self._future = future
        self._result = result
        self._source = source
        self._torch_future: KeyedFuture | None = None
        self._waited = False

    #: whether wait() was called; True until __init__ has finished, so that __del__ ignores a partial object
    _waited = True

    def __del__(self, dropped: deque[TorchWork] = _recently_dropped) -> None:
        # A work that Python passes to C++ loses its Python part with the last Python reference, and then
        # never completes in C++.  torch's DDP does this in a Join context with the number of ranks that still
        # train: only the C++ backward pass waits for it.  So keep small works that Python did not wait for.
        if not self._waited and _bytes(self._result) <= _DROPPED_BYTES:
            dropped.append(self)

    @property
    def future(self) -> Future[Any]:
        """The :class:`shoal.Future` of the operation."""
        return self._future

    def wait(self, timeout: Duration | None = None) -> bool:
        self._waited = True
        return WorkMethods.wait(self, timeout)

    block_current_stream = WorkMethods.synchronize

    def result(self) -> Any:
        """Wait, and return the list of output tensors."""
        self._future.wait(blocking=False)
        return self._result

    def source_rank(self) -> int:
        """Wait, and return the sender's rank in the group; raise UsageError if this is not a receive."""
        value = self._future.wait()
        return source_of(value) if self._source is None else self._source

    _source_rank = source_rank

    def get_future(self) -> Any:
        """Return a ``torch.futures.Future`` of :meth:`result`."""
        # Torch's C++ recognises a failure only in a future that C++ itself completed with an error.  An
        # exception set from Python is a value to it, and DDP's reducer crashes on a value that is not a
        # tensor.  The class that Python users need cannot be such a future.  C++ calls this method without a
        # Python frame in between, so the calling frame shows whether Python or C++ called it.
        if self._torch_future is None:
            self._torch_future = KeyedFuture(self._future, _constant_on_success(self._result))
        # After a wait the torch future must already have its value: C++ does not wait for it again.
        self._torch_future.done()
        if "get_future" in sys._getframe(1).f_code.co_names:
            return self._torch_future
        return self._torch_future.plain()


def _constant_on_success(result: Any) -> Callable[[Future[Any]], Any]:
    """Return a function that returns ``result``, or raises the error of the future that it is called with.

    It must not refer to the work: such a cycle would keep tensors until the next garbage collection.
    """

    def value(future: Future[Any]) -> Any:
        future.value()
        return result

    return value


def _bytes(result: Any) -> int:
    """Return the number of bytes that a result keeps in memory."""
    if isinstance(result, torch.Tensor):
        return sys.maxsize if result.layout != torch.strided else result.untyped_storage().nbytes()
    return sum(map(_bytes, result)) if isinstance(result, list) else 0


@refuses_copies("a future", "an operation in progress", "Wait for it and copy its value")
class KeyedFuture(torch.futures.Future[Any]):
    """A torch future whose callbacks may issue operations, like those of a shoal future.

    Torch runs a callback in the thread that completes the future or registers the callback, so the
    operations issued by callbacks would be numbered in a different order on each rank.  Callbacks registered
    here run like those of :class:`shoal.Future`, where operations are matched by key.
    """

    def __init__(self, future: Future[Any], value: Callable[[Future[Any]], Any]) -> None:
        super().__init__()
        self._future = future
        self._value = value
        self._claim = threading.Lock()
        future.add_done_callback(self._complete)

    def _complete(self, future: Future[Any]) -> None:
        """Complete the torch future, once; return when it is complete."""
        if not self._claim.acquire(blocking=False):
            # C++ marks it complete before it runs callbacks registered in C++.
            with contextlib.suppress(Exception):
                torch._C.Future.wait(self)
            return
        # C++ code that waits for this future may issue operations, but has no position in the order of
        # callbacks that is the same on every rank.
        token = callback_scope.set(None)
        try:
            try:
                value = self._value(future)
            except Exception as error:
                self.set_exception(error)
            except BaseException as error:  # a torch future accepts only an Exception
                self.set_exception(RuntimeError(describe_error(error)))
            else:
                self.set_result(value)
        finally:
            callback_scope.reset(token)

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
        """Return a future of the same outcome, completed by C++ so that C++ recognises a failure."""
        return torch._C.Future.then(self, lambda _: self._value(self._future))
