"""The submission of operations from a group to its data channel.

An operation is numbered and submitted in one critical section, so that the channel receives operations in the
order of their numbers, from any thread.  Operations issued in callbacks of futures run in different orders on
different ranks: instead of a number they get a key from :mod:`shoal.future`, which is equal on all ranks.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from typing import Any, TypeVar

import torch
from torch.autograd import profiler

from .. import config, failure_report
from ..backend.base import DataChannel, GroupSpec
from ..common.arguments import checked_seconds
from ..errors import ForkedProcess, GroupAborted, GroupClosed, GroupError, UnsupportedOperation
from ..future import Future, FutureAsSource, callback_scope
from ..recorder import FlightRecorder
from ..spec import REDUCING, SUM, FailureScope, GroupState, Operation, OpKind, ReduceOp
from .profiling import show_waits, submission_ranges

T = TypeVar("T")

_MASK = 2**64 - 1
#: Odd, so that its multiples are all different modulo 2**64 (the golden ratio, as in splitmix64).
_ODD = 0x9E3779B97F4A7C15
#: Placeholder in the record of an operation without a tensor.
_NOTHING = torch.empty(0, dtype=torch.uint8, device="cpu")
_NO_RANGES = nullcontext()


class OperationSubmitter:
    """The channel of a group, the numbers of its operations, and whether it accepts more.

    Attributes:
        lock: held while an operation is numbered and submitted.
        shortcut: the fast path of the channel: it numbers calls, and submits common ones without Python.
        on_first_operation: called with this object and the future of its first numbered operation, and of an
            earlier receive.
    """

    def __init__(self, spec: GroupSpec, channel: DataChannel, *, timeout: float) -> None:
        self.spec = spec
        self.channel = channel
        self.timeout = timeout
        self.lock = threading.Lock()
        records = config.RECORDER_SIZE.get()
        self.recorder = FlightRecorder(spec.name, spec.rank, records) if records else None
        self.shortcut = channel.shortcut(self.lock, self.recorder)
        self.on_first_operation: Callable[[OperationSubmitter, Future[Any]], None] | None = None
        #: OPEN, CLOSING, CLOSED, ABORTED or FORKED, from the calls on this rank only.
        self.local_state = GroupState.OPEN
        self._was_closed = False
        self._suspension: GroupError | None = None
        self._abort_reason = ""
        #: whether a thread is in abort(), and the other ranks have not been notified yet
        self._aborting = False

    @property
    def state(self) -> GroupState:
        """The state, also from failures of the channel."""
        if self.local_state is not GroupState.OPEN:
            return self.local_state
        failure = self._suspension or self.channel.failure()
        if failure is None:
            return GroupState.OPEN
        return GroupState.ABORTED if isinstance(failure, GroupAborted) else GroupState.BROKEN

    def _set_state(self, state: GroupState) -> None:
        self.local_state = state
        self.shortcut.open = state is GroupState.OPEN

    # -- operations ----------------------------------------------------------------------------

    def submit(
        self,
        kind: OpKind,
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        timeout: float | None,
        op: ReduceOp = SUM,
        root: int = -1,
        sizes: Sequence[int] = (),
    ) -> Future[Any]:
        """Submit a collective; the value of the future is as in ``DataChannel.submit``."""
        seconds = self.timeout if timeout is None else self.checked_timeout(timeout)
        with self.lock:
            self.check_usable()
            scope = callback_scope.get()
            if scope is not None:
                number, key = -1, scope.next_key()
            else:
                number, key = -1 if self.channel.captured(inputs or outputs) else self.shortcut.number, 0
            operation = Operation(kind, number, key, inputs, outputs, seconds, op, root, -1, 0, sizes)
            self._check(operation)
            with self._ranges([operation]):
                submitted = time.monotonic_ns()  # a small operation ends in submit()
                future = self.channel.submit(operation)
                if number >= 0:
                    self.shortcut.number = number + 1
                    future.key = (self.spec.ident + number * _ODD) & _MASK
                elif key:
                    future.key = key
                if self.recorder is not None:
                    tensors = inputs or outputs or (_NOTHING,)
                    count = sum(x.numel() for x in tensors)
                    dtype = tensors[0].dtype
                    self.recorder.add(future, kind, number, key, dtype, count, root, submitted=submitted)
                if profiler._is_profiler_enabled:
                    show_waits(future)
            if number == 0 and self.on_first_operation is not None:
                self.on_first_operation(self, future)
                self.on_first_operation = None  # it has a reference to the parent group
        return future

    def submit_messages(self, operations: Sequence[Operation]) -> list[Future[Any]]:
        """Submit point-to-point operations, made by :meth:`message`, together and in order.

        Their futures have no key, as ranks see different messages: operations in callbacks are numbered.
        """
        with self.lock:
            self.check_usable()
            with self._ranges(operations):
                submitted = time.monotonic_ns()
                futures = self.channel.submit_all(operations)
                for operation, future in zip(operations, futures, strict=True):
                    kind, peer, tag = operation.kind, operation.peer, operation.tag
                    if self.recorder is not None:
                        x = next(iter((*operation.inputs, *operation.outputs)), _NOTHING)
                        self.recorder.add(
                            future, kind, -1, 0, x.dtype, x.numel(), -1, peer, tag, submitted=submitted
                        )
                    if profiler._is_profiler_enabled:
                        show_waits(future)
            for operation, future in zip(operations, futures, strict=True):
                if operation.kind is OpKind.SEND:
                    self.shortcut.sends = True
                elif not self.shortcut.receives:
                    self.shortcut.receives = True
                    if self.on_first_operation is not None:
                        self.on_first_operation(self, future)
                    if self.spec.scope == FailureScope.PAIR:
                        self.on_first_operation = None  # there will be no collective
            return futures

    def message(
        self,
        kind: OpKind,
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        timeout: float | None,
        peer: int,
        tag: int,
    ) -> Operation:
        """Return a checked point-to-point operation for :meth:`submit_messages`."""
        seconds = self.checked_timeout(timeout)
        operation = Operation(kind, -1, 0, inputs, outputs, seconds, SUM, -1, peer, tag, ())
        self._check(operation)
        return operation

    def ask(self, question: Callable[[DataChannel], T]) -> T:
        """Return the answer of the channel to a question that not all channels can answer.

        Raises:
            UnsupportedOperation: it cannot; the message names the group.
        """
        try:
            return question(self.channel)
        except UnsupportedOperation as error:
            raise UnsupportedOperation(
                f"the backend of group {self.spec.name!r} on rank {self.spec.rank} {error}"
            ) from None

    def _ranges(self, operations: Sequence[Operation]) -> AbstractContextManager[object]:
        """Return the ranges of torch's profiler in which ``operations`` are submitted."""
        return submission_ranges(self.spec, operations) if profiler._is_profiler_enabled else _NO_RANGES

    def _check(self, operation: Operation) -> None:
        """Raise UnsupportedOperation if the channel does not support ``operation``."""
        x = next(iter((*operation.inputs, *operation.outputs)), None)
        dtype, op = None if x is None else x.dtype, operation.op if operation.kind in REDUCING else None
        if not self.channel.supports(operation.kind, dtype, op):
            of = f" of {dtype}" if dtype else ""
            by = f" with {op}" if op else ""
            raise UnsupportedOperation(
                f"the backend of group {self.spec.name!r} on rank {self.spec.rank} cannot do "
                f"{operation.kind.name.lower()}{of}{by}"
            )
        self.channel.check(operation)

    # -- the end -------------------------------------------------------------------------------

    def abort(self, reason: str) -> None:
        """See :meth:`shoal.ProcessGroup.abort`."""
        if self.local_state not in (GroupState.OPEN, GroupState.CLOSING):
            return
        if self.local_state is GroupState.OPEN and self.channel.failure() is None:
            self._abort_reason, self._aborting = reason, True
            self.channel.reported = True  # this rank already knows
            self._set_state(GroupState.ABORTED)
            if self._was_closed:  # another thread has closed the group meanwhile
                self._set_state(GroupState.CLOSED)
        failure_report.left()
        try:
            self.channel.abort(reason)
        finally:
            self._aborting = False

    def begin_close(self, *, leaves_world: bool) -> None:
        """Refuse further operations, and notify the other ranks."""
        with self.lock:
            if self.local_state in (GroupState.CLOSED, GroupState.FORKED):
                return
            self._set_state(GroupState.CLOSING)
        if leaves_world:
            failure_report.left()
        if self._aborting:  # in another thread: notify the other ranks of the abort first
            self.channel.abort(self._abort_reason)
        self.channel.begin_close()

    def mark_closed(self) -> None:
        self._was_closed = True
        self._set_state(GroupState.CLOSED)

    def suspend(self, error: GroupError) -> None:
        """Let all operations raise a copy of ``error`` on this rank until :meth:`resume`."""
        with self.lock:
            self._suspension = error
            self.shortcut.open = False

    def resume(self) -> None:
        """Accept operations again."""
        with self.lock:
            self._suspension = None
            self.shortcut.open = self.local_state is GroupState.OPEN

    def become_forked(self) -> None:
        self.lock = threading.Lock()  # it may be held by a thread that does not exist in the child
        if self.local_state is not GroupState.CLOSED:
            self._set_state(GroupState.FORKED)

    # -- checks --------------------------------------------------------------------------------

    def checked_timeout(self, timeout: float | None) -> float:
        """Return ``timeout``, or the default of the group for None; raise UsageError if it is invalid."""
        if timeout is None:
            return self.timeout
        return checked_seconds("timeout", timeout, f" on rank {self.spec.rank}")

    def check_usable(self) -> None:
        """Raise the reason if the group accepts no operations."""
        if self.state is not GroupState.OPEN:
            self.raise_unusable()

    def check_operation(self, timeout: float | None) -> None:
        """Raise the errors of a submission before tensors are multiplied for it."""
        self.checked_timeout(timeout)
        self.check_usable()

    def check_not_closed(self) -> None:
        """Raise if this rank has closed the group, or is a forked child."""
        if self.local_state in (GroupState.CLOSING, GroupState.CLOSED, GroupState.FORKED):
            self.raise_unusable()

    def raise_unusable(self) -> None:
        """Raise the reason why the group accepts no operations."""
        where = f"group {self.spec.name!r} on rank {self.spec.rank}"
        if self.local_state is GroupState.FORKED:
            raise ForkedProcess(
                f"{where} was used in a forked child of the process that made it; start workers with the "
                "spawn method, or fork before shoal.init()"
            )
        if self.local_state in (GroupState.CLOSING, GroupState.CLOSED):
            raise GroupClosed(f"{where} is {self.local_state}; make a new group to go on")
        if self._suspension is not None:
            raise copy(self._suspension).with_traceback(None)
        failure = self.channel.failure()
        if failure is not None:
            raise self.error_for_call(failure)
        raise GroupAborted(f"{where} was aborted here: {self._abort_reason}")

    def error_for_call(self, failure: GroupError) -> GroupError:
        """Return the exception to raise in a call for the failure of the group."""
        self.channel.report(failure)
        if self.channel.on_failure is not None:
            self.channel.on_failure()
        # A copy: a shared exception would collect the frames of every caller.
        raised = copy(failure).with_traceback(None)
        ended = "was aborted" if isinstance(failure, GroupAborted) else "is broken"
        raised.args = (f"group {self.spec.name!r} on rank {self.spec.rank} {ended}: {failure}",)
        return raised


def map_future(future: Future[Any], finish: Callable[[Any], Any]) -> Future[Any]:
    """Return a future like ``future`` with the value ``finish(value)``.

    ``finish`` runs once, in the first thread that observes the completion, before any caller gets the value.
    Unlike ``then`` this takes no callback thread, and the future keeps its key.
    """
    result: Future[Any] = Future(FutureAsSource(future), finish=lambda: finish(future.value()))
    result.key = future.key
    return result


def run_in_callback_thread(body: Callable[[], T]) -> Future[T]:
    """Run ``body``, which may block, in a callback thread, and return the future of its result."""
    start: Future[None] = Future()
    start.set_result(None)
    return start.then(lambda _: body())
