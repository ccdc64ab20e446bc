"""Every collective with every dtype and reduction, as cases that all ranks of a group run together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import pytest
import torch

from ...errors import UnsupportedOperation
from ...future import Future
from ...group import ProcessGroup
from ...spec import DTYPE_CODES, LEGAL_REDUCTIONS
from .reference import OPS, Rounding, agree, data, op_of, raw, reduced

REDUCING = ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_single")
COPYING = (
    "broadcast", "all_gather", "all_gather_single", "gather", "scatter", "all_to_all", "all_to_all_single",
    "send_recv",
)  # fmt: skip


#: dtype and bytes of a tensor.  torch cannot pickle tensors of every dtype.
TensorBytes: TypeAlias = tuple[torch.dtype, bytes]


@dataclass(frozen=True)
class CollectiveCase:
    """One call on every rank.

    Attributes:
        collective: name of the method; "send_recv": send to the next rank and receive from the previous one.
        op: name of the reduction; "": the collective has none.
        count: number of elements of a part; where parts have different sizes, that of the smallest.
        device: device of the tensors.
    """

    collective: str
    dtype: torch.dtype
    op: str
    count: int
    device: str = "cpu"

    @property
    def legal(self) -> bool:
        """Whether the reduction is defined for the dtype."""
        return self.op == "" or OPS[self.op].code in LEGAL_REDUCTIONS.get(self.dtype, ())


def all_cases(count: int, device: str = "cpu", *, messages: bool = True) -> list[CollectiveCase]:
    """All combinations of collective, dtype and reduction, including illegal ones.

    Args:
        messages: whether to include "send_recv".
    """
    reducing = [
        CollectiveCase(name, dtype, op, count, device)
        for dtype in DTYPE_CODES
        for op in OPS
        for name in REDUCING
    ]
    copying = [
        CollectiveCase(name, dtype, "", count, device)
        for dtype in DTYPE_CODES
        for name in COPYING
        if messages or name != "send_recv"
    ]
    return reducing + copying


def run_cases(
    group: ProcessGroup, cases: Sequence[CollectiveCase], burst: int = 16
) -> list[list[TensorBytes] | None]:
    """Run all ``cases`` in order, ``burst`` at a time.

    Returns:
        The tensors that each case gave this rank; None for an illegal case, which must raise
        UnsupportedOperation.
    """
    results: list[list[TensorBytes] | None] = []
    for start in range(0, len(cases), burst):
        pending: list[list[Future[Any]] | None] = []
        for case in cases[start : start + burst]:
            if case.legal:
                pending.append(start_case(group, case))
            else:
                with pytest.raises(UnsupportedOperation):
                    start_case(group, case)
                pending.append(None)
        for futures in pending:
            results.append(None if futures is None else [(x.dtype, raw(x)) for x in finish_case(futures)])
    return results


def check_cases(
    cases: Sequence[CollectiveCase],
    results: Sequence[Sequence[list[TensorBytes] | None]],
    rounding: Rounding = "once",
) -> None:
    """Compare the results of all ranks, ``results[rank][case]``, with the reference and each other.

    Raises:
        AssertionError: a result is not within the bounds of :func:`~.reference.reduced`, or an all-reduce
            has different bits on two ranks.
    """
    size = len(results)
    for i, case in enumerate(cases):
        if not case.legal:
            continue
        for rank in range(size):
            got = results[rank][i]
            assert got is not None
            check_case(case, rank, size, [_unpacked(*each) for each in got], rounding)
            if case.collective == "all_reduce":
                assert got == results[0][i], (case, rank)


def _unpacked(dtype: torch.dtype, data: bytes) -> torch.Tensor:
    if not data:
        return torch.empty(0, dtype=dtype, device="cpu")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype)


def start_case(group: ProcessGroup, case: CollectiveCase) -> list[Future[Any]]:
    """Submit the call; return its futures, for :func:`finish_case`."""
    rank, size, root = group.rank, group.size, group.size - 1
    op: Any = op_of(rank, case.op) if case.op else None
    match case.collective:
        case "all_reduce":
            return [group.all_reduce(_own(case, rank), op)]
        case "reduce":
            return [group.reduce(_own(case, rank), root, op)]
        case "reduce_scatter":
            inputs = [_own(case, rank, i, i) for i in range(size)]
            return [group.reduce_scatter(_room(case, case.count + rank), inputs, op)]
        case "reduce_scatter_single":
            x = torch.cat([_own(case, rank, i) for i in range(size)])
            return [group.reduce_scatter_single(_room(case, case.count), x, op)]
        case "broadcast":
            return [group.broadcast(_own(case, rank), root)]
        case "all_gather":
            out = [_room(case, case.count + i) for i in range(size)]
            return [group.all_gather(out, _own(case, rank, 0, rank))]
        case "all_gather_single":
            return [group.all_gather_single(_room(case, size, case.count), _own(case, rank))]
        case "gather":
            sizes = [case.count + i for i in range(size)]
            return [group.gather(_own(case, rank, 0, rank), root=root, sizes=sizes)]
        case "scatter":
            parts = [_own(case, root, i) for i in range(size)] if rank == root else None
            return [group.scatter(_room(case, case.count), parts, root)]
        case "all_to_all":
            inputs = [_own(case, rank, i, rank + i) for i in range(size)]
            return [group.all_to_all([_room(case, case.count + rank + i) for i in range(size)], inputs)]
        case "all_to_all_single":
            lengths = [case.count + rank + i for i in range(size)]
            x = torch.cat([_own(case, rank, i, rank + i) for i in range(size)])
            return [group.all_to_all_single(_room(case, sum(lengths)), x, lengths, lengths)]
        case _:
            if size == 1:
                return []
            group.send(_own(case, rank), (rank + 1) % size)
            return [group.recv(None if case.device == "cpu" else _room(case, case.count), (rank - 1) % size)]


def finish_case(futures: list[Future[Any]]) -> list[torch.Tensor]:
    """Wait for the call; return the tensors that it gave this rank, on the CPU."""
    values = [future.wait() for future in futures]
    flat: list[torch.Tensor] = []
    for value in values:
        flat += value if isinstance(value, list) else [] if value is None else [value]
    return [x.cpu() for x in flat]


def check_case(
    case: CollectiveCase, rank: int, size: int, got: Sequence[torch.Tensor], rounding: Rounding = "once"
) -> None:
    """Compare the tensors that ``rank`` of ``size`` got with the reference."""
    wanted = _expected(case, rank, size, rounding)
    assert len(got) == len(wanted), (case, rank)
    for x, (expected, bound) in zip(got, wanted, strict=True):
        assert agree(x.reshape(-1), expected, bound), (case, rank, x, expected)


def part(case: CollectiveCase, rank: int, index: int = 0, extra: int = 0) -> torch.Tensor:
    """The ``index``-th input of ``rank``, on the CPU, with ``extra`` more elements."""
    return data(case.dtype, case.count + extra, rank, index, case.op)


def _own(case: CollectiveCase, rank: int, index: int = 0, extra: int = 0) -> torch.Tensor:
    """A copy of :func:`part` on the device of the case."""
    return part(case, rank, index, extra).to(case.device, copy=True)


def _room(case: CollectiveCase, *shape: int) -> torch.Tensor:
    """An output."""
    return torch.empty(shape, dtype=case.dtype, device=case.device)


Wanted = list[tuple[torch.Tensor, torch.Tensor | None]]


def _expected(case: CollectiveCase, rank: int, size: int, rounding: Rounding) -> Wanted:
    root, everybody = size - 1, range(size)
    match case.collective:
        case "all_reduce":
            return [_reduced(case, size, 0, 0, rounding)]
        case "reduce":
            return [_reduced(case, size, 0, 0, rounding)] if rank == root else []
        case "reduce_scatter":
            return [_reduced(case, size, rank, rank, rounding)]
        case "reduce_scatter_single":
            return [_reduced(case, size, rank, 0, rounding)]
        case "broadcast":
            return [(part(case, root), None)]
        case "all_gather":
            return [(part(case, i, 0, i), None) for i in everybody]
        case "all_gather_single":
            return [(torch.cat([part(case, i) for i in everybody]), None)]
        case "gather":
            return [(part(case, i, 0, i), None) for i in everybody] if rank == root else []
        case "scatter":
            return [(part(case, root, rank), None)]
        case "all_to_all":
            return [(part(case, i, rank, rank + i), None) for i in everybody]
        case "all_to_all_single":
            return [(torch.cat([part(case, i, rank, rank + i) for i in everybody]), None)]
        case _:
            return [(part(case, (rank - 1) % size), None)] if size > 1 else []


_cache: dict[tuple[object, ...], tuple[torch.Tensor, torch.Tensor | None]] = {}


def _reduced(
    case: CollectiveCase, size: int, index: int, extra: int, rounding: Rounding
) -> tuple[torch.Tensor, torch.Tensor | None]:
    # The same for all ranks, backends and collectives: computed once.
    key = (case.dtype, case.op, case.count, size, index, extra, rounding)
    if key not in _cache:
        _cache[key] = reduced([part(case, rank, index, extra) for rank in range(size)], case.op, rounding)
    return _cache[key]
