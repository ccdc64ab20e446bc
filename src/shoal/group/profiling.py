"""Ranges of torch's profiler for the operations of a group, and for waiting for them.

While a profiler runs, an operation takes the slow path, where a range is open around its submission, and its
future opens another one while it blocks.  So without a profiler an operation costs one more look-up, of
``profiler._is_profiler_enabled``, and a wait costs nothing more.

The metadata of a range has the names of torch's ``record_param_comms``, which analysers read.  Torch writes
it into a trace if the profiler has ``record_shapes=True``.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from functools import cache
from typing import Any, TypeVar

import torch
from torch.autograd import profiler

from ..backend.base import GroupSpec
from ..future import Future
from ..spec import Operation

T = TypeVar("T")

#: prefix of the names of ranges
PREFIX = "shoal::"
#: names of dtypes in torch's C++ that differ from those in Python by more than the first letter
_DTYPE_NAMES = {
    torch.float64: "Double", torch.float32: "Float", torch.float16: "Half", torch.bfloat16: "BFloat16",
    torch.complex128: "ComplexDouble", torch.complex64: "ComplexFloat", torch.complex32: "ComplexHalf",
    torch.int64: "Long", torch.int32: "Int", torch.int16: "Short", torch.int8: "Char",
    torch.uint64: "UInt64", torch.uint32: "UInt32", torch.uint16: "UInt16", torch.uint8: "Byte",
}  # fmt: skip
#: names of operations in torch's metadata that are not those of shoal
_TORCH_NAMES = {"all_reduce": "allreduce"}


def submission_ranges(spec: GroupSpec, operations: Iterable[Operation]) -> ExitStack:
    """Open a range for each operation; the returned context closes them."""
    with ExitStack() as ranges:
        for operation in operations:
            tensors = (*operation.inputs, *operation.outputs)
            kind = operation.kind.name.lower()
            count = sum(x.numel() for x in operation.inputs)
            found = metadata(spec, kind, tensors[0].dtype if tensors else None, count, operation.number)
            found["Out msg nelems"] = sum(x.numel() for x in operation.outputs)
            found.update(ends_of_message(spec, kind, operation.peer))
            ranges.enter_context(torch._C._profiler._RecordFunctionFast(PREFIX + kind, tensors, found))
        return ranges.pop_all()


def metadata(
    spec: GroupSpec, kind: str, dtype: torch.dtype | None, count: int, number: int
) -> dict[str, str | int]:
    """Describe an operation.

    Args:
        count: number of elements of the input.
        number: sequence number; -1 if it has none.
    """
    found: dict[str, str | int] = {
        "Collective name": _TORCH_NAMES.get(kind, kind),
        "dtype": "" if dtype is None else _torch_name(dtype),
        "In msg nelems": count,
        "Group size": len(spec.ranks),
        "Process Group Name": spec.name,
        "Process Group Description": spec.name,
        "Process Group Ranks": _listed(spec.ranks),
    }
    if number >= 0:
        found["Seq"] = number
    return found


def ends_of_message(spec: GroupSpec, kind: str, peer: int) -> dict[str, int]:
    """Describe the sender and the receiver of a message.

    Args:
        peer: numbered in the group; -1 for a collective and for a message from any rank, which have neither.
    """
    if peer < 0:
        return {}
    own, other = spec.ranks[spec.rank], spec.ranks[peer]
    source, destination = (own, other) if kind == "send" else (other, own)
    return {"Src Rank": source, "Dst Rank": destination}


@cache
def _listed(ranks: tuple[int, ...]) -> str:
    return str(list(ranks))


def _torch_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype in torch's C++."""
    return _DTYPE_NAMES.get(dtype) or str(dtype).removeprefix("torch.").capitalize()


def show_waits(future: Future[Any]) -> None:
    """Make a future open a range while it blocks and a profiler runs."""
    plain = type(future)
    if plain not in _classes:
        # The assignment of __class__ requires the same layout.
        _classes[plain] = type(plain.__name__, (_ProfiledFuture, plain), {"__slots__": ()})
    future.__class__ = _classes[plain]


class _ProfiledFuture(Future[T]):
    __slots__ = ()

    def wait(self, timeout: float | None = None, *, blocking: bool = True) -> T:
        if timeout is None and not self.done():
            self._complete(None)
        try:
            return super().wait(timeout, blocking=blocking)
        finally:
            del self  # see Future.wait

    result = wait

    def _complete(self, timeout: float | None) -> bool:
        if not profiler._is_profiler_enabled:
            return super()._complete(timeout)
        found = {}
        if (record := self.record) is not None:
            kind = record.kind.name.lower()
            found = {"Collective name": "wait", "Waits for": kind, "Seq": record.number}
        with torch._C._profiler._RecordFunctionFast(f"{PREFIX}wait", (), found):
            return super()._complete(timeout)


#: classes of futures -> their subclasses that open ranges
_classes: dict[type, type[Future[Any]]] = {}
