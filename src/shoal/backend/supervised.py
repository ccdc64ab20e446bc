"""Backends whose collectives are moved by a foreign engine under the supervision of the native backend.

Each group has a channel of the native backend, its *control channel*.  A collective is submitted there as an
external operation: the members meet and compare their calls, with all promises of the native backend on
matching, deadlines, lost ranks and aborts.  At the same time the engine starts to move the data.  The
operation is complete when all members have met and the transfer of this rank is complete.

Transfers need a thread that polls them, in the order of their start.  A thread that waits for a future polls;
a thread of the backend polls for groups in which no thread waits.  Messages, barriers, agreements and groups
of one use the control channel alone.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from ..common.formatting import describe_error
from ..common.interrupts import defer_sigint
from ..future import Future, derive_key
from ..rendezvous.membership import Membership
from ..spec import FailureScope, Operation, OpKind, ReduceOp
from .base import Backend, DataChannel, GroupSpec, group_ident
from .engine import Communicator, Engine, Transfer
from .forwarding import ForwardingChannel
from .native.channel import NativeBackend, NativeChannel

if TYPE_CHECKING:
    from .. import _core

#: operations of the control channel alone
_CONTROL_KINDS = frozenset({OpKind.BARRIER, OpKind.SEND, OpKind.RECV})
#: seconds for which a waiting thread polls without a pause when all members have called the operation
_SPIN_S = 1.0
#: polls between two yields
_POLLS_PER_YIELD = 16
#: seconds for which a waiting thread without a transfer sleeps at a time
_SLICE_S = 0.1
#: seconds between two polls; the pause doubles from the first to the last while nothing completes
_MIN_PAUSE_S, _MAX_PAUSE_S = 50e-6, 1e-3
#: passes of the polling thread without a transfer after which it pauses for longer, and these seconds
_IDLE_PASSES, _IDLE_PAUSE_S = 50, 0.05
#: seconds that a thread which calls the engine gets when its group has failed
_STUCK_TIMEOUT_S = 1.0
#: seconds to wait for the comparison of calls after a transfer has failed
_COMPARISON_TIMEOUT_S = 5.0
#: operations to whose tensors an engine may still write; kept until the process ends
_abandoned: list[object] = []


class SupervisedBackend(Backend):
    """A native backend whose collectives are moved by :attr:`engine_type`; takes the native options."""

    engine_type: ClassVar[type[Engine]]
    scopes = NativeBackend.scopes

    @classmethod
    def check_options(cls, options: Mapping[str, Any]) -> None:
        NativeBackend.check_options(options)

    def __init__(
        self,
        membership: Membership,
        *,
        timeout: float,
        transport: str | None = None,
        heartbeat_timeout: float | None = None,
        shared_memory_limit: int | None = None,
    ) -> None:
        deadline = time.monotonic() + timeout
        self.engine = self.engine_type(membership)
        self.native = NativeBackend(
            membership,
            timeout=timeout,
            transport=transport,
            heartbeat_timeout=heartbeat_timeout,
            shared_memory_limit=shared_memory_limit,
        )
        self._broken = False
        self.polling = PollingThread(f"shoal-polling-{membership.rank}", self.engine.progress)
        try:
            if membership.size > 1:
                left = max(deadline - time.monotonic(), 0.1)
                self.engine.connect(_all_gather_bytes(self.native, membership, self.engine.address, left))
        except BaseException:
            self.close(0.0)
            raise

    def channel(self, group: GroupSpec) -> DataChannel:
        control = self.native.channel(group)
        if group.scope == FailureScope.PAIR or len(group.ranks) == 1:
            return control
        return SupervisedChannel(self, control, group)

    def hosts(self, ranks: Sequence[int]) -> list[int]:
        return self.native.hosts(ranks)

    def lost(self) -> frozenset[int]:
        return self.native.lost()

    @property
    def losses_reported(self) -> bool:  # type: ignore[override]
        return self.native.losses_reported

    def engine_broke(self) -> None:
        """Note that transfers are incomplete that nobody waits for any more."""
        self._broken = True

    def close(self, timeout: float) -> None:
        try:
            self.native.close(timeout)
        finally:
            if not self.polling.end(timeout):
                self._broken = True  # the engine does not return
            self.engine.close(broken=self._broken)

    def program_ends(self) -> None:
        self.native.program_ends()

    def after_fork_in_child(self) -> None:
        self.native.after_fork_in_child()
        self.polling = PollingThread("shoal-polling-forked", self.engine.progress)


class SupervisedChannel(ForwardingChannel):
    """The channel of one group: a control channel, and a communicator of the engine from its first use."""

    ordered = True

    def __init__(self, backend: SupervisedBackend, control: NativeChannel, spec: GroupSpec) -> None:
        super().__init__(control)
        self._backend, self._control, self._spec = backend, control, spec
        #: Held while operations are started, in the order of their submission.
        self._starting = threading.Lock()
        self._communicator: Communicator | None = None
        #: Operations that are submitted while the communicator is being made.
        self._queue: deque[_ExternalOperation] = deque()
        self._connecting: threading.Thread | None = None
        self._closed = False
        #: Operations whose transfers are started; only the first one is polled, so that the engine can start
        #: the later parts of transfers in the same order on all ranks.
        self._started: deque[_ExternalOperation] = deque()
        self._polling = threading.Lock()
        #: One element for each thread that polls because it waits for an operation.
        self.waiting: list[None] = []
        #: Whether the polling thread knows this channel.
        self.polled = False

    def submit(self, operation: Operation) -> Future[Any]:
        if operation.kind in _CONTROL_KINDS:
            return self._control.submit(operation)
        external = _ExternalOperation(self, self._control.external(operation), operation)
        try:
            with self._starting:
                if self._communicator is not None and not self._queue:
                    self._start(external, self._communicator)
                else:
                    self._queue.append(external)
                    self._start_connecting()
        except BaseException as error:  # Ctrl-C, or no thread can be started
            self._engine_failed(error)
            if not isinstance(error, Exception):
                raise
        outputs = operation.outputs
        value = None if not outputs else outputs[0] if len(outputs) == 1 else list(outputs)
        return Future(external, value=value)

    def _start_connecting(self) -> None:
        if self._connecting is None:
            name = f"shoal-connect-{self._spec.name}"
            thread = threading.Thread(target=self._connect, name=name, daemon=True)
            thread.start()
            self._connecting = thread

    def _connect(self) -> None:
        """Make the communicator when all members have called the first operation; start what is queued."""
        first = self._queue[0].core
        while not first.wait_met(_SLICE_S):
            pass
        if not first.met():
            return  # the group is broken or closed
        try:
            communicator = self._backend.engine.communicator(self._spec)
        except Exception as error:
            self._engine_failed(error)
            return
        while True:
            with self._starting:
                if self._closed or not self._queue:
                    self._communicator = communicator
                    return
                self._start(self._queue.popleft(), communicator)

    def _start(self, external: _ExternalOperation, communicator: Communicator) -> None:
        if external.core.done() or self._closed:  # it has failed
            return
        self._started.append(external)
        external.start(communicator)
        if not self.polled:
            self._backend.polling.add(self)
            self.polled = True

    # -- transfers -------------------------------------------------------------------------------

    @property
    def pending(self) -> bool:
        """Whether transfers are incomplete."""
        return bool(self._started)

    def poll(self) -> bool:
        """Advance the transfers, unless another thread does; return whether one was completed."""
        completed = False
        if self._started and self._polling.acquire(blocking=False):
            try:
                while self._started and self._started[0].advance():
                    self._started.popleft()
                    completed = True
            except BaseException as error:
                self._engine_failed(error)
                if not isinstance(error, Exception):
                    raise
            finally:
                self._polling.release()
        return completed

    def _poll_often(self, core: _core.Operation) -> None:
        for _ in range(_POLLS_PER_YIELD):
            self.poll()
            if core.done() or not self._started:
                return

    def wait(self, external: _ExternalOperation, timeout: float | None) -> bool:
        """Poll until an operation is complete; False after ``timeout`` seconds."""
        core = external.core
        end = float("inf") if timeout is None else time.monotonic() + timeout
        try:
            self.waiting.append(None)
            while True:
                defer_sigint(lambda: self._poll_often(core))
                if core.done():
                    return True
                now = time.monotonic()
                if now >= end:
                    return False
                if not core.met():
                    # A member is late.  Its call wakes this thread; data of earlier operations does not.
                    core.wait_met(min(_MAX_PAUSE_S if self._started else _SLICE_S, end - now))
                elif not external.spin_end:
                    external.spin_end = now + _SPIN_S
                elif now < external.spin_end:
                    os.sched_yield()  # all members move data: a pause here would be a pause for all
                else:
                    core.wait(min(_MIN_PAUSE_S, end - now))
        finally:
            if self.waiting:
                self.waiting.pop()

    def error_of(self, core: _core.Operation) -> BaseException | None:
        return self._control.error_of(core)

    def notify(self, core: _core.Operation, fn: Callable[[], None]) -> None:
        self._backend.native.notify(core, fn)

    def _engine_failed(self, error: BaseException) -> None:
        self._backend.engine_broke()
        self.abort(f"{self._backend.engine.name} failed there: {describe_error(error)}")

    # -- the control channel ---------------------------------------------------------------------

    def submit_all(self, operations: Sequence[Operation]) -> list[Future[Any]]:
        return self._control.submit_all(operations)

    def supports(self, kind: OpKind, dtype: torch.dtype | None, op: ReduceOp | None) -> bool:
        return kind in _CONTROL_KINDS or self._backend.engine.supports(kind, dtype, op)

    def close(self, timeout: float) -> None:
        deadline, failure = time.monotonic() + timeout, self._control.failure()
        try:
            self._control.close(timeout)  # meanwhile the polling thread moves what can still complete
        finally:
            left = max(deadline - time.monotonic(), 0.1)
            self._close_communicator(left if failure is None else min(left, _STUCK_TIMEOUT_S))

    def _close_communicator(self, timeout: float) -> None:
        with self._starting:
            self._closed = True
        connecting = self._connecting
        if connecting is not None:
            connecting.join(timeout)
            if connecting.is_alive():
                self._backend.engine_broke()
        self._backend.polling.discard(self)
        if not self._polling.acquire(timeout=timeout):
            self._backend.engine_broke()
            _abandoned.append(self)
            return
        try:
            if self._started:
                self._backend.engine_broke()
                _abandoned.append((self._communicator, self._started))
                self._started = deque()
            elif self._communicator is not None:
                self._communicator.close()
            self._communicator = None
        finally:
            self._polling.release()


class _ExternalOperation:
    """One operation: its meeting in the core and its transfer in the engine; the source of its future.

    Attributes:
        spin_end: the time until which waiting threads poll without a pause; 0: not set yet.
    """

    def __init__(self, channel: SupervisedChannel, core: _core.Operation, operation: Operation) -> None:
        self._channel = channel
        self.core = core
        self.spin_end = 0.0
        self._operation: Operation | None = operation
        self._transfer: Transfer | None = None
        self._complete = False
        self._failure: Exception | None = None
        self._failed_at = 0.0

    def start(self, communicator: Communicator) -> None:
        assert self._operation is not None
        try:
            self._transfer = communicator.start(self._operation)
        except Exception as error:
            self._fail(error)

    def advance(self) -> bool:
        """Advance the transfer; return whether it is complete.

        Raises:
            Exception: it failed, and not because the members called different operations.
        """
        if self._failure is None and self._transfer is not None and not self._complete:
            if self.core.done():
                return False  # it has failed: the program may use the tensors for something else
            try:
                self._complete = self._transfer.poll()
            except Exception as error:
                self._fail(error)
        if self._complete:
            self._transfer = self._operation = None
            self.core.finish_external()
        elif self._failure is not None and self._failed_at:
            # If the calls differ, the engine may fail before the core has compared them.
            compared = self.core.met() or time.monotonic() - self._failed_at > _COMPARISON_TIMEOUT_S
            if compared:
                self._failed_at = 0.0
                raise self._failure
        return self._complete

    def _fail(self, error: Exception) -> None:
        # The transfer is kept: the engine may still write to its memory.
        error.__traceback__ = None
        self._failure, self._failed_at = error, time.monotonic()

    # -- the source ------------------------------------------------------------------------------

    def wait(self, timeout: float | None) -> bool:
        return self.core.done() or self._channel.wait(self, timeout)

    def done(self) -> bool:
        if not self.core.done():
            defer_sigint(self._channel.poll)
        return self.core.done()

    def exception(self) -> BaseException | None:
        return self._channel.error_of(self.core)

    def notify(self, fn: Callable[[], None]) -> None:
        self._channel.notify(self.core, fn)


class PollingThread:
    """A thread that polls the channels in which no thread waits; started on first use.

    Args:
        progress: called between polls, also if no channel has a transfer.
    """

    def __init__(self, name: str, progress: Callable[[], None]) -> None:
        self._name, self._progress = name, progress
        self._lock = threading.Lock()
        self._channels: list[SupervisedChannel] = []
        self._changed = threading.Event()
        self._ended = False
        self._thread: threading.Thread | None = None

    def add(self, channel: SupervisedChannel) -> None:
        """Poll ``channel`` until it has no transfers; it sets ``polled`` to False then."""
        with self._lock:
            self._channels.append(channel)
            if self._thread is None:
                thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                thread.start()
                self._thread = thread
        self._changed.set()

    def discard(self, channel: SupervisedChannel) -> None:
        with self._lock, contextlib.suppress(ValueError):
            self._channels.remove(channel)

    def end(self, timeout: float) -> bool:
        """End the thread; return whether it has ended within ``timeout`` seconds."""
        self._ended = True
        self._changed.set()
        thread = self._thread
        if thread is None or thread is threading.current_thread():
            return True
        thread.join(timeout)
        return not thread.is_alive()

    def _run(self) -> None:
        idle_passes, pause = 0, _MIN_PAUSE_S
        while not self._ended:
            with self._lock:
                channels = list(self._channels)
            advanced = [channel.poll() for channel in channels if not channel.waiting]
            pending = any(channel.pending for channel in channels)
            idle_passes = 0 if pending else idle_passes + 1
            pause = _MIN_PAUSE_S if any(advanced) else min(2 * pause, _MAX_PAUSE_S)
            del channels, advanced
            if not pending:
                self._progress()
            if idle_passes >= _IDLE_PASSES:
                self._drop_idle()
                if self._changed.wait(_IDLE_PAUSE_S):
                    idle_passes = 0
            else:
                time.sleep(pause)

    def _drop_idle(self) -> None:
        self._changed.clear()
        with self._lock:
            for channel in list(self._channels):
                channel.polled = False
                if not channel.pending:  # otherwise it has just started an operation
                    self._channels.remove(channel)
                else:
                    channel.polled = True
            if self._channels or self._ended:
                self._changed.set()


def _all_gather_bytes(
    native: NativeBackend, membership: Membership, mine: bytes, timeout: float
) -> list[bytes]:
    """Return the ``mine`` of all ranks, exchanged in a native group."""
    ident = derive_key(b"engine", group_ident(f"{membership.job}/{membership.epoch}"))
    channel = native.channel(
        GroupSpec(name="engine", ident=ident, rank=membership.rank, ranks=tuple(range(membership.size)))
    )

    def all_gather(number: int, x: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
        parts = [torch.empty(size, dtype=x.dtype, device="cpu") for size in sizes]
        operation = Operation(OpKind.ALL_GATHER, number, 0, [x], parts, timeout, sizes=sizes)
        gathered: list[torch.Tensor] = channel.submit(operation).wait()
        return gathered

    try:
        length = torch.tensor([len(mine)], device="cpu")
        sizes = [int(size) for size in all_gather(0, length, [1] * membership.size)]
        raw = torch.tensor(list(mine), dtype=torch.uint8, device="cpu")
        return [bytes(part.tolist()) for part in all_gather(1, raw, sizes)]
    finally:
        channel.close(timeout)
