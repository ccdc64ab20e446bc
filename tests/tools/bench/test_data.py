"""A wrong result of any operation is seen, a right one is not called wrong."""

from __future__ import annotations

import numpy as np
import pytest

from shoal.tools.bench.case import REDUCTIONS, Case, Size
from shoal.tools.bench.ranks import data
from shoal.tools.bench.ranks.engine import STORAGE, Values

RANKS = 3
OPERATIONS = ["all_reduce", "broadcast", "all_gather_single", "reduce_scatter_single", "all_to_all_single"]


def _performed(case: Case, rank: int) -> tuple[Values, Values]:
    """The buffers of one rank after the operation, computed from all inputs."""
    inputs, outputs = case.elements(RANKS)
    xs = [np.empty(inputs, STORAGE[case.dtype]) for _ in range(RANKS)]
    for r, x in enumerate(xs):
        data.fill(x, case.dtype, r)
    total = data.encode(np.sum([data.decode(x) for x in xs], axis=0), case.dtype)
    out = np.zeros(outputs, STORAGE[case.dtype])
    mine = slice(rank * inputs // RANKS, (rank + 1) * inputs // RANKS)
    if case.operation == "all_reduce":
        return total, out
    if case.operation == "broadcast":
        return xs[0], out
    out[:] = {
        "all_gather_single": np.concatenate(xs),
        "reduce_scatter_single": total[mine] if outputs == inputs // RANKS else 0,
        "all_to_all_single": np.concatenate([x[mine] for x in xs]) if inputs == outputs else 0,
    }[case.operation]
    return xs[rank], out


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("nbytes", [8, 600_004])
def test_a_wrong_element_is_seen(operation: str, dtype: str, nbytes: int) -> None:
    case = Case(operation, dtype, Size(nbytes))
    for rank in range(RANKS):
        x, out = _performed(case, rank)
        error = data.check(case, rank, RANKS, x, out)
        assert (error == 0) or (operation in REDUCTIONS and dtype == "bf16" and error < 2**-7)
        result = out if len(out) else x
        result[len(result) // 2] = 0
        with pytest.raises(data.WrongResult, match=f"rank {rank}: wrong result"):
            data.check(case, rank, RANKS, x, out)


def test_what_another_rank_should_have_is_wrong() -> None:
    case = Case("all_to_all_single", "fp32", Size(600_000))
    with pytest.raises(data.WrongResult):
        data.check(case, 1, RANKS, *_performed(case, 0))
