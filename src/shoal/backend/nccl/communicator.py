"""The collectives of one group as calls of NCCL on one stream.

Every collective is one group of NCCL calls, with work of torch before and after it on the same stream.  Data
that is only copied is passed to NCCL as bytes.  What NCCL cannot reduce, or reduces in another way than shoal
(16-bit integers, bool, bitwise operations, averages of integers, products of complex numbers), is gathered
and reduced by torch, in the order of the ranks.  NCCL's MIN and MAX ignore NaN, so a second reduction finds
the elements that are NaN on a rank.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...errors import GroupError
from ...spec import MAX, MIN, Operation, OpKind, ReduceOp
from ...streams import StreamRuntime
from ..engine import Communicator, Setup, Transfer
from .library import Nccl, Reduction, Result
from .reductions import BYTES, native_reduction, reduce_in_torch

#: NCCL forbids parallel calls for communicators of one device.  Held until NCCL's thread has put the work on
#: the stream, so that kernels of several communicators have the order of the program on every rank.
_launch_lock = threading.Lock()
#: seconds for which a launch is awaited with the lock; only connecting to other ranks takes longer
_LAUNCH_S = 1e-3
#: seconds between two looks at a communicator that other ranks join or leave
_PAUSE_S = 1e-3
#: seconds in which a communicator is finalized; afterwards it is aborted
_FINALIZE_TIMEOUT_S = 5.0
#: seconds in which the work of an aborted communicator ends on the device
_ABORT_TIMEOUT_S = 10.0

#: One call of NCCL: a function, and its arguments before the communicator and the stream.
_Call = tuple[Callable[..., None], tuple[int, ...]]
#: Work of torch on the stream after the calls; keeps temporary tensors.  None: there is none.
_Finish = Callable[[], object] | None


class NcclCommunicator(Communicator):
    """A communicator of NCCL, and its stream."""

    def __init__(self, nccl: Nccl, setup: Setup, runtime: StreamRuntime, stream: Any) -> None:
        self._nccl, self._runtime = nccl, runtime
        self._stream, self._handle = stream, runtime.handle(stream)
        self.device = setup.device
        self._rank, self._size = setup.spec.rank, len(setup.spec.ranks)
        #: Held during calls for this communicator.
        self._lock = threading.Lock()
        self._ended = False
        unique_id = setup.from_first(nccl.unique_id)
        with _launch_lock, runtime.use(stream):
            self._comm = nccl.init(self._size, unique_id, self._rank)
        try:
            while not self.ready():
                setup.check()
                time.sleep(_PAUSE_S)
        except BaseException:
            self.abort()
            raise

    def start(self, operation: Operation) -> Transfer:
        return _NcclTransfer(self, operation)

    def ready(self) -> bool:
        """Whether all calls for the communicator are carried out, so that their work is on the stream.

        Raises:
            GroupError: the communicator has failed.
        """
        with self._lock:
            return self._is_ready()

    def _is_ready(self) -> bool:
        if self._ended:
            raise GroupError("the communicator was aborted")
        state = self._nccl.async_error(self._comm)
        if state == Result.IN_PROGRESS:
            return False
        if state != Result.SUCCESS:
            details = self._nccl.last_error(self._comm).strip()
            raise GroupError(self._nccl.error_string(state) + (f"; {details}" if details else ""))
        return True

    def abort(self) -> bool:
        # A thread that holds the lock for so long hangs in NCCL, and is freed by the call.
        locked = self._lock.acquire(timeout=_ABORT_TIMEOUT_S)
        try:
            with self._runtime.use(self._stream):
                if not self._ended:
                    self._ended = True
                    self._nccl.abort(self._comm)
                event = self._runtime.record(self._stream)
        finally:
            if locked:
                self._lock.release()
        return self._runtime.synchronize(event, _ABORT_TIMEOUT_S)

    def close(self) -> None:
        deadline = time.monotonic() + _FINALIZE_TIMEOUT_S
        try:
            self._await_ready(deadline)
            with _launch_lock, self._lock, self._runtime.use(self._stream):
                self._nccl.finalize(self._comm)
            self._await_ready(deadline)
        except Exception:  # NCCL cannot end it in good order
            self.abort()
            return
        with self._lock, self._runtime.use(self._stream):
            self._ended = True
            self._nccl.destroy(self._comm)

    def _await_ready(self, deadline: float) -> None:
        while not self.ready():
            if time.monotonic() > deadline:
                raise TimeoutError
            time.sleep(_PAUSE_S)

    # -- the stream ------------------------------------------------------------------------------

    def follow_current_stream(self) -> None:
        """Make the stream wait for what is on the current one."""
        runtime = self._runtime
        runtime.wait_event(self._stream, runtime.record(runtime.current_stream(self.device)))

    def compute(self, work: Callable[[], Any]) -> Any:
        """Call ``work`` with the stream as the current one, without autograd."""
        with self._runtime.use(self._stream), torch.inference_mode():
            return work()

    def record(self) -> tuple[Any, Any]:
        """Return the stream, and an event after what is on it."""
        return self._stream, self._runtime.record(self._stream)

    def has_occurred(self, event: Any) -> bool:
        return self._runtime.query(event)

    # -- collectives: call NCCL, and return what torch has to do afterwards ----------------------

    def _all_reduce(self, operation: Operation) -> _Finish:
        x, op = operation.outputs[0], operation.op
        if native_reduction(x.dtype, op) is None:
            gathered = self._temporary((self._size, *x.shape), x.dtype)
            self._launch([(self._nccl.all_gather, (x.data_ptr(), gathered.data_ptr(), x.nbytes, BYTES))])
            return lambda: x.copy_(reduce_in_torch(list(gathered), op))
        calls, finish = self._reduction(op, x, x, self._nccl.all_reduce)
        self._launch(calls)
        return finish

    def _reduce(self, operation: Operation) -> _Finish:
        x, op, root = operation.inputs[0], operation.op, operation.root
        result = x if self._rank == root else None
        if native_reduction(x.dtype, op) is None:
            parts = [] if result is None else [self._temporary(x.shape, x.dtype) for _ in range(self._size)]
            self._launch([*self._sends(self._only(root, x)), *self._receives(parts)])
            return None if result is None else lambda: x.copy_(reduce_in_torch(parts, op))
        calls, finish = self._reduction(op, x, result, self._nccl.reduce, (root,))
        self._launch(calls)
        return finish

    def _reduce_scatter(self, operation: Operation) -> _Finish:
        inputs, y, op = operation.inputs, operation.outputs[0], operation.op
        if native_reduction(y.dtype, op) is None:
            parts = [self._temporary(y.shape, y.dtype) for _ in range(self._size)]
            split = list(inputs[0].detach().view(self._size, -1)) if len(inputs) == 1 else inputs
            self._launch([*self._sends(split), *self._receives(parts)])
            return lambda: y.copy_(reduce_in_torch(parts, op))
        if len(inputs) == 1:
            calls, finish = self._reduction(op, inputs[0], y, self._nccl.reduce_scatter, parts=self._size)
            self._launch(calls)
            return finish
        reductions = [
            self._reduction(op, x, y if root == self._rank else None, self._nccl.reduce, (root,))
            for root, x in enumerate(inputs)
        ]
        self._launch([call for calls, _ in reductions for call in calls])
        return lambda: [finish() for _, finish in reductions if finish is not None]

    def _broadcast(self, operation: Operation) -> _Finish:
        x = operation.outputs[0]
        self._launch([(self._nccl.broadcast, (x.data_ptr(), x.data_ptr(), x.nbytes, BYTES, operation.root))])
        return None

    def _all_gather(self, operation: Operation) -> _Finish:
        x, outputs = operation.inputs[0], operation.outputs
        if len(outputs) == 1:
            self._launch([(self._nccl.all_gather, (x.data_ptr(), outputs[0].data_ptr(), x.nbytes, BYTES))])
            return None
        calls: list[_Call] = []
        for rank, y in enumerate(outputs):
            source = x if rank == self._rank else y
            calls.append((self._nccl.broadcast, (source.data_ptr(), y.data_ptr(), y.nbytes, BYTES, rank)))
        self._launch(calls)
        return None

    def _gather(self, operation: Operation) -> _Finish:
        sends = self._sends(self._only(operation.root, operation.inputs[0]))
        self._launch([*sends, *self._receives(operation.outputs)])
        return None

    def _scatter(self, operation: Operation) -> _Finish:
        receives = self._receives(self._only(operation.root, operation.outputs[0]))
        self._launch([*self._sends(operation.inputs), *receives])
        return None

    def _all_to_all(self, operation: Operation) -> _Finish:
        self._launch([*self._sends(operation.inputs), *self._receives(operation.outputs)])
        return None

    # -- calls -----------------------------------------------------------------------------------

    def _launch(self, calls: Sequence[_Call]) -> None:
        """Call NCCL, several functions as one group; wait for a moment until the work is on the stream."""
        nccl = self._nccl
        with _launch_lock, self._lock:
            if self._ended:
                raise GroupError("the communicator was aborted")
            if len(calls) == 1:
                function, arguments = calls[0]
                function(*arguments, self._comm, self._handle)
            elif calls:
                nccl.group_start()
                try:
                    for function, arguments in calls:
                        function(*arguments, self._comm, self._handle)
                finally:
                    nccl.group_end()
            end = time.monotonic() + _LAUNCH_S
            while not self._is_ready() and time.monotonic() < end:
                os.sched_yield()

    def _only(self, peer: int, x: torch.Tensor) -> list[torch.Tensor | None]:
        """A part for ``peer`` alone."""
        return [x if rank == peer else None for rank in range(self._size)]

    def _sends(self, parts: Sequence[torch.Tensor | None]) -> list[_Call]:
        """The calls that send a part to each rank, except None and empty ones."""
        return self._messages(self._nccl.send, parts)

    def _receives(self, parts: Sequence[torch.Tensor | None]) -> list[_Call]:
        """The calls that receive a part from each rank, except None and empty ones."""
        return self._messages(self._nccl.recv, parts)

    @staticmethod
    def _messages(function: Callable[..., None], parts: Sequence[torch.Tensor | None]) -> list[_Call]:
        return [
            (function, (x.data_ptr(), x.nbytes, BYTES, rank))
            for rank, x in enumerate(parts)
            if x is not None and x.nbytes
        ]

    def _reduction(
        self,
        op: ReduceOp,
        x: torch.Tensor,
        result: torch.Tensor | None,
        function: Callable[..., None],
        root: tuple[int, ...] = (),
        parts: int = 1,
    ) -> tuple[list[_Call], _Finish]:
        """The calls of one reduction that NCCL supports, and the work after them.

        Args:
            result: None if this rank gets no result.
            root: last argument of ``function``, if it has one.
            parts: the number of parts of ``x``, of which ``function`` gets the size.
        """
        native = native_reduction(x.dtype, op)
        assert native is not None
        target = 0 if result is None else result.data_ptr()
        count = x.numel() // parts
        arguments = (x.data_ptr(), target, count * native.width, native.dtype, native.op, *root)
        calls: list[_Call] = [(function, arguments)]
        if op.code not in (MIN.code, MAX.code) or not x.is_floating_point():
            return calls, None
        has_nan = self.compute(lambda: x.isnan().view(torch.uint8))
        if result is None:
            calls.append((function, (has_nan.data_ptr(), 0, count, BYTES, Reduction.MAX, *root)))
            return calls, lambda: has_nan.numel()  # only keeps it
        found = self._temporary(result.shape, torch.uint8)
        calls.append((function, (has_nan.data_ptr(), found.data_ptr(), count, BYTES, Reduction.MAX, *root)))

        def finish() -> None:
            result.masked_fill_(found.bool(), float("nan"))
            has_nan.numel()  # only keeps it

        return calls, finish

    def _temporary(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return uninitialised memory for the stream."""
        memory: torch.Tensor = self.compute(lambda: torch.empty(shape, dtype=dtype, device=self.device))
        return memory


class _NcclTransfer(Transfer):
    """One collective, and the event after its work."""

    def __init__(self, communicator: NcclCommunicator, operation: Operation) -> None:
        self._communicator = communicator
        communicator.follow_current_stream()
        #: Kept until the transfer is complete, with its temporary tensors.
        self._finish = _COLLECTIVES[operation.kind](communicator, operation)
        self._event: Any = None

    def launched(self) -> bool:
        communicator = self._communicator
        if self._event is None and communicator.ready():
            if self._finish is not None:
                communicator.compute(self._finish)
            stream, self._event = communicator.record()
            self.events = {communicator.device: (stream, self._event)}
        return self._event is not None

    def poll(self) -> bool:
        if self._communicator.has_occurred(self._event):
            return True
        self._communicator.ready()  # or failed
        return False


_COLLECTIVES: dict[OpKind, Callable[[NcclCommunicator, Operation], _Finish]] = {
    OpKind.ALL_REDUCE: NcclCommunicator._all_reduce,
    OpKind.REDUCE: NcclCommunicator._reduce,
    OpKind.BROADCAST: NcclCommunicator._broadcast,
    OpKind.ALL_GATHER: NcclCommunicator._all_gather,
    OpKind.GATHER: NcclCommunicator._gather,
    OpKind.SCATTER: NcclCommunicator._scatter,
    OpKind.REDUCE_SCATTER: NcclCommunicator._reduce_scatter,
    OpKind.ALL_TO_ALL: NcclCommunicator._all_to_all,
}
