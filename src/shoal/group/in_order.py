"""One order of operations on every rank, for channels that can take them in no other.

A communicator of NCCL or MPI matches operations by their order alone.  Numbered operations come in one order
on every rank, operations issued in callbacks do not: these get a channel of their own and the order in
which rank 0 issues them.  Rank 0 writes their keys into the group's store, one after another; the others
submit operation *n* when its key is known and it was issued here too.  Nothing deadlocks: where one
operation is issued because another one is complete, that is so on rank 0 as well.

The two channels fail together: what breaks one ends what is pending in the other.

A feeder also connects a channel that needs all members for that, in a thread, at its first operation.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..backend.base import Backend, DataChannel, GroupSpec, Shortcut
from ..errors import GroupAborted, GroupClosed, GroupError, OperationTimeout, StoreError, StoreTimeout
from ..future import Future, derive_key
from ..recorder import FlightRecorder
from ..spec import Operation, OpKind, ReduceOp
from ..store import PrefixStore, Store
from ..streams import DeviceEvents, events_behind

#: Seconds between two looks at deadlines and failures while a feeder waits.
_LOOK = 0.1
#: Keys that are removed from the store together, when every rank has read them.
_PAGE = 256
#: Stands for a key where rank 0 issues nothing more.
_END = 0


def channel_of(backend: Backend, spec: GroupSpec, store: Store) -> DataChannel:
    """The channel of a group, which takes operations in any order whatever the backend's can do."""
    channel = backend.channel(spec)
    if channel.ordered or channel.collective:
        return InOrder(channel, backend, spec, store)
    return channel


class InOrder(DataChannel):
    """A channel, and one more for keyed operations if it takes them in one order only."""

    def __init__(self, channel: DataChannel, backend: Backend, spec: GroupSpec, store: Store) -> None:
        self.devices = channel.devices
        self._channel = channel
        self._backend, self._spec = backend, spec
        channel.on_failure = self._failed
        self._main = Feeder(channel, f"{spec.name} on rank {spec.rank}") if channel.collective else None
        self._order = Order(PrefixStore("callbacks", store), spec.rank, len(spec.ranks))
        self._making = threading.Lock()
        self._closed = False
        self._keyed: Feeder | None = None
        #: The first failure of the callbacks' channel: the other one is aborted because of it.
        self._cause: GroupError | None = None

    def submit(self, operation: Operation) -> Future[Any]:
        if operation.key and self._channel.ordered:
            return self._feeder_of_callbacks().submit(operation)
        return self._channel.submit(operation) if self._main is None else self._main.submit(operation)

    def submit_all(self, operations: Sequence[Operation]) -> list[Future[Any]]:
        if self._main is None:
            return self._channel.submit_all(operations)
        return [self._main.submit(operation) for operation in operations]

    def supports(self, kind: OpKind, dtype: torch.dtype | None, op: ReduceOp | None) -> bool:
        return self._channel.supports(kind, dtype, op)

    def check(self, operation: Operation) -> None:
        self._channel.check(operation)

    def shortcut(self, lock: threading.Lock, recorder: FlightRecorder | None) -> Shortcut:
        if self._main is None:
            return self._channel.shortcut(lock, recorder)
        return super().shortcut(lock, recorder)  # there is no short way to what is not connected yet

    def empty(self, nbytes: int, device: torch.device) -> torch.Tensor:
        return self._channel.empty(nbytes, device)

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
            # Others may have operations in that channel, though none was issued in a callback here.
            with suppress(GroupError):  # the group is closed, or the backend has no connections left
                self._feeder_of_callbacks().channel.abort(reason)

    def begin_close(self) -> None:
        for channel in self._channels():
            channel.begin_close()

    def close(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        with self._making:
            self._closed = True
            feeders = [feeder for feeder in (self._main, self._keyed) if feeder is not None]
        for feeder in feeders:
            feeder.close()
        for channel in self._channels():
            channel.close(max(deadline - time.monotonic(), 0.1))
        for feeder in feeders:
            feeder.join(max(deadline - time.monotonic(), 0.1))
        if self._channel.ordered:
            self._order.end()

    def _channels(self) -> list[DataChannel]:
        """The channel of numbered operations, and that of callbacks if there is one."""
        return [self._channel] if self._keyed is None else [self._channel, self._keyed.channel]

    def _feeder_of_callbacks(self) -> Feeder:
        with self._making:
            if self._keyed is None:
                spec = self._spec
                if self._closed:
                    raise GroupClosed(
                        f"{spec.name} on rank {spec.rank} was closed; make a new group to go on"
                    )
                own = replace(spec, name=f"{spec.name}/callbacks", ident=derive_key(b"callbacks", spec.ident))
                channel = self._backend.channel(own)
                channel.on_failure = self._failed
                name = f"{own.name} on rank {spec.rank}"
                self._keyed = Feeder(
                    channel, name, Callbacks(self._order, self._main_failure, self._callbacks_failed)
                )
            return self._keyed

    def _failed(self) -> None:
        if self.on_failure is not None:
            self.on_failure()


class Order:
    """The order in which rank 0 issues operations."""

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._next = 0
        self._known: int | None = None

    def next_key(self, issued: Sequence[int]) -> int | None:
        """The key of the next operation; None if rank 0 has not said it within a moment.

        Args:
            issued: the keys of those that this rank has issued and not submitted yet, in that order.

        Raises:
            GroupClosed: there is none, because rank 0 closed the group.
        """
        if self._known is None:
            if self._rank == 0:
                self._known = issued[0]
                self._store.set(str(self._next), str(self._known))
            else:
                with suppress(StoreTimeout):
                    self._known = int(self._store.get(str(self._next), timeout=_LOOK))
        if self._known == _END:
            raise GroupClosed("rank 0 closed the group and will not issue what was issued in a callback here")
        return self._known

    def go_on(self) -> None:
        """The next operation was submitted."""
        self._known = None
        self._next += 1
        page, rest = divmod(self._next, _PAGE)
        if rest == 0 and self._store.add(f"read {page}", 1) == self._size:
            for number in range(self._next - _PAGE, self._next):
                self._store.delete(str(number))
            self._store.delete(f"read {page}")

    def end(self) -> None:
        """This rank issues nothing more."""
        if self._rank == 0:
            with suppress(StoreError):  # nobody is left to read it
                self._store.set(str(self._next), str(_END))


@dataclass(frozen=True)
class Callbacks:
    """The part of a group that a feeder of operations of callbacks needs to know of its group.

    Attributes:
        order: of the operations.
        failure: of the channel of numbered operations; it ends those of callbacks too.
        failed: told why the channel of callbacks failed.
    """

    order: Order
    failure: Callable[[], GroupError | None]
    failed: Callable[[GroupError], None]

    def cause_of(self, error: BaseException) -> BaseException:
        """The error that broke the group, where an operation of a callback failed with ``error``.

        A channel that was aborted was so because the other one failed.  If a peer did that, the failure may
        still be on its way here.
        """
        deadline = time.monotonic() + _LOOK
        while isinstance(error, GroupAborted):
            failure = self.failure()
            if failure is not None:
                return failure
            if time.monotonic() > deadline:
                break
            time.sleep(_LOOK / 20)
        return error


class Feeder:
    """Gives operations to a channel when it can take them; they wait in a queue until then.

    Args:
        callbacks: the operations are those of callbacks; None: their order is that in which they come.
    """

    def __init__(self, channel: DataChannel, name: str, callbacks: Callbacks | None = None) -> None:
        self.channel = channel
        self._name, self._callbacks = name, callbacks
        #: Operations of callbacks that the channel has been given and that may not be complete.
        self._begun: list[_Queued] = []
        self._condition = threading.Condition()
        self._queue: deque[_Queued] = deque()
        self._ready = not channel.collective
        self._failure: GroupError | None = None
        self._closed = False
        self._thread: threading.Thread | None = None

    def submit(self, operation: Operation) -> Future[Any]:
        with self._condition:
            if self._callbacks is None and self._ready and not self._queue:
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
                if not self._ready:
                    self._connect(queued.operation.timeout)
                    self._ready = True
                # It leaves the queue afterwards: what is submitted meanwhile must not overtake it.
                queued.start(self.channel)
                with self._condition:
                    self._queue.remove(queued)
                if self._callbacks is not None:
                    self._begun.append(queued)
                    self._callbacks.order.go_on()
                del queued
            ended = GroupClosed(f"{self._name} was closed; make a new group to go on")
        except Exception as error:
            cause = error if self._callbacks is None else self._callbacks.cause_of(error)
            ended = cause if isinstance(cause, GroupError) else GroupError(f"{self._name}: {cause}")
            ended.__traceback__ = None  # it holds the frame of this thread
            if not isinstance(ended, GroupClosed):
                self._failure = ended
                if self._callbacks is not None:
                    self._callbacks.failed(ended)
                self.channel.abort(str(ended))
            self._begun.clear()
        with self._condition:
            queue, self._queue = self._queue, deque()
            self._thread = None
        for each in queue:
            each.fail(ended)

    def _connect(self, timeout: float) -> None:
        """Connect the channel; as soon as the channel of numbered operations fails, that fails too."""
        if self._callbacks is None:
            return self.channel.connect(timeout)
        connected, failure_of_other = threading.Event(), self._callbacks.failure

        def watch() -> None:
            while not connected.wait(_LOOK):
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
        """The operation that comes next; None at the end."""
        while True:
            # Before failures are looked at, since an operation that has failed is complete.
            self._begun = [each for each in self._begun if not each.done()]
            other = None if self._callbacks is None else self._callbacks.failure()
            if (failure := other or self.channel.failure()) is not None:
                raise failure
            with self._condition:
                if not (self._queue or self._closed):
                    if self._callbacks is None:
                        return None  # from now on the channel is given everything at once
                    self._condition.wait(_LOOK if self._begun else None)
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
                        f"it, or this rank not what comes before it, within {operation.timeout:g} s"
                    )
            with self._condition:
                if key is not None and len(self._queue) == len(queue) and not self._closed:
                    self._condition.wait(_LOOK)


class _Queued:
    """An operation that the channel is given later, as a source."""

    def __init__(self, operation: Operation, callbacks: Callbacks | None) -> None:
        self.operation = operation
        self._callbacks = callbacks
        self.deadline = time.monotonic() + operation.timeout
        #: The work that the caller has enqueued, on which the operation depends.
        self._before = events_behind((operation.inputs, operation.outputs), None, None)
        self._lock = threading.Lock()
        self._started = threading.Event()
        self._inner: Future[Any] | None = None
        self._listeners: list[Callable[[], None]] = []

    def future(self) -> Future[Any]:
        return Future(self, finish=lambda: self._given().value(), keep=self.operation)

    def start(self, channel: DataChannel) -> None:
        """Give the operation to ``channel``."""
        tensors = (self.operation.inputs, self.operation.outputs)
        with nullcontext() if self._before is None else self._before.streams_behind(tensors):
            self._go_on(channel.submit(self.operation))

    def fail(self, error: BaseException) -> None:
        failed: Future[Any] = Future()
        failed.set_exception(error)
        self._go_on(failed)

    def _go_on(self, inner: Future[Any]) -> None:
        with self._lock:
            self._inner = inner
            listeners, self._listeners = self._listeners, []
            self._started.set()
        for listener in listeners:
            self.notify(listener)

    def _given(self) -> Future[Any]:
        assert self._inner is not None
        return self._inner

    # -- the source ------------------------------------------------------------------------------

    def wait(self, timeout: float | None) -> bool:
        begun = time.monotonic()
        if not self._started.wait(timeout):
            return False
        inner = self._given()
        left = None if timeout is None else max(0.0, begun + timeout - time.monotonic())
        return inner.done() or inner._complete(left)

    def done(self) -> bool:
        return self._started.is_set() and self._given().done()

    def exception(self) -> BaseException | None:
        error = self._given().exception()
        return error if error is None or self._callbacks is None else self._callbacks.cause_of(error)

    def events(self) -> tuple[DeviceEvents | None, object]:
        return self._given()._device, self._given()._payload()

    def notify(self, fn: Callable[[], None]) -> None:
        with self._lock:
            inner = self._inner
            if inner is None:
                self._listeners.append(fn)
                return
        inner._subscribe(lambda _: fn())
