"""The same order of operations on all ranks, for channels that match operations by order alone.

NCCL and MPI communicators do.  Numbered operations have the same order on all ranks, but operations issued in
callbacks do not: they use a second channel, in the order in which rank 0 issues them.  Rank 0 writes their
keys to the group's store one by one; the other ranks submit operation *n* when they know its key and have
issued it too.  This cannot deadlock: an operation issued on completion of another one is so on rank 0 too.

A failure of one channel breaks the other one too.  A `SubmissionQueue` also connects a channel whose
connection needs all members, in a thread, at its first operation.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any

from ..backend.base import Backend, DataChannel, GroupSpec, Shortcut
from ..backend.forwarding import ForwardingChannel
from ..errors import GroupAborted, GroupClosed, GroupError, OperationTimeout, StoreError, StoreTimeout
from ..future import Future, derive_key
from ..recorder import FlightRecorder
from ..spec import Operation
from ..store import PrefixStore, Store
from ..streams import DeviceEvents, completion_events

#: Seconds between two checks of deadlines and failures while a feeder waits.
_POLL_INTERVAL_S = 0.1
#: Number of keys that are removed from the store together, when every rank has read them.
_KEYS_PER_PAGE = 256
#: Replaces a key when rank 0 issues no more operations.
_END_KEY = 0


def channel_of(backend: Backend, spec: GroupSpec, store: Store) -> DataChannel:
    """Return a channel for a group that takes operations in any order, with any backend."""
    channel = backend.channel(spec)
    if channel.ordered or channel.collective:
        return OrderedChannel(channel, backend, spec, store)
    return channel


class OrderedChannel(ForwardingChannel):
    """A channel, with a second one for keyed operations if its operations must have the same order."""

    def __init__(self, channel: DataChannel, backend: Backend, spec: GroupSpec, store: Store) -> None:
        super().__init__(channel)
        self.devices = channel.devices
        self._channel = channel
        self._backend, self._spec = backend, spec
        self._main = (
            SubmissionQueue(channel, f"{spec.name} on rank {spec.rank}") if channel.collective else None
        )
        self._order = CallbackOrder(PrefixStore("callbacks", store), spec.rank, len(spec.ranks))
        self._making = threading.Lock()
        self._closed = False
        self._keyed: SubmissionQueue | None = None
        #: The first failure of the callbacks' channel, for which the other one is aborted.
        self._cause: GroupError | None = None

    def submit(self, operation: Operation) -> Future[Any]:
        if operation.key and self._channel.ordered and self._channel.keeps_order(operation):
            return self._callback_queue().submit(operation)
        return self._channel.submit(operation) if self._main is None else self._main.submit(operation)

    def submit_all(self, operations: Sequence[Operation]) -> list[Future[Any]]:
        if self._main is None:
            return self._channel.submit_all(operations)
        return [self._main.submit(operation) for operation in operations]

    def shortcut(self, lock: threading.Lock, recorder: FlightRecorder | None) -> Shortcut:
        if self._main is None:
            return self._channel.shortcut(lock, recorder)
        return super().shortcut(lock, recorder)  # no fast path before the channel is connected

    @property
    def reported(self) -> bool:
        return self._channel.reported or (self._keyed is not None and self._keyed.channel.reported)

    @reported.setter
    def reported(self, value: bool) -> None:
        self._channel.reported = value

    def failure(self) -> GroupError | None:
        if self._cause is not None:
            return self._cause
        return self._main_failure() or (None if self._keyed is None else self._keyed.failure())

    def _main_failure(self) -> GroupError | None:
        return (self._main or self._channel).failure()

    def _callbacks_failed(self, error: GroupError) -> None:
        if self._main_failure() is None:
            self._cause = error
            self._channel.abort(str(error))

    def abort(self, reason: str) -> None:
        self._channel.abort(reason)
        if self._channel.ordered:
            # Other ranks may have operations in that channel even if this rank has none.
            with suppress(GroupError):  # the group is closed, or the backend has no connections left
                self._callback_queue().channel.abort(reason)

    def begin_close(self) -> None:
        for channel in self._channels():
            channel.begin_close()

    def close(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        with self._making:
            self._closed = True
            feeders = [feeder for feeder in (self._main, self._keyed) if feeder is not None]
        with ExitStack() as steps:  # runs all callbacks, in reverse order, even if one raises
            if self._channel.ordered:
                steps.callback(self._order.end)
            for feeder in feeders:
                steps.callback(lambda feeder: feeder.join(max(deadline - time.monotonic(), 0.1)), feeder)
            for channel in reversed(self._channels()):
                steps.callback(lambda channel: channel.close(max(deadline - time.monotonic(), 0.1)), channel)
            for feeder in feeders:
                feeder.close()

    def _channels(self) -> list[DataChannel]:
        """The channel of numbered operations, and the one of callbacks if it exists."""
        return [self._channel] if self._keyed is None else [self._channel, self._keyed.channel]

    def _callback_queue(self) -> SubmissionQueue:
        with self._making:
            if self._keyed is None:
                spec = self._spec
                if self._closed:
                    raise GroupClosed(
                        f"{spec.name} on rank {spec.rank} was closed; make a new group to go on"
                    )
                ident = derive_key(b"callbacks", spec.ident)
                own = replace(spec, name=f"{spec.name}/callbacks", ident=ident, for_callbacks=True)
                channel = self._backend.channel(own)
                channel.on_failure = self._on_inner_failure
                name = f"{own.name} on rank {spec.rank}"
                self._keyed = SubmissionQueue(
                    channel, name, CallbackHooks(self._order, self._main_failure, self._callbacks_failed)
                )
            return self._keyed


class CallbackOrder:
    """The order in which rank 0 issues operations."""

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._next = 0
        self._known: int | None = None

    def next_key(self, issued: Sequence[int]) -> int | None:
        """Return the key of the next operation; None if rank 0 has not written it in time.

        ``issued`` has the keys of operations that this rank has issued and not submitted yet, in that order.

        Raises:
            GroupClosed: rank 0 closed the group, and issues no more operations.
        """
        if self._known is None:
            if self._rank == 0:
                self._known = issued[0]
                self._store.set(str(self._next), str(self._known))
            else:
                with suppress(StoreTimeout):
                    self._known = int(self._store.get(str(self._next), timeout=_POLL_INTERVAL_S))
        if self._known == _END_KEY:
            raise GroupClosed("rank 0 closed the group without an operation that a callback here has issued")
        return self._known

    def advance(self) -> None:
        """Advance to the next operation; deletes keys that all ranks have read."""
        self._known = None
        self._next += 1
        page, rest = divmod(self._next, _KEYS_PER_PAGE)
        if rest == 0 and self._store.add(f"read {page}", 1) == self._size:
            for number in range(self._next - _KEYS_PER_PAGE, self._next):
                self._store.delete(str(number))
            self._store.delete(f"read {page}")

    def end(self) -> None:
        """Note, on rank 0, that no more operations are issued."""
        if self._rank == 0:
            with suppress(StoreError):  # no rank needs it any more
                self._store.set(str(self._next), str(_END_KEY))


@dataclass(frozen=True)
class CallbackHooks:
    """The interface of a group for the feeder of operations issued in callbacks.

    Attributes:
        order: the order of the operations.
        failure: returns the failure of the channel of numbered operations, which ends those of callbacks too.
        failed: called with the failure of the channel of callbacks.
    """

    order: CallbackOrder
    failure: Callable[[], GroupError | None]
    failed: Callable[[GroupError], None]

    def cause_of(self, error: BaseException) -> BaseException:
        """Return the error that broke the group, if an operation of a callback failed with ``error``.

        This channel is aborted because the other one failed.  If a peer aborted it, this rank may detect the
        failure of the other one a little later.
        """
        deadline = time.monotonic() + _POLL_INTERVAL_S
        while isinstance(error, GroupAborted):
            failure = self.failure()
            if failure is not None:
                return failure
            if time.monotonic() > deadline:
                break
            time.sleep(_POLL_INTERVAL_S / 20)
        return error


class SubmissionQueue:
    """A queue of operations that are submitted to a channel when it can take them.

    ``callbacks`` is given for operations issued in callbacks; None: they keep the order of ``submit``.
    """

    def __init__(self, channel: DataChannel, name: str, callbacks: CallbackHooks | None = None) -> None:
        self.channel = channel
        self._name, self._callbacks = name, callbacks
        #: Operations of callbacks that were submitted to the channel and may be pending.
        self._submitted: list[_Queued] = []
        self._condition = threading.Condition()
        self._queue: deque[_Queued] = deque()
        self._connected = not channel.collective
        self._failure: GroupError | None = None
        self._closed = False
        self._thread: threading.Thread | None = None

    def submit(self, operation: Operation) -> Future[Any]:
        with self._condition:
            if self._callbacks is None and self._connected and not self._queue:
                return self.channel.submit(operation)
            queued = _Queued(operation, self._callbacks)
            if self._closed:
                queued.fail(GroupClosed(f"{self._name} was closed; make a new group to go on"))
                return queued.future()
            if self._failure is not None:
                queued.fail(self._failure)
                return queued.future()
            self._queue.append(queued)
            self._condition.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name=f"shoal-order-{self._name}", daemon=True
                )
                self._thread.start()
            return queued.future()

    def failure(self) -> GroupError | None:
        return self._failure or self.channel.failure()

    def close(self) -> None:
        with self._condition:
            self._closed = True
            self._condition.notify_all()

    def join(self, timeout: float) -> None:
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout)

    def _run(self) -> None:
        ended: GroupError
        try:
            while (queued := self._next()) is not None:
                if not self._connected:
                    self._connect(queued.operation.timeout)
                    self._connected = True
                # Removed from the queue afterwards: operations submitted meanwhile must not overtake it.
                queued.start(self.channel)
                with self._condition:
                    self._queue.remove(queued)
                if self._callbacks is not None:
                    self._submitted.append(queued)
                    self._callbacks.order.advance()
                del queued
            ended = GroupClosed(f"{self._name} was closed; make a new group to go on")
        except Exception as error:
            cause = error if self._callbacks is None else self._callbacks.cause_of(error)
            ended = cause if isinstance(cause, GroupError) else GroupError(f"{self._name}: {cause}")
            ended.__traceback__ = None  # it refers to the frame of this thread
            if not isinstance(ended, GroupClosed):
                self._failure = ended
                if self._callbacks is not None:
                    self._callbacks.failed(ended)
                self.channel.abort(str(ended))
            self._submitted.clear()
        with self._condition:
            queue, self._queue = self._queue, deque()
            self._thread = None
        for each in queue:
            each.fail(ended)

    def _connect(self, timeout: float) -> None:
        """Connect the channel; fails as soon as the channel of numbered operations fails."""
        if self._callbacks is None:
            return self.channel.connect(timeout)
        connected, failure_of_other = threading.Event(), self._callbacks.failure

        def watch() -> None:
            while not connected.wait(_POLL_INTERVAL_S):
                if (failure := failure_of_other()) is not None:
                    self.channel.abort(str(failure))
                    break

        watcher = threading.Thread(target=watch, name=f"shoal-connecting-{self._name}", daemon=True)
        watcher.start()
        try:
            self.channel.connect(timeout)
        finally:
            connected.set()
            watcher.join()

    def _next(self) -> _Queued | None:
        """Return the next operation; None when the thread can end."""
        while True:
            # Before the check for failures, since an operation that has failed is complete.
            self._submitted = [each for each in self._submitted if not each.done()]
            other = None if self._callbacks is None else self._callbacks.failure()
            if (failure := other or self.channel.failure()) is not None:
                raise failure
            with self._condition:
                if not (self._queue or self._closed):
                    if self._callbacks is None:
                        return None  # from now on operations are submitted directly
                    self._condition.wait(_POLL_INTERVAL_S if self._submitted else None)
                    continue
                if self._closed:
                    return None
                queue = list(self._queue)
            if self._callbacks is None:
                return queue[0]
            key = self._callbacks.order.next_key([queued.operation.key for queued in queue])
            for queued in queue:
                if queued.operation.key == key:
                    return queued
                if queued.deadline < time.monotonic():
                    operation = queued.operation
                    raise OperationTimeout(
                        f"{operation.kind.name.lower()} in a callback ({self._name}): rank 0 did not issue "
                        f"it, or this rank did not issue an earlier one, within {operation.timeout:g} s"
                    )
            with self._condition:
                if key is not None and len(self._queue) == len(queue) and not self._closed:
                    self._condition.wait(_POLL_INTERVAL_S)


class _Queued:
    """An operation that is submitted later; the source of its future."""

    def __init__(self, operation: Operation, callbacks: CallbackHooks | None) -> None:
        self.operation = operation
        self._callbacks = callbacks
        self.deadline = time.monotonic() + operation.timeout
        #: Device work that the caller has enqueued and on which the operation depends.
        self._caller_events = completion_events((operation.inputs, operation.outputs), None, None)
        self._lock = threading.Lock()
        self._started = threading.Event()
        self._inner: Future[Any] | None = None
        self._listeners: list[Callable[[], None]] = []

    def future(self) -> Future[Any]:
        return Future(self, finish=lambda: self._inner_future().value(), keep=self.operation)

    def start(self, channel: DataChannel) -> None:
        """Submit the operation to ``channel``."""
        tensors = (self.operation.inputs, self.operation.outputs)
        with nullcontext() if self._caller_events is None else self._caller_events.ordered_streams(tensors):
            self._set_inner(channel.submit(self.operation))

    def fail(self, error: BaseException) -> None:
        failed: Future[Any] = Future()
        failed.set_exception(error)
        self._set_inner(failed)

    def _set_inner(self, inner: Future[Any]) -> None:
        with self._lock:
            self._inner = inner
            listeners, self._listeners = self._listeners, []
            self._started.set()
        for listener in listeners:
            self.notify(listener)

    def _inner_future(self) -> Future[Any]:
        assert self._inner is not None
        return self._inner

    # -- the source ------------------------------------------------------------------------------

    def wait(self, timeout: float | None) -> bool:
        begun = time.monotonic()
        if not self._started.wait(timeout):
            return False
        inner = self._inner_future()
        left = None if timeout is None else max(0.0, begun + timeout - time.monotonic())
        return inner.done() or inner._complete(left)

    def done(self) -> bool:
        return self._started.is_set() and self._inner_future().done()

    def exception(self) -> BaseException | None:
        error = self._inner_future().exception()
        return error if error is None or self._callbacks is None else self._callbacks.cause_of(error)

    def events(self) -> tuple[DeviceEvents | None, object]:
        return self._inner_future()._device, self._inner_future()._payload()

    def notify(self, fn: Callable[[], None]) -> None:
        with self._lock:
            inner = self._inner
            if inner is None:
                self._listeners.append(fn)
                return
        inner._subscribe(lambda _: fn())
