"""Every collective with every dtype and reduction, as cases that a whole group runs together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from shoal.errors import UnsupportedOperation
from shoal.future import Future
from shoal.group import ProcessGroup
from shoal.spec import DTYPE_CODES, LEGAL_REDUCTIONS

from .reference import OPS, agree, data, op_of, raw, reduced

REDUCING = ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_single")
COPYING = (
    "broadcast", "all_gather", "all_gather_single", "gather", "scatter", "all_to_all", "all_to_all_single",
    "send_recv",
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One call: ``count`` elements (or, where parts differ from rank to rank, about as many a part)."""

    collective: str
    dtype: torch.dtype
    op: str
    count: int

    @property
    def legal(self) -> bool:
        return self.op == "" or OPS[self.op].code in LEGAL_REDUCTIONS.get(self.dtype, ())


def all_cases(count: int) -> list[Case]:
    """The whole matrix, illegal combinations included."""
    reducing = [Case(name, dtype, op, count) for dtype in DTYPE_CODES for op in OPS for name in REDUCING]
    copying = [Case(name, dtype, "", count) for dtype in DTYPE_CODES for name in COPYING]
    return reducing + copying


def run_cases(group: ProcessGroup, cases: Sequence[Case], burst: int = 16) -> list[list[torch.Tensor] | None]:
    """Run all ``cases`` in order, several in flight at once; None for those that are refused."""
    results: list[list[torch.Tensor] | None] = []
    for start in range(0, len(cases), burst):
        pending = []
        for case in cases[start : start + burst]:
            if case.legal:
                pending.append(start_case(group, case))
            else:
                with pytest.raises(UnsupportedOperation):
                    start_case(group, case)
                pending.append(None)
        results += [None if futures is None else finish_case(futures) for futures in pending]
    return results


def check_cases(cases: Sequence[Case], results: Sequence[Sequence[list[torch.Tensor] | None]]) -> None:
    """Compare the results of all ranks, ``results[rank][case]``, with the reference and each other."""
    size = len(results)
    for i, case in enumerate(cases):
        if not case.legal:
            continue
        for rank in range(size):
            got = results[rank][i]
            assert got is not None
            check_case(case, rank, size, got)
        if case.collective == "all_reduce":
            first = results[0][i]
            assert first is not None
            assert all(raw(got[0]) == raw(first[0]) for got in (r[i] for r in results) if got), case


def start_case(group: ProcessGroup, case: Case) -> list[Future[Any]]:
    """Submit the call; its futures, for :func:`finish_case`."""
    return _STARTERS[case.collective](group, case)


def finish_case(futures: list[Future[Any]]) -> list[torch.Tensor]:
    """Wait; the tensors that the call gave this rank."""
    values = [future.wait() for future in futures]
    flat: list[torch.Tensor] = []
    for value in values:
        flat += value if isinstance(value, list) else [] if value is None else [value]
    return flat


def check_case(case: Case, rank: int, size: int, got: Sequence[torch.Tensor]) -> None:
    """Compare what ``rank`` of ``size`` got with the reference."""
    wanted = _expected(case, rank, size)
    assert len(got) == len(wanted), (case, rank)
    for x, (expected, bound) in zip(got, wanted, strict=True):
        assert agree(x.reshape(-1), expected, bound), (case, rank, x, expected)


def part(case: Case, rank: int, index: int = 0, extra: int = 0) -> torch.Tensor:
    """What ``rank`` contributes: the ``index``-th of its parts."""
    return data(case.dtype, case.count + extra, rank, index, case.op)


def _all_reduce(group: ProcessGroup, case: Case) -> list[Future[Any]]:
    return [group.all_reduce(part(case, group.rank).clone(), op_of(group.rank, case.op))]


def _reduce(group: ProcessGroup, case: Case) -> list[Future[Any]]:
    return [group.reduce(part(case, group.rank).clone(), group.size - 1, op_of(group.rank, case.op))]


def _reduce_scatter(group: ProcessGroup, case: Case) -> list[Future[Any]]:
    inputs = [part(case, group.rank, i, i) for i in range(group.size)]
    out = torch.empty(case.count + group.rank, dtype=case.dtype)
    return [group.reduce_scatter(out, inputs, op_of(group.rank, case.op))]


def _reduce_scatter_single(group: ProcessGroup, case: Case) -> list[Future[Any]]:
    x = torch.cat([part(case, group.rank, i) for i in range(group.size)])
    return [
        group.reduce_scatter_single(torch.empty(case.count, dtype=case.dtype), x, op_of(group.rank, case.op))
    ]


def _broadcast(group: ProcessGroup, case: Case) -> list[Future[Any]]:
    return [group.broadcast(part(case, group.rank).clone(), group.size - 1)]


def _all_gather(group: ProcessGroup, case: Case) -> list[Future[Any]]:
    out = [torch.empty(case.count + i, dtype=case.dtype) for i in range(group.size)]
    return [group.all_gather(out, part(case, group.rank, 0, group.rank))]


def _all_gather_single(group: ProcessGroup, case: Case) -> list[Future[Any]]:
    out = torch.empty(group.size, case.count, dtype=case.dtype)
    return [group.all_gather_single(out, part(case, group.rank))]


def _gather(group: ProcessGroup, case: Case) -> list[Future[Any]]:
    sizes = [case.count + i for i in range(group.size)]
    return [group.gather(part(case, group.rank, 0, group.rank), root=group.size - 1, sizes=sizes)]


def _scatter(group: ProcessGroup, case: Case) -> list[Future[Any]]:
    root = group.size - 1
    inputs = [part(case, root, i) for i in range(group.size)] if group.rank == root else None
    return [group.scatter(torch.empty(case.count, dtype=case.dtype), inputs, root)]


def _all_to_all(group: ProcessGroup, case: Case) -> list[Future[Any]]:
    inputs = [part(case, group.rank, i, group.rank + i) for i in range(group.size)]
    out = [torch.empty(case.count + group.rank + i, dtype=case.dtype) for i in range(group.size)]
    return [group.all_to_all(out, inputs)]


def _all_to_all_single(group: ProcessGroup, case: Case) -> list[Future[Any]]:
    lengths = [case.count + group.rank + i for i in range(group.size)]
    x = torch.cat([part(case, group.rank, i, group.rank + i) for i in range(group.size)])
    return [group.all_to_all_single(torch.empty(sum(lengths), dtype=case.dtype), x, lengths, lengths)]


def _send_recv(group: ProcessGroup, case: Case) -> list[Future[Any]]:
    if group.size == 1:
        return []
    right, left = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    group.send(part(case, group.rank), right)
    return [group.recv(None, left)]


_STARTERS: dict[str, Callable[[ProcessGroup, Case], list[Future[Any]]]] = {
    "all_reduce": _all_reduce,
    "reduce": _reduce,
    "reduce_scatter": _reduce_scatter,
    "reduce_scatter_single": _reduce_scatter_single,
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "all_gather_single": _all_gather_single,
    "gather": _gather,
    "scatter": _scatter,
    "all_to_all": _all_to_all,
    "all_to_all_single": _all_to_all_single,
    "send_recv": _send_recv,
}

Wanted = list[tuple[torch.Tensor, torch.Tensor | None]]


def _expected(case: Case, rank: int, size: int) -> Wanted:
    root, everybody = size - 1, range(size)
    match case.collective:
        case "all_reduce":
            return [_reduced(case, size, 0, 0)]
        case "reduce":
            return [_reduced(case, size, 0, 0)] if rank == root else []
        case "reduce_scatter":
            return [_reduced(case, size, rank, rank)]
        case "reduce_scatter_single":
            return [_reduced(case, size, rank, 0)]
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


_cache: dict[tuple[Case, int, int, int], tuple[torch.Tensor, torch.Tensor | None]] = {}


def _reduced(case: Case, size: int, index: int, extra: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    # The same for all ranks, topologies and collectives: computed once.
    key = (Case("", case.dtype, case.op, case.count), size, index, extra)
    if key not in _cache:
        _cache[key] = reduced([part(case, rank, index, extra) for rank in range(size)], case.op)
    return _cache[key]
