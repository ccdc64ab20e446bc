"""Backends whose collectives are moved by a foreign engine under the supervision of the native backend.

Each group has a channel of the native backend, its *control channel*.  A collective is submitted there as an
external operation: the members meet and compare their calls, with all promises of the native backend on
matching, deadlines, lost ranks and aborts.  At the same time the engine starts to move the data.  The
external operation is complete when all members have met and the transfer of this rank is complete.

The future of a *late* engine is complete with the external operation.  That of an early engine is complete
when the work is enqueued on a stream; a thread that blocks for its result then waits for the external
operation too, so it gets the error of a transfer that was ended.

A collective that is captured into a graph has no external operation, because the host does not see its
replays.  A group that has captured one is watched until it is closed: if it fails, its transfers are ended,
and so are those of replays.

Transfers need a thread that polls them, in the order of their start.  A thread that waits for a future polls;
a thread of the backend polls for groups in which no thread waits.  Messages, barriers,
agreements, collectives on the CPU if the engine's device is another, and groups of one on the CPU use the
control channel alone.
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
from ..errors import CollectiveMismatch, InvalidFutureState, OperationTimeout, UsageError
from ..future import Future, derive_key
from ..recorder import FlightRecorder
from ..rendezvous.membership import Membership
from ..spec import FailureScope, Operation, OpKind, ReduceOp
from ..statistics import GroupStatistics
from ..streams import DeviceEvents, completion_events, runtime_of
from .base import Backend, DataChannel, GroupSpec, NoShortcut, Shortcut
from .device_messages import submit_device_message
from .engine import Communicator, Engine, Transfer
from .forwarding import ForwardingChannel
from .native.channel import NativeBackend, NativeChannel
from .native.gathering import all_gather_bytes
from .polling_thread import PollingThread

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
#: the same for early engines, whose results do not wait for a poll
_EARLY_MIN_PAUSE_S, _EARLY_MAX_PAUSE_S = 1e-3, 10e-3
#: seconds that a thread which calls the engine gets when its group has failed
_STUCK_TIMEOUT_S = 1.0
#: seconds to wait for the comparison of calls after a transfer has failed
_COMPARISON_TIMEOUT_S = 5.0
#: maximum number of bytes that a group's first member gives to the others for a communicator
_SETUP_BYTES = 1000
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
        progress_threads: int | None = None,
    ) -> None:
        deadline = time.monotonic() + timeout
        self.engine = self.make_engine(membership)
        self.native = NativeBackend(
            membership,
            timeout=timeout,
            transport=transport,
            heartbeat_timeout=heartbeat_timeout,
            shared_memory_limit=shared_memory_limit,
            progress_threads=progress_threads,
        )
        self._broken = False
        self.polling = self._polling_thread(f"shoal-polling-{membership.rank}")
        try:
            if membership.size > 1:
                left = max(deadline - time.monotonic(), 0.1)
                self.engine.connect(all_gather_bytes(self.native, membership, self.engine.address, left))
        except BaseException:
            self.close(0.0)
            raise

    def make_engine(self, membership: Membership) -> Engine:
        """Return the engine of this process; backends whose engines take options override it."""
        return self.engine_type(membership)

    def channel(self, group: GroupSpec) -> DataChannel:
        control = self.native.channel(group)
        if self.engine.device == "cpu" and (group.scope == FailureScope.PAIR or len(group.ranks) == 1):
            return control
        return SupervisedChannel(self, control, group)

    def hosts(self, ranks: Sequence[int]) -> list[int]:
        return self.native.hosts(ranks)

    def totals(self) -> GroupStatistics | None:
        return self.native.totals()

    def status_page(self) -> object:
        return self.native.status_page()

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
        self.polling = self._polling_thread("shoal-polling-forked")

    def _polling_thread(self, name: str) -> PollingThread:
        early = self.engine.early
        pauses = (_EARLY_MIN_PAUSE_S, _EARLY_MAX_PAUSE_S) if early else (_MIN_PAUSE_S, _MAX_PAUSE_S)
        return PollingThread(name, pauses)


class SupervisedChannel(ForwardingChannel):
    """The channel of one group: a control channel, and a communicator of the engine from its first use."""

    ordered = True

    def __init__(self, backend: SupervisedBackend, control: NativeChannel, spec: GroupSpec) -> None:
        super().__init__(control)
        self._backend, self._control, self._spec = backend, control, spec
        self._engine = backend.engine
        self.devices = frozenset({"cpu", self._engine.device})
        #: The device of the communicator; None before the first use.
        self._device: torch.device | None = None
        #: Held while operations are started, in the order of their submission.
        self._starting = threading.Lock()
        self._communicator: Communicator | None = None
        #: Operations that are submitted while the communicator is being made, or while an earlier one is not
        #: launched; they are started by a thread.
        self._queue: deque[_ExternalOperation] = deque()
        self._queue_thread: threading.Thread | None = None
        self._closed = False
        #: Operations whose transfers are started; only the first one is polled, so that the engine can start
        #: the later parts of transfers in the same order on all ranks.
        self._started: deque[_ExternalOperation] = deque()
        self._polling = threading.Lock()
        #: Number of collectives that graphs have captured.
        self._captures = 0
        #: Ends the transfers of a group that has failed; whether they no longer use memory.
        self._aborting: threading.Thread | None = None
        self._transfers_ended = False
        #: One element for each thread that polls because it waits for an operation.
        self.waiting: list[None] = []
        #: Whether the polling thread knows this channel.
        self.polled = False

    def submit(self, operation: Operation) -> Future[Any]:
        if not self.keeps_order(operation):
            if self._on_device(operation):
                return submit_device_message(self._control, operation)
            return self._control.submit(operation)
        if operation.captured:
            return self._capture(operation)
        external = _ExternalOperation(self, self._control.external(operation), operation)
        future = external.future(self._engine.early)
        try:
            if operation.kind is OpKind.ALL_TO_ALL and self._engine.early:
                external.counts = self._exchange_counts(operation)
            # An engine that Ctrl-C interrupts between two of its calls could not be used any more.
            defer_sigint(lambda: self._start_or_queue(external))
        except BaseException as error:  # Ctrl-C, or no thread can be started
            self._engine_failed(error)
            if not isinstance(error, Exception):
                raise
        external.watch()
        return future

    def _start_or_queue(self, external: _ExternalOperation) -> None:
        with self._starting:
            if self._communicator is not None and not self._queue:
                self._start(external, self._communicator)
                if external.launched():
                    return
            else:
                external.follow_caller()
            self._queue.append(external)
            if self._queue_thread is None:
                name = f"shoal-start-{self._spec.name}"
                thread = threading.Thread(target=self._run_queue, name=name, daemon=True)
                thread.start()
                self._queue_thread = thread

    def _capture(self, operation: Operation) -> Future[Any]:
        """Start a collective whose work the current stream captures, and wait until it is captured."""
        events = DeviceEvents(captured=True)
        key = derive_key(b"captured", self._spec.ident, self._captures)
        future: Future[Any] = Future(device=events, keep=operation.inputs, key=key)
        deadline = time.monotonic() + operation.timeout
        try:
            while not self._capture_after_queue(operation, events, deadline):
                self._pause_in_capture(operation, deadline)
        except BaseException as error:
            self._engine_failed(error)
            if not isinstance(error, Exception):
                raise
            error.__traceback__ = None
            future.set_exception(self._control.failure() or error)
        else:
            future.set_result(operation.result)
        return future

    def _capture_after_queue(self, operation: Operation, events: DeviceEvents, deadline: float) -> bool:
        """Capture a collective, unless earlier ones are not launched yet; return whether it is captured."""
        started: list[Transfer] = []
        with self._starting:
            if self._queue:
                return False
            communicator = self._communicator
            assert communicator is not None  # checked
            self._captures += 1
            defer_sigint(lambda: started.append(communicator.start(operation)))
            while not started[0].launched():
                self._pause_in_capture(operation, deadline)
            assert started[0].events is not None
            events.add(started[0].events)
            if not self.polled:
                self._backend.polling.add(self)
                self.polled = True
        return True

    def _pause_in_capture(self, operation: Operation, deadline: float) -> None:
        if (failure := self._control.failure()) is not None:
            raise failure
        if time.monotonic() > deadline:
            raise OperationTimeout(
                f"{operation.kind.name.lower()} on rank {self._spec.rank} was not captured within "
                f"{operation.timeout:g} s, because {self._engine.name} waits for other ranks; call each "
                "operation once on all ranks before the capture"
            )
        time.sleep(_MIN_PAUSE_S)

    def keeps_order(self, operation: Operation) -> bool:
        return operation.kind not in _CONTROL_KINDS and (
            self._engine.device == "cpu" or self._on_device(operation)
        )

    def _exchange_counts(self, operation: Operation) -> Future[Any]:
        """Send to each member the number of elements for it; the meeting does not compare them."""
        unique = operation.key or operation.number
        key = derive_key(b"counts", self._spec.ident, unique)
        counts = [torch.tensor([x.numel()], device="cpu") for x in operation.inputs]
        room = [torch.empty_like(count) for count in counts]
        exchange = Operation(OpKind.ALL_TO_ALL, -1, key, counts, room, operation.timeout)
        return self._control.submit(exchange)

    def _on_device(self, operation: Operation) -> bool:
        tensors = operation.inputs or operation.outputs
        return bool(tensors) and not tensors[0].is_cpu

    def check(self, operation: Operation) -> None:
        self._control.check(operation)
        if not self._on_device(operation):
            return
        device = (operation.inputs or operation.outputs)[0].device
        for tensor in (*operation.inputs, *operation.outputs):
            if tensor.device != device:
                raise self._refusal(operation, f"has tensors on {device} and on {tensor.device}")
        captured = operation.captured
        if captured:
            possible = self._engine.captures
        else:  # the group has numbered a collective because it is not captured
            possible = operation.number >= 0 or not runtime_of(device).capturing(device)
        if not possible:
            what = "in a callback " if operation.key else ""
            raise self._refusal(
                operation, f"{what}cannot be captured into a graph; call it before the capture"
            )
        if operation.kind in _CONTROL_KINDS:
            return
        if self._device not in (None, device):
            raise self._refusal(
                operation, f"has tensors on {device}, but this group uses {self._device}; move them there"
            )
        if captured and self._communicator is None:
            raise self._refusal(
                operation,
                "cannot be captured yet, because the group has not run a collective on the device; "
                "call it once, and wait for it, before the capture",
            )
        self._device = device

    def _refusal(self, operation: Operation, problem: str) -> UsageError:
        spec = self._spec
        return UsageError(
            f"{operation.kind.name.lower()} on rank {spec.rank} of group {spec.name!r} {problem}"
        )

    def _run_queue(self) -> None:
        """Make the communicator, if there is none, and start what is queued."""
        try:
            self._engine.prepare_thread(self._queue[0].device)
            if self._communicator is not None or self._connect():
                self._start_queued()
        except Exception as error:
            self._engine_failed(error)

    def _connect(self) -> bool:
        """Make the communicator when all members have called an operation; return whether it is made."""
        first = self._queue[0]
        while not first.core.wait_met(_SLICE_S):
            pass
        if not first.core.met():
            return False  # the group is broken or closed
        setup = _CommunicatorSetup(self._control, self._spec, first.device, first.timeout)
        communicator = self._engine.communicator(setup)
        with self._starting:
            if not self._closed:
                self._communicator = communicator
                return True
        communicator.abort()  # nobody closes it any more
        return False

    def _start_queued(self) -> None:
        communicator = self._communicator
        assert communicator is not None
        while True:
            with self._starting:
                if self._closed or not self._queue:
                    self._queue_thread = None
                    return
                external = self._queue[0]
                self._start(external, communicator)
            pause = _MIN_PAUSE_S
            while not external.launched():
                time.sleep(pause)
                pause = min(2 * pause, _MAX_PAUSE_S)
            with self._starting:
                self._queue.popleft()

    def _start(self, external: _ExternalOperation, communicator: Communicator) -> None:
        if external.started or external.core.done() or self._closed:  # done: it has failed
            return
        self._started.append(external)
        external.start(communicator)
        if not self.polled:
            self._backend.polling.add(self)
            self.polled = True

    # -- transfers -------------------------------------------------------------------------------

    def captured(self, tensors: Sequence[torch.Tensor]) -> bool:
        device = tensors[0].device if tensors and not tensors[0].is_cpu else None
        return device is not None and runtime_of(device).capturing(device)

    @property
    def pending(self) -> bool:
        """Whether transfers are incomplete."""
        return bool(self._started)

    @property
    def watched(self) -> bool:
        """Whether replays of graphs are ended when the group fails."""
        return self._captures > 0 and self._aborting is None

    def poll(self) -> bool:
        """Advance the transfers, unless another thread does; return whether one was completed."""
        completed = False
        if self.watched and self._control.failure() is not None and self._polling.acquire(blocking=False):
            try:
                self._abort_transfers()
            finally:
                self._polling.release()
        if self._started and self._polling.acquire(blocking=False):
            try:
                while self._started and self._started[0].advance():
                    self._started.popleft()
                    completed = True
                if self._started and self._started[0].core.done():
                    self._abort_transfers()
            except BaseException as error:
                self._engine_failed(error)
                if not isinstance(error, Exception):
                    raise
            finally:
                self._polling.release()
        return completed

    def prepare_thread(self, prepared: set[torch.device]) -> None:
        """Prepare this thread for polls of the channel's device, unless ``prepared`` has it."""
        device = self._device
        if device is not None and device not in prepared:
            self._engine.prepare_thread(device)
            prepared.add(device)

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
        self.abort(f"{self._engine.name} failed there: {describe_error(error)}")

    def _abort_transfers(self) -> None:
        """End the transfers of the group, which has failed.  Requires ``_polling``."""
        communicator = self._communicator
        if self._aborting is None and communicator is not None:

            def abort() -> None:
                with contextlib.suppress(Exception):  # then the tensors are kept
                    if self._device is not None:
                        self._engine.prepare_thread(self._device)
                    self._transfers_ended = communicator.abort()
                if self._transfers_ended:
                    with self._polling:
                        self._started = deque()

            thread = threading.Thread(target=abort, name=f"shoal-abort-{self._spec.name}", daemon=True)
            thread.start()
            self._aborting = thread

    # -- the control channel ---------------------------------------------------------------------

    def submit_all(self, operations: Sequence[Operation]) -> list[Future[Any]]:
        if any(self._on_device(operation) for operation in operations):
            return [self.submit(operation) for operation in operations]
        return self._control.submit_all(operations)

    def supports(self, kind: OpKind, dtype: torch.dtype | None, op: ReduceOp | None) -> bool:
        return kind in _CONTROL_KINDS or self._engine.supports(kind, dtype, op)

    def shortcut(self, lock: threading.Lock, recorder: FlightRecorder | None) -> Shortcut:
        # It takes tensors of the CPU only.
        return NoShortcut() if self._engine.device == "cpu" else self._control.shortcut(lock, recorder)

    def empty(self, nbytes: int, device: torch.device) -> torch.Tensor:
        if device.type != "cpu":
            return torch.empty(nbytes, dtype=torch.uint8, device=device)
        return self._control.empty(nbytes, device)

    def close(self, timeout: float) -> None:
        deadline, failure = time.monotonic() + timeout, self._control.failure()
        try:
            self._control.close(timeout)  # meanwhile the polling thread moves what can still complete
        finally:
            left = max(deadline - time.monotonic(), 0.1)
            failed = failure is not None or self._control.failure() is not None
            self._close_communicator(min(left, _STUCK_TIMEOUT_S) if failed else left, failed)

    def _close_communicator(self, timeout: float, failed: bool) -> None:
        if not self._starting.acquire(timeout=timeout):  # a thread does not return from the engine
            self._backend.engine_broke()
            _abandoned.append(self)
            return
        self._closed = True
        self._starting.release()
        thread = self._queue_thread
        if thread is not None:
            thread.join(timeout)
            if thread.is_alive():
                self._backend.engine_broke()
        self._backend.polling.discard(self)
        if not self._polling.acquire(timeout=timeout):
            self._backend.engine_broke()
            _abandoned.append(self)
            return
        try:
            aborts = bool(self._started) or (failed and self._engine.early)
            if aborts:
                self._abort_transfers()
            elif self._communicator is not None:
                self._communicator.close()
        finally:
            self._polling.release()
        if aborts and self._aborting is not None:
            self._aborting.join(timeout)
        if self._started and not self._transfers_ended:
            self._backend.engine_broke()
            _abandoned.append((self._communicator, self._started))
        self._started = deque()
        self._queue = deque()
        self._communicator = None


class _CommunicatorSetup:
    """The setup of one communicator; see :class:`~shoal.backend.engine.Setup`."""

    def __init__(self, control: NativeChannel, spec: GroupSpec, device: torch.device, timeout: float) -> None:
        self._control, self._timeout = control, timeout
        self.spec, self.device = spec, device
        self._calls = 0

    def from_first(self, make: Callable[[], bytes]) -> bytes:
        first = self.spec.rank == 0
        made = make() if first else b""
        assert len(made) <= _SETUP_BYTES
        room = torch.tensor(list(made.ljust(_SETUP_BYTES, b"\0")), dtype=torch.uint8, device="cpu")
        length = torch.tensor([len(made)], device="cpu")
        for x in (length, room):
            self._calls += 1
            key = derive_key(b"setup", self.spec.ident, self._calls)
            inputs = [x] if first else []
            self._control.submit(
                Operation(OpKind.BROADCAST, -1, key, inputs, [x], self._timeout, root=0)
            ).wait()
        return bytes(room.tolist()[: int(length)])

    def check(self) -> None:
        if (failure := self._control.failure()) is not None:
            raise failure


class _ExternalOperation:
    """One operation: its meeting in the core and its transfer in the engine; the source of a late future.

    Attributes:
        device: the device of its tensors.
        timeout: in seconds, as submitted.
        started: whether it was passed to the engine.
        spin_end: the time until which waiting threads poll without a pause; 0: not set yet.
        counts: of an all-to-all of an early engine: the numbers of elements from each member.
    """

    def __init__(self, channel: SupervisedChannel, core: _core.Operation, operation: Operation) -> None:
        self._channel = channel
        self.core = core
        self.device = (operation.inputs or operation.outputs)[0].device
        self.timeout = operation.timeout
        self.started = False
        self.spin_end = 0.0
        self.counts: Future[Any] | None = None
        self._value = operation.result
        self._operation: Operation | None = operation
        self._transfer: Transfer | None = None
        self._complete = False
        self._failure: Exception | None = None
        self._failed_at = 0.0
        #: Work of the caller on which an operation depends that is started later by another thread.
        self._caller_events: DeviceEvents | None = None
        #: The future of an early engine, and its events, until it is complete.
        self._early: tuple[Future[Any], DeviceEvents] | None = None

    def future(self, early: bool) -> Future[Any]:
        """Make the future of the operation; called once, before it is started."""
        assert self._operation is not None
        if not early:
            return Future(self, value=self._value)
        events = DeviceEvents(check=self._check)
        future: Future[Any] = Future(device=events, keep=self._operation.inputs)
        self._early = future, events
        return future

    def watch(self) -> None:
        """Make the future of an early engine fail if the operation fails before it is launched."""
        if self._early is not None:
            self.notify(self._fail_early)

    def follow_caller(self) -> None:
        """Note the current streams: the operation will be started by another thread."""
        assert self._operation is not None
        self._caller_events = completion_events(self._tensors(self._operation), None, None)

    def start(self, communicator: Communicator) -> None:
        operation, events = self._operation, self._caller_events
        assert operation is not None
        self.started, self._caller_events = True, None
        try:
            with (
                contextlib.nullcontext()
                if events is None
                else events.ordered_streams(self._tensors(operation))
            ):
                self._transfer = communicator.start(operation)
        except Exception as error:
            self._fail(error)

    @staticmethod
    def _tensors(operation: Operation) -> object:
        return operation.inputs, operation.outputs

    def launched(self) -> bool:
        """Continue to launch the transfer; return whether the next operation can be started."""
        early, transfer = self._early, self._transfer
        if early is None or transfer is None or self._failure is not None or self.core.done():
            return True  # or nothing can be launched any more
        future, events = early
        try:
            if not transfer.launched():
                return False
            assert transfer.events is not None
            events.add(transfer.events)
        except Exception as error:
            self._fail(error)
            return True
        with contextlib.suppress(InvalidFutureState):  # it has failed
            future.set_result(self._value)
        self._early = self._value = None  # they refer to this object, and to the outputs
        return True

    def _fail_early(self) -> None:
        early, error = self._early, self._channel.error_of(self.core)
        if early is not None and error is not None:
            with contextlib.suppress(InvalidFutureState):  # its work was enqueued before
                early[0].set_exception(error)
            self._early = None

    def _check(self, timeout: float) -> bool:
        """Wait for the external operation, and raise its error; see :class:`~shoal.streams.DeviceEvents`."""
        complete = self.core.done() or (timeout > 0 and self.wait(timeout))
        if complete and (error := self.exception()) is not None:
            raise error
        return complete

    def advance(self) -> bool:
        """Advance the transfer; return whether it is complete.

        Raises:
            Exception: it failed, and not because the members called different operations.
        """
        if self._early is not None and self._failure is None:
            return False  # it is not launched yet
        if self._failure is None and self._transfer is not None and not self._complete:
            if self.core.done():
                return False  # it has failed: the program may use the tensors for something else
            try:
                self._complete = self._compare_counts() and self._transfer.poll()
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

    def _compare_counts(self) -> bool:
        """Compare the numbers of elements of an all-to-all; return whether they are known and equal."""
        counts = self.counts
        if counts is None:
            return True
        if not counts.done() or counts.exception() is not None:  # then the group has failed
            return False
        assert self._operation is not None
        for rank, (x, count) in enumerate(zip(self._operation.outputs, counts.value(), strict=True)):
            if x.numel() != int(count):
                raise CollectiveMismatch(
                    f"all_to_all: rank {rank} sends {int(count)} elements, "
                    f"but the output for its part has {x.numel()}"
                )
        self.counts = None
        return True

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
