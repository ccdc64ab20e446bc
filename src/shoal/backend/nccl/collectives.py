"""The collectives of one communicator as calls of NCCL on one stream.

Every collective is one group of NCCL calls, with work of torch before and after it on the same stream.  Data
that is only copied is passed to NCCL as bytes.  What NCCL cannot reduce, or reduces in another way than shoal
(16-bit integers, bool, bitwise operations, averages of integers, products of complex numbers), is gathered
and reduced by torch, in the order of the ranks.  NCCL's MIN and MAX ignore NaN, so a second reduction finds
the elements that are NaN on a rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ...spec import MAX, MIN, Operation, OpKind, ReduceOp
from ...streams import StreamRuntime
from ..engine import Transfer
from .library import Nccl, Reduction
from .reductions import BYTES, native_reduction, reduce_in_torch

if TYPE_CHECKING:
    from .communicator import NcclCommunicator

#: One call of NCCL: a function, and its arguments before the communicator and the stream.
NcclCall = tuple[Callable[..., None], tuple[int, ...]]
#: Work of torch on the stream after the calls; keeps temporary tensors.  None: there is none.
_Finish = Callable[[], object] | None


class StreamCollectives:
    """Enqueues the collectives of a communicator on ``stream``."""

    def __init__(
        self, communicator: NcclCommunicator, nccl: Nccl, runtime: StreamRuntime, stream: Any
    ) -> None:
        self._communicator, self._nccl, self._runtime = communicator, nccl, runtime
        self._stream, self._handle = stream, runtime.handle(stream)
        self._rank, self._size = communicator.rank, communicator.size
        self.device = communicator.device
        self.ready = communicator.ready

    def start(self, operation: Operation) -> Transfer:
        return _NcclTransfer(self, operation)

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
        calls: list[NcclCall] = []
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

    def _launch(self, calls: Sequence[NcclCall]) -> None:
        self._communicator.launch(calls, self._handle)

    def _only(self, peer: int, x: torch.Tensor) -> list[torch.Tensor | None]:
        """A part for ``peer`` alone."""
        return [x if rank == peer else None for rank in range(self._size)]

    def _sends(self, parts: Sequence[torch.Tensor | None]) -> list[NcclCall]:
        """The calls that send a part to each rank, except None and empty ones."""
        return self._messages(self._nccl.send, parts)

    def _receives(self, parts: Sequence[torch.Tensor | None]) -> list[NcclCall]:
        """The calls that receive a part from each rank, except None and empty ones."""
        return self._messages(self._nccl.recv, parts)

    @staticmethod
    def _messages(function: Callable[..., None], parts: Sequence[torch.Tensor | None]) -> list[NcclCall]:
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
    ) -> tuple[list[NcclCall], _Finish]:
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
        calls: list[NcclCall] = [(function, arguments)]
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

    def __init__(self, stream: StreamCollectives, operation: Operation) -> None:
        self._stream = stream
        stream.follow_current_stream()
        #: Kept until the transfer is complete, with its temporary tensors.
        self._finish = _COLLECTIVES[operation.kind](stream, operation)
        self._event: Any = None

    def launched(self) -> bool:
        if self._event is None and self._stream.ready():
            if self._finish is not None:
                self._stream.compute(self._finish)
            stream, self._event = self._stream.record()
            self.events = {self._stream.device: (stream, self._event)}
        return self._event is not None

    def poll(self) -> bool:
        if self._stream.has_occurred(self._event):
            return True
        self._stream.ready()  # or failed
        return False


_COLLECTIVES: dict[OpKind, Callable[[StreamCollectives, Operation], _Finish]] = {
    OpKind.ALL_REDUCE: StreamCollectives._all_reduce,
    OpKind.REDUCE: StreamCollectives._reduce,
    OpKind.BROADCAST: StreamCollectives._broadcast,
    OpKind.ALL_GATHER: StreamCollectives._all_gather,
    OpKind.GATHER: StreamCollectives._gather,
    OpKind.SCATTER: StreamCollectives._scatter,
    OpKind.REDUCE_SCATTER: StreamCollectives._reduce_scatter,
    OpKind.ALL_TO_ALL: StreamCollectives._all_to_all,
}
