"""The submission of operations from a group to its data channel.

An operation is numbered and submitted in one critical section, so that the channel receives operations in the
order of their numbers, from any thread.  Operations issued in callbacks of futures run in different orders on
different ranks: instead of a number they get a key from :mod:`shoal.future`, which is equal on all ranks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from typing import Any, NoReturn, TypeVar

import torch

from .. import config, failure_report
from ..backend.base import DataChannel, GroupSpec
from ..common.arguments import checked_seconds, keyword_names, unknown_keyword_error
from ..errors import ForkedProcess, GroupAborted, GroupClosed, GroupError, UnsupportedOperation
from ..future import Completion, Future, callback_scope
from ..recorder import FlightRecorder
from ..spec import REDUCING, SUM, Operation, OpKind, ReduceOp
from .validation.arguments import OperationCall

T = TypeVar("T")

_MASK = 2**64 - 1
#: Odd, so that its multiples are all different modulo 2**64 (the golden ratio, as in splitmix64).
_ODD = 0x9E3779B97F4A7C15
#: Placeholder in the record of an operation without a tensor.
_NOTHING = torch.empty(0, dtype=torch.uint8, device="cpu")


def called(name: str, group: Submitter, *_: object) -> str:
    """Return operation and rank, for errors about keyword arguments."""
    return f"{name} on rank {group._rank}"


class Submitter:
    """The base class of a group's operations."""

    _is_first: bool
    #: The :class:`shoal.Join` whose block this rank is in.
    join_block: object = None

    def __init__(self, spec: GroupSpec, channel: DataChannel, *, timeout: float) -> None:
        self._spec = spec
        self._channel = channel
        self._timeout = timeout
        self._rank = spec.rank
        self._size = len(spec.ranks)
        self._cpu = "cpu" in channel.devices
        self._submitting = threading.Lock()
        #: Called with this group and the future of its first numbered operation, and of an earlier receive.
        self._on_first: Callable[[Any, Future[Any]], None] | None = None
        self._has_received = False
        self._calls: dict[str, OperationCall] = {}
        records = config.RECORDER_SIZE.get()
        self._recorder = FlightRecorder(spec.name, spec.rank, records) if records else None
        #: The fast path of the channel: it numbers calls, and submits common ones without Python.
        self._shortcut = channel.shortcut(self._submitting, self._recorder)
        self._state = "open"
        self._ended = False
        self._abort_reason = ""
        #: whether a thread is in abort(), and the other ranks have not been notified yet
        self._aborting = False

    @property
    def _state(self) -> str:
        """``open``, ``closing``, ``closed``, ``aborted`` or ``forked``, from the calls on this rank only."""
        return self._done_to_it

    @_state.setter
    def _state(self, state: str) -> None:
        self._done_to_it = state
        self._shortcut.open = state == "open"

    @property
    def _number(self) -> int:
        """The number of the next call."""
        return self._shortcut.number

    # -- for operations ------------------------------------------------------------------------

    def _call(self, name: str) -> OperationCall:
        call = self._calls.get(name)
        if call is None:
            call = self._calls[name] = OperationCall(name, self._rank, self._size, self._channel.devices)
        return call

    def _submit(
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
        seconds = self._timeout if timeout is None else self._checked_timeout(timeout)
        with self._submitting:
            channel = self._channel
            if self._state != "open" or channel.failure() is not None:
                self._raise_refusal()
            scope = callback_scope()
            if scope is None:
                number, key = self._number, 0
            else:
                number, key = -1, scope.next_key()
            operation = Operation(kind, number, key, inputs, outputs, seconds, op, root, -1, 0, sizes)
            self._check(operation)
            future = channel.submit(operation)
            if scope is None:
                self._shortcut.number = number + 1
                future.key = (self._spec.ident + number * _ODD) & _MASK
            else:
                future.key = key
            if self._recorder is not None:
                x = inputs[0] if inputs else outputs[0] if outputs else _NOTHING
                self._recorder.add(future, kind, number, key, x.dtype, x.numel(), root)
            if number == 0 and self._on_first is not None:
                self._on_first(self, future)
                self._on_first = None  # it has a reference to the parent group
        return future

    def _submit_messages(self, operations: Sequence[Operation]) -> list[Future[Any]]:
        """Submit point-to-point operations, checked by :meth:`_message`, together and in order.

        Their futures have no key, as ranks see different messages: operations in callbacks are numbered.
        """
        with self._submitting:
            if self._state != "open" or self._channel.failure() is not None:
                self._raise_refusal()
            futures = self._channel.submit_all(operations)
            for operation, future in zip(operations, futures, strict=True):
                if self._recorder is not None:
                    x = next(iter((*operation.inputs, *operation.outputs)), _NOTHING)
                    self._recorder.add(
                        future, operation.kind, -1, 0, x.dtype, x.numel(), -1, operation.peer, operation.tag
                    )
                if operation.kind is OpKind.RECV and not self._has_received:
                    self._has_received = True
                    if self._on_first is not None:
                        self._on_first(self, future)
                    if self._spec.scope == "pair":
                        self._on_first = None  # there will be no collective
            return futures

    def _message(
        self,
        kind: OpKind,
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        timeout: float | None,
        peer: int,
        tag: int,
    ) -> Operation:
        seconds = self._timeout if timeout is None else self._checked_timeout(timeout)
        operation = Operation(kind, -1, 0, inputs, outputs, seconds, SUM, -1, peer, tag, ())
        self._check(operation)
        return operation

    def _check(self, operation: Operation) -> None:
        """Raise UnsupportedOperation if the channel does not support ``operation``."""
        x = next(iter((*operation.inputs, *operation.outputs)), None)
        dtype, op = None if x is None else x.dtype, operation.op if operation.kind in REDUCING else None
        if not self._channel.supports(operation.kind, dtype, op):
            of = f" of {dtype}" if dtype else ""
            by = f" with {op}" if op else ""
            raise UnsupportedOperation(
                f"the backend of group {self._spec.name!r} on rank {self._rank} cannot do "
                f"{operation.kind.name.lower()}{of}{by}"
            )
        self._channel.check(operation)

    @property
    def _scratch_device(self) -> torch.device:
        """The device of the small tensors of composed operations."""
        return torch.device("cpu" if self._cpu else min(self._channel.devices))

    def abort(self, reason: str = "") -> None:
        """Abort the group on all ranks, from any thread.

        All pending and later operations fail with GroupAborted.  Groups made from this one are not affected.
        The group must still be closed, to release its resources.

        Args:
            reason: part of the error message on the other ranks.
        """
        if self._state not in ("open", "closing"):
            return
        if self._state == "open" and self._channel.failure() is None:
            self._abort_reason, self._aborting = reason, True
            self._channel.reported = True  # this rank already knows
            self._state = "aborted"
            if self._ended:  # another thread has closed the group meanwhile
                self._state = "closed"
        failure_report.left()
        try:
            self._channel.abort(reason)
        finally:
            self._aborting = False

    def _begin_close(self) -> None:
        """Refuse further operations, and notify the other ranks."""
        with self._submitting:
            if self._state in ("closed", "forked"):
                return
            self._state = "closing"
        if self._is_first:
            failure_report.left()
        if self._aborting:  # in another thread: notify the other ranks of the abort first
            self._channel.abort(self._abort_reason)
        self._channel.begin_close()

    # -- refusals ------------------------------------------------------------------------------

    def _refuse_keywords(self, name: str, unknown: Iterable[str]) -> NoReturn:
        """Raise for unknown keywords, in latency-critical operations, which avoid the decorator's cost."""
        raise unknown_keyword_error(called(name, self), unknown, keyword_names(getattr(type(self), name)))

    def _checked_timeout(self, timeout: float) -> float:
        return checked_seconds("timeout", timeout, f" on rank {self._rank}")

    def _raise_refusal(self) -> None:
        """Raise the reason why the group accepts no operations."""
        where = f"group {self._spec.name!r} on rank {self._rank}"
        if self._state == "forked":
            raise ForkedProcess(
                f"{where} was used in a forked child of the process that made it; start workers with the "
                "spawn method, or fork before shoal.init()"
            )
        if self._state in ("closing", "closed"):
            raise GroupClosed(f"{where} is {self._state}; make a new group to go on")
        failure = self._channel.failure()
        if failure is not None:
            raise self._reported(failure)
        raise GroupAborted(f"{where} was aborted here: {self._abort_reason}")

    def _reported(self, failure: GroupError) -> GroupError:
        """Return the exception to raise in a call for the failure of the group."""
        self._channel.report(failure)
        if self._channel.on_failure is not None:
            self._channel.on_failure()
        # A copy: a shared exception would collect the frames of every caller.
        raised = copy(failure).with_traceback(None)
        ended = "was aborted" if isinstance(failure, GroupAborted) else "is broken"
        raised.args = (f"group {self._spec.name!r} on rank {self._rank} {ended}: {failure}",)
        return raised


def mapped(future: Future[Any], finish: Callable[[Any], Any]) -> Future[Any]:
    """Return a future like ``future`` with the value ``finish(value)``.

    ``finish`` runs once, in the first thread that observes the completion, before any caller gets the value.
    Unlike ``then`` this takes no callback thread, and the future keeps its key.
    """
    result: Future[Any] = Future(Completion(future), finish=lambda: finish(future.value()))
    result.key = future.key
    return result


def in_background(body: Callable[[], T]) -> Future[T]:
    """Run ``body``, which may block, in a callback thread, and return the future of its result."""
    start: Future[None] = Future()
    start.set_result(None)
    return start.then(lambda _: body())
