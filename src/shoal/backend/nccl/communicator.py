"""The collectives of one group as calls of NCCL on one stream.

Every collective is one group of NCCL calls, with work of torch before and after it on the same stream.  Data
that is only copied is passed to NCCL as bytes.  What NCCL cannot reduce, or reduces in another way than shoal
(16-bit integers, bool, bitwise operations, averages of integers, products of complex numbers), is gathered
and reduced by torch, in the order of the ranks.  NCCL's MIN and MAX ignore NaN, so a second reduction finds
the elements that are NaN on a rank.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ...errors import GroupError
from ...spec import MAX, MIN, Operation, OpKind, ReduceOp
from ...streams import StreamRuntime
from ..engine import Communicator, Setup, Transfer
from .library import Nccl, Reduction, Result
from .reductions import BYTES, native_reduction, reduce_in_torch

#: NCCL forbids parallel calls for communicators of one device.
_launch_lock = threading.Lock()
#: seconds between two looks at a communicator that other ranks join or leave
_PAUSE_S = 1e-3
#: seconds in which a communicator is finalized; afterwards it is aborted
_FINALIZE_TIMEOUT_S = 5.0
#: seconds in which the work of an aborted communicator ends on the device
_ABORT_TIMEOUT_S = 10.0

#: A collective: yields when its calls are made, continues when NCCL has put them on the stream, and yields
#: again if it has temporary tensors, to keep them until the work is done.
_Steps = Generator[None, None, None]
#: ``call(source, target, count, dtype, op)``: one reduction, with addresses and codes of NCCL
_ReduceCall = Callable[[int, int, int, int, int], None]


class NcclCommunicator(Communicator):
    """A communicator of NCCL, and its stream."""

    def __init__(self, nccl: Nccl, setup: Setup, runtime: StreamRuntime, stream: Any) -> None:
        self._nccl, self._runtime = nccl, runtime
        self._stream, self._handle = stream, runtime.handle(stream)
        self.device = setup.device
        self._rank, self._size = setup.spec.rank, len(setup.spec.ranks)
        #: Held during calls for this communicator.
        self._lock = threading.Lock()
        self._aborted = False
        unique_id = setup.from_first(nccl.unique_id)
        with _launch_lock, runtime.use(stream):
            self._comm = nccl.init(self._size, unique_id, self._rank, setup.spec.name)
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
            if self._aborted:
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
            if not self._aborted:
                self._aborted = True
                self._nccl.abort(self._comm)
        finally:
            if locked:
                self._lock.release()
        with self._runtime.use(self._stream):
            return self._runtime.synchronize(self._runtime.record(self._stream), _ABORT_TIMEOUT_S)

    def close(self) -> None:
        deadline = time.monotonic() + _FINALIZE_TIMEOUT_S
        try:
            for call in (self._nccl.finalize, self._nccl.destroy):
                while not self.ready():
                    if time.monotonic() > deadline:
                        raise TimeoutError
                    time.sleep(_PAUSE_S)
                with _launch_lock, self._lock, self._runtime.use(self._stream):
                    call(self._comm)
            self._aborted = True
        except Exception:  # NCCL cannot end it in good order
            self.abort()

    # -- the stream ------------------------------------------------------------------------------

    def follow_current_stream(self) -> None:
        """Make the stream wait for what is on the current one."""
        runtime = self._runtime
        runtime.wait_event(self._stream, runtime.record(runtime.current_stream(self.device)))

    def advance(self, steps: _Steps) -> None:
        """Continue a collective on the stream."""
        with self._runtime.use(self._stream), torch.inference_mode():
            next(steps, None)

    def record(self) -> tuple[Any, Any]:
        """Return the stream, and an event after what is on it."""
        return self._stream, self._runtime.record(self._stream)

    def has_occurred(self, event: Any) -> bool:
        return self._runtime.query(event)

    # -- collectives -----------------------------------------------------------------------------

    def _all_reduce(self, operation: Operation) -> _Steps:
        x = operation.outputs[0]
        if native_reduction(x.dtype, operation.op) is None:
            gathered = x.new_empty((self._size, *x.shape))
            with self._calls():
                self._nccl.all_gather(
                    x.data_ptr(), gathered.data_ptr(), x.nbytes, BYTES, self._comm, self._handle
                )
            yield
            x.copy_(reduce_in_torch(list(gathered), operation.op))
            yield
            return
        yield from self._reduction(
            operation.op, x, x,
            lambda source, to, count, dtype, op: self._nccl.all_reduce(
                source, to, count, dtype, op, self._comm, self._handle
            ),
        )  # fmt: skip

    def _reduce(self, operation: Operation) -> _Steps:
        x, root = operation.inputs[0], operation.root
        at_root = self._rank == root
        if native_reduction(x.dtype, operation.op) is None:
            parts = [torch.empty_like(x) for _ in range(self._size)] if at_root else []
            with self._calls():
                self._send([x if rank == root else None for rank in range(self._size)])
                self._receive(parts)
            yield
            if at_root:
                x.copy_(reduce_in_torch(parts, operation.op))
            yield
            return
        yield from self._reduction(operation.op, x, x if at_root else None, self._reduce_call(root))

    def _reduce_scatter(self, operation: Operation) -> _Steps:
        inputs, y = operation.inputs, operation.outputs[0]
        if native_reduction(y.dtype, operation.op) is None:
            parts = [torch.empty_like(y) for _ in range(self._size)]
            with self._calls():
                self._send(self._split(inputs))
                self._receive(parts)
            yield
            y.copy_(reduce_in_torch(parts, operation.op))
            yield
        elif len(inputs) == 1:
            yield from self._reduction(
                operation.op, inputs[0], y,
                lambda source, to, count, dtype, op: self._nccl.reduce_scatter(
                    source, to, count // self._size, dtype, op, self._comm, self._handle
                ),
            )  # fmt: skip
        else:
            reductions = [
                self._reduction(
                    operation.op, x, y if root == self._rank else None, self._reduce_call(root), grouped=True
                )
                for root, x in enumerate(inputs)
            ]
            with self._calls():
                for reduction in reductions:
                    next(reduction)
            yield
            for reduction in reductions:
                next(reduction)
            yield

    def _broadcast(self, operation: Operation) -> _Steps:
        x = operation.outputs[0]
        with self._calls():
            self._nccl.broadcast(
                x.data_ptr(), x.data_ptr(), x.nbytes, BYTES, operation.root, self._comm, self._handle
            )
        yield

    def _all_gather(self, operation: Operation) -> _Steps:
        x, outputs = operation.inputs[0], operation.outputs
        with self._calls():
            if len(outputs) == 1:
                self._nccl.all_gather(
                    x.data_ptr(), outputs[0].data_ptr(), x.nbytes, BYTES, self._comm, self._handle
                )
            else:
                for root, output in enumerate(outputs):
                    source = x if root == self._rank else output
                    self._nccl.broadcast(
                        source.data_ptr(), output.data_ptr(), output.nbytes, BYTES, root, self._comm,
                        self._handle,
                    )  # fmt: skip
        yield

    def _gather(self, operation: Operation) -> _Steps:
        x, root = operation.inputs[0], operation.root
        with self._calls():
            self._send([x if rank == root else None for rank in range(self._size)])
            self._receive(operation.outputs)
        yield

    def _scatter(self, operation: Operation) -> _Steps:
        y, root = operation.outputs[0], operation.root
        with self._calls():
            self._send(operation.inputs)
            self._receive([y if rank == root else None for rank in range(self._size)])
        yield

    def _all_to_all(self, operation: Operation) -> _Steps:
        with self._calls():
            self._send(operation.inputs)
            self._receive(operation.outputs)
        yield

    # -- calls -----------------------------------------------------------------------------------

    @contextmanager
    def _calls(self) -> Iterator[None]:
        """A context whose calls of NCCL are launched together at its end."""
        with _launch_lock, self._lock:
            if self._aborted:
                raise GroupError("the communicator was aborted")
            self._nccl.group_start()
            try:
                yield
            finally:
                self._nccl.group_end()

    def _send(self, parts: Sequence[torch.Tensor | None]) -> None:
        """Send a part to each rank, except None and empty ones."""
        for rank, x in enumerate(parts):
            if x is not None and x.nbytes:
                self._nccl.send(x.data_ptr(), x.nbytes, BYTES, rank, self._comm, self._handle)

    def _receive(self, parts: Sequence[torch.Tensor | None]) -> None:
        """Receive a part from each rank, except None and empty ones."""
        for rank, x in enumerate(parts):
            if x is not None and x.nbytes:
                self._nccl.recv(x.data_ptr(), x.nbytes, BYTES, rank, self._comm, self._handle)

    def _split(self, inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """The part for each rank, of the list or of the ONE tensor with all of them."""
        return list(inputs[0].view(self._size, -1)) if len(inputs) == 1 else inputs

    def _reduce_call(self, root: int) -> _ReduceCall:
        """The call of a reduction to ``root``."""

        def call(source: int, target: int, count: int, dtype: int, op: int) -> None:
            self._nccl.reduce(source, target, count, dtype, op, root, self._comm, self._handle)

        return call

    def _reduction(
        self,
        op: ReduceOp,
        x: torch.Tensor,
        result: torch.Tensor | None,
        call: _ReduceCall,
        grouped: bool = False,
    ) -> _Steps:
        """One reduction that NCCL supports.

        Args:
            result: None if this rank gets no result.
            call: calls the function of NCCL.
            grouped: whether the caller is in :meth:`_calls`.
        """
        native = native_reduction(x.dtype, op)
        assert native is not None
        x, target = x.detach(), None if result is None else result.detach()
        has_nan: torch.Tensor | None = None
        if x.is_floating_point() and op.code in (MIN.code, MAX.code):
            has_nan = x.isnan().view(torch.uint8)
        nan_result = None
        if has_nan is not None and target is not None:
            nan_result = target.new_empty(target.shape, dtype=torch.uint8)

        def calls() -> None:
            call(_address(x), _address(target), x.numel() * native.width, native.dtype, native.op)
            if has_nan is not None:
                call(_address(has_nan), _address(nan_result), has_nan.numel(), BYTES, Reduction.MAX)

        if grouped:
            calls()
        else:
            with self._calls():
                calls()
        yield
        if target is not None and nan_result is not None:
            target.masked_fill_(nan_result.bool(), float("nan"))
        yield


class _NcclTransfer(Transfer):
    """One collective: its steps, and the event after its work."""

    def __init__(self, communicator: NcclCommunicator, operation: Operation) -> None:
        self._communicator = communicator
        self._steps = _STEPS[operation.kind](communicator, operation)
        self._event: Any = None
        communicator.follow_current_stream()
        communicator.advance(self._steps)

    def launched(self) -> bool:
        communicator = self._communicator
        if self.streams is None and communicator.ready():
            communicator.advance(self._steps)
            stream, self._event = communicator.record()
            self.streams = {communicator.device: stream}
        return self.streams is not None

    def poll(self) -> bool:
        if self._communicator.has_occurred(self._event):
            return True
        self._communicator.ready()  # or failed
        return False


def _address(x: torch.Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


_STEPS: dict[OpKind, Callable[[NcclCommunicator, Operation], _Steps]] = {
    OpKind.ALL_REDUCE: NcclCommunicator._all_reduce,
    OpKind.REDUCE: NcclCommunicator._reduce,
    OpKind.BROADCAST: NcclCommunicator._broadcast,
    OpKind.ALL_GATHER: NcclCommunicator._all_gather,
    OpKind.GATHER: NcclCommunicator._gather,
    OpKind.SCATTER: NcclCommunicator._scatter,
    OpKind.REDUCE_SCATTER: NcclCommunicator._reduce_scatter,
    OpKind.ALL_TO_ALL: NcclCommunicator._all_to_all,
}
