"""The collectives of one group as nonblocking collectives of MPI.

Data is passed to MPI as elements of a size.  Reductions are computed by shoal's kernels, in the order of the
ranks and rounded once: MPI has no bfloat16, and does not promise equal bits on all ranks.  An all-reduce is
Ialltoallv, the reduction of one part on each rank, and Iallgatherv; a small one is Iallgather, and the
reduction of all inputs on each rank.  On request, MPI computes the reductions that it has.

All ranks must start the operations of an MPI communicator in the same order.  So there are two communicators:
one for the first parts of transfers, which start when the operation is submitted, and one for the second
parts, which start in the order of polling.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from itertools import accumulate
from types import ModuleType
from typing import Any, NamedTuple

import torch

from ...errors import CollectiveMismatch
from ...spec import AVG, BAND, BOR, BXOR, MAX, MIN, PREMUL_SUM, PRODUCT, SUM, Operation, OpKind
from ..engine import Communicator, Transfer
from ..kernels import copy_bytes, reduction_kernel

#: An MPI request, for which the next step of a transfer waits.
_Steps = Generator[Any, None, None]

#: bytes of all ranks up to which every rank gets all inputs and reduces them; between two ranks that sends no
#: more than a reduction in parts
_SMALL_BYTES, _SMALL_PAIR_BYTES = 64 << 10, 512 << 10
#: bytes of temporary memory that a communicator keeps for its next operation
_KEPT_BYTES = 64 << 20
#: The boundaries of the parts of a reduction are multiples of a cache line.
_LINE_BYTES = 64


class MpiCommunicator(Communicator):
    """A group of ranks, as two communicators of MPI.

    Args:
        mpi: the module ``mpi4py.MPI``.
        first, second: the communicators of the first and second parts of transfers.
        reduces: whether MPI computes the reductions that it has.
    """

    def __init__(self, mpi: ModuleType, first: Any, second: Any, reduces: bool) -> None:
        self._mpi = mpi
        self._first, self._second = first, second
        self._rank, self._size = int(first.Get_rank()), int(first.Get_size())
        self._types = {
            1: mpi.BYTE,
            2: mpi.INT16_T,
            4: mpi.INT32_T,
            8: mpi.INT64_T,
            16: mpi.C_DOUBLE_COMPLEX,
        }
        self._kept: torch.Tensor | None = None
        self._reductions = _mpi_reductions(mpi) if reduces else {}

    def start(self, operation: Operation) -> Transfer:
        return _StepwiseTransfer(_TRANSFERS[operation.kind](self, operation))

    def close(self) -> None:
        self._first.Free()
        self._second.Free()

    # -- transfers -------------------------------------------------------------------------------

    def _all_reduce(self, operation: Operation) -> _Steps:
        x = operation.outputs[0]
        if native := self._native(operation):
            yield self._first.Iallreduce(self._mpi.IN_PLACE, self._typed(x, native), native.op)
            native.finish(x, self._size)
            return
        if self._is_small(x):
            gathered = self._temporary(x.nbytes * self._size)
            yield self._first.Iallgather(self._whole(x), self._equal_parts(gathered, x))
            self._reduce_parts(operation, self._part_addresses(gathered, x), x)
            return
        counts = self._shares(x)
        mine = _part(x, counts, self._rank)
        yield from self._reduce_scatter_into(operation, x, counts, mine)
        yield self._second.Iallgatherv(self._mpi.IN_PLACE, self._parts(x, counts))

    def _reduce(self, operation: Operation) -> _Steps:
        x, root = operation.inputs[0], operation.root
        at_root = self._rank == root
        if native := self._native(operation):
            source, into = self._typed(x, native), None
            if at_root:
                source, into = self._mpi.IN_PLACE, source
            yield self._first.Ireduce(source, into, native.op, root)
            if at_root:
                native.finish(x, self._size)
            return
        if self._is_small(x):
            gathered = self._temporary(x.nbytes * self._size if at_root else 0)
            into = self._equal_parts(gathered, x) if at_root else None
            yield self._first.Igather(self._whole(x), into, root)
            if at_root:
                self._reduce_parts(operation, self._part_addresses(gathered, x), x)
            return
        counts = self._shares(x)
        mine = _part(x, counts, self._rank)
        if not at_root:  # only the root's tensor may change
            mine = torch.empty_like(mine)
        yield from self._reduce_scatter_into(operation, x, counts, mine)
        if at_root:
            yield self._second.Igatherv(self._mpi.IN_PLACE, self._parts(x, counts), root)
        else:
            yield self._second.Igatherv(self._whole(mine), None, root)

    def _broadcast(self, operation: Operation) -> _Steps:
        yield self._first.Ibcast(self._whole(operation.outputs[0]), operation.root)

    def _all_gather(self, operation: Operation) -> _Steps:
        x, outputs = operation.inputs[0], operation.outputs
        gathered, counts = self._room_for(outputs)
        yield self._first.Iallgatherv(self._whole(x), self._parts(gathered, counts))
        _unpack(gathered, outputs)

    def _gather(self, operation: Operation) -> _Steps:
        x, outputs, root = operation.inputs[0], operation.outputs, operation.root
        if self._rank != root:
            yield self._first.Igatherv(self._whole(x), None, root)
            return
        gathered, counts = self._room_for(outputs)
        yield self._first.Igatherv(self._whole(x), self._parts(gathered, counts), root)
        _unpack(gathered, outputs)

    def _scatter(self, operation: Operation) -> _Steps:
        inputs, y, root = operation.inputs, operation.outputs[0], operation.root
        if self._rank != root:
            yield self._first.Iscatterv(None, self._whole(y), root)
            return
        packed, counts = self._packed(inputs)
        yield self._first.Iscatterv(self._parts(packed, counts), self._whole(y), root)

    def _reduce_scatter(self, operation: Operation) -> _Steps:
        packed, counts = self._packed(operation.inputs)
        y = operation.outputs[0]
        if native := self._native(operation):
            yield self._first.Ireduce_scatter(
                self._typed(packed, native), self._typed(y, native), counts, native.op
            )
            native.finish(y, self._size)
        else:
            yield from self._reduce_scatter_into(operation, packed, counts, y)

    def _all_to_all(self, operation: Operation) -> _Steps:
        inputs, outputs = operation.inputs, operation.outputs
        # Its sizes are not compared by the control channel.
        sent = torch.tensor([x.numel() for x in inputs], device="cpu")
        received = torch.empty_like(sent)
        one = sent[:1]
        yield self._first.Ialltoall(self._equal_parts(sent, one), self._equal_parts(received, one))
        for rank, (count, output) in enumerate(zip(received.tolist(), outputs, strict=True)):
            if count != output.numel():
                raise CollectiveMismatch(
                    f"all_to_all on rank {self._rank}: rank {rank} sends {count} elements, "
                    f"but the output for its part has {output.numel()}"
                )
        packed, send_counts = self._packed(inputs)
        room, receive_counts = self._room_for(outputs)
        yield self._second.Ialltoallv(self._parts(packed, send_counts), self._parts(room, receive_counts))
        _unpack(room, outputs)

    # -- parts of transfers ----------------------------------------------------------------------

    def _reduce_scatter_into(
        self, operation: Operation, x: torch.Tensor, counts: Sequence[int], mine: torch.Tensor
    ) -> _Steps:
        """Send part *i* of ``x`` to rank *i*, and reduce this rank's part of all ranks into ``mine``."""
        starts = [0, *accumulate(counts[:-1])]
        others = [0 if rank == self._rank else count for rank, count in enumerate(counts)]
        received = [0 if rank == self._rank else mine.numel() for rank in range(self._size)]
        gathered = self._temporary(mine.nbytes * (self._size - 1))
        type_ = self._types[x.element_size()]
        yield self._first.Ialltoallv(
            [self._memory(x), others, starts, type_], [self._memory(gathered), received, None, type_]
        )
        own = x.data_ptr() + starts[self._rank] * x.element_size()
        parts = [gathered.data_ptr() + index * mine.nbytes for index in range(self._size - 1)]
        self._reduce_parts(operation, [*parts[: self._rank], own, *parts[self._rank :]], mine)
        kept = self._kept  # another thread may take it
        if (0 if kept is None else kept.numel()) < gathered.numel() <= _KEPT_BYTES:
            self._kept = gathered

    def _reduce_parts(self, operation: Operation, parts: list[int], result: torch.Tensor) -> None:
        """Reduce the parts at these addresses, one from each rank and as long as ``result``, into it."""
        if result.numel():
            reduction_kernel(result.dtype, operation.op, self._size)(
                [result.data_ptr()], parts, result.numel()
            )

    def _is_small(self, x: torch.Tensor) -> bool:
        return x.nbytes * self._size <= (_SMALL_PAIR_BYTES if self._size == 2 else _SMALL_BYTES)

    def _shares(self, x: torch.Tensor) -> list[int]:
        """The number of elements that each rank reduces."""
        line = max(_LINE_BYTES // x.element_size(), 1)
        lines = -(-x.numel() // line)
        ends = [min(lines * (rank + 1) // self._size * line, x.numel()) for rank in range(self._size)]
        return [end - start for start, end in zip([0, *ends], ends, strict=False)]

    def _temporary(self, nbytes: int) -> torch.Tensor:
        """Return uninitialised memory; new pages take longer than the rest of a large operation."""
        kept = self._kept
        if kept is None or kept.numel() < nbytes:
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        self._kept = None
        return kept

    def _packed(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, list[int]]:
        """Return one tensor with the elements of all parts, and their numbers."""
        if len(tensors) == 1:
            return tensors[0], [tensors[0].numel() // self._size] * self._size
        packed, counts = self._room_for(tensors)
        for address, x in zip(_addresses(packed, tensors), tensors, strict=True):
            copy_bytes(address, x.data_ptr(), x.nbytes)
        return packed, counts

    def _room_for(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, list[int]]:
        """Return one tensor for the elements of all parts, and their numbers; see :func:`_unpack`."""
        if len(tensors) == 1:
            return tensors[0], [tensors[0].numel() // self._size] * self._size
        counts = [x.numel() for x in tensors]
        return torch.empty(sum(counts), dtype=tensors[0].dtype, device="cpu"), counts

    def _native(self, operation: Operation) -> _Reduction | None:
        """The reduction of MPI for an operation; None: shoal computes it."""
        return self._reductions.get((operation.inputs[0].dtype, operation.op.code))

    # -- arguments of MPI ------------------------------------------------------------------------

    def _whole(self, x: torch.Tensor) -> list[Any]:
        return [self._memory(x), x.numel(), self._types[x.element_size()]]

    def _typed(self, x: torch.Tensor, reduction: _Reduction) -> list[Any]:
        return [self._memory(x), x.numel(), reduction.type]

    def _parts(self, x: torch.Tensor, counts: Sequence[int]) -> list[Any]:
        return [self._memory(x), counts, None, self._types[x.element_size()]]

    def _equal_parts(self, x: torch.Tensor, part: torch.Tensor) -> list[Any]:
        """The memory of ``x`` as one part like ``part`` for each rank."""
        return [self._memory(x), part.numel(), self._types[part.element_size()]]

    def _part_addresses(self, x: torch.Tensor, part: torch.Tensor) -> list[int]:
        return [x.data_ptr() + rank * part.nbytes for rank in range(self._size)]

    def _memory(self, x: torch.Tensor) -> Any:
        return self._mpi.buffer.fromaddress(x.data_ptr(), x.nbytes)


class _Reduction(NamedTuple):
    """A reduction of MPI: its datatype and operation, and whether it is divided by the number of ranks."""

    type: Any
    op: Any
    averages: bool

    def finish(self, x: torch.Tensor, size: int) -> None:
        if self.averages:
            with torch.inference_mode():  # also for tensors that require gradients
                x.div_(size)


def _mpi_reductions(mpi: ModuleType) -> dict[tuple[torch.dtype, int], _Reduction]:
    """The reductions of MPI that mean the same as those of shoal, by dtype and code."""
    floats = {torch.float32: mpi.FLOAT, torch.float64: mpi.DOUBLE}
    numbers = floats | {torch.complex64: mpi.C_FLOAT_COMPLEX, torch.complex128: mpi.C_DOUBLE_COMPLEX}
    wide = {
        torch.int32: mpi.INT32_T, torch.int64: mpi.INT64_T,
        torch.uint32: mpi.UINT32_T, torch.uint64: mpi.UINT64_T,
    }  # fmt: skip
    integers = wide | {
        torch.int8: mpi.INT8_T, torch.int16: mpi.INT16_T,
        torch.uint8: mpi.UINT8_T, torch.uint16: mpi.UINT16_T,
    }  # fmt: skip
    table = {}
    for ops, types in (
        ({SUM: mpi.SUM, PRODUCT: mpi.PROD}, numbers | wide),  # Open MPI saturates narrower sums
        ({AVG: mpi.SUM, PREMUL_SUM: mpi.SUM}, numbers),  # averages of integers do not overflow
        # MPI does not say what MIN and MAX of NaN are.
        ({MIN: mpi.MIN, MAX: mpi.MAX, BAND: mpi.BAND, BOR: mpi.BOR, BXOR: mpi.BXOR}, integers),
    ):
        for op, of_mpi in ops.items():
            for dtype, type_ in types.items():
                table[dtype, op.code] = _Reduction(type_, of_mpi, op is AVG)
    return table


class _StepwiseTransfer(Transfer):
    """A transfer as a generator of MPI requests."""

    def __init__(self, steps: _Steps) -> None:
        self._steps = steps
        self._request = next(steps)

    def poll(self) -> bool:
        while self._request.Test():
            try:
                self._request = next(self._steps)
            except StopIteration:
                return True
        return False


def _part(x: torch.Tensor, counts: Sequence[int], index: int) -> torch.Tensor:
    """Part ``index`` of ``x``, whose parts have ``counts`` elements."""
    return x.detach().view(-1).narrow(0, sum(counts[:index]), counts[index])


def _addresses(whole: torch.Tensor, parts: Sequence[torch.Tensor]) -> Iterator[int]:
    """The address of each part in ``whole``, which has the elements of all parts, one after another."""
    return accumulate((part.nbytes for part in parts[:-1]), initial=whole.data_ptr())


def _unpack(whole: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
    """Copy the elements of ``whole`` to ``parts``, unless it is the only one of them."""
    if len(parts) > 1:
        for address, part in zip(_addresses(whole, parts), parts, strict=True):
            copy_bytes(part.data_ptr(), address, part.nbytes)


_TRANSFERS: dict[OpKind, Callable[[MpiCommunicator, Operation], _Steps]] = {
    OpKind.ALL_REDUCE: MpiCommunicator._all_reduce,
    OpKind.REDUCE: MpiCommunicator._reduce,
    OpKind.BROADCAST: MpiCommunicator._broadcast,
    OpKind.ALL_GATHER: MpiCommunicator._all_gather,
    OpKind.GATHER: MpiCommunicator._gather,
    OpKind.SCATTER: MpiCommunicator._scatter,
    OpKind.REDUCE_SCATTER: MpiCommunicator._reduce_scatter,
    OpKind.ALL_TO_ALL: MpiCommunicator._all_to_all,
}
