"""Every collective x every dtype x every reduction x {1, 2, 3, 4, 8} ranks x {shm, tcp, hierarchical}.

The conformance suite of backends tests 1, 2 and 3 ranks each time; the further ones are for `make stress`.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from shoal.spec import DTYPE_CODES, LEGAL_REDUCTIONS
from shoal.testing.conformance.cases import COPYING, REDUCING, all_cases, check_cases, run_cases
from shoal.testing.conformance.reference import OPS
from tests.support.topologies import TOPOLOGIES, topology_options

from .worlds import Worlds

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

#: Combinations of dtype and reduction, as in docs/operations.md.
LEGAL = 103
ILLEGAL = 77


def test_the_matrix_has_as_many_cases_as_the_documentation_says() -> None:
    pairs = [(dtype, op) for dtype in DTYPE_CODES for op in OPS]
    legal = [(dtype, op) for dtype, op in pairs if OPS[op].code in LEGAL_REDUCTIONS.get(dtype, ())]
    assert len(legal) == LEGAL
    assert len(pairs) - len(legal) == ILLEGAL
    text = Path(__file__).parents[2].joinpath("docs/operations.md").read_text()
    documented = set()
    for row in re.findall(r"^\| ((?:`[a-z0-9_]+`[, ]*)+) \|(.*)\|$", text, re.MULTILINE):
        for name in re.findall(r"`([a-z0-9_]+)`", row[0]):
            documented |= {
                (name, op) for op, cell in zip(OPS, row[1].split("|"), strict=True) if cell.strip() == "yes"
            }
    assert documented == {(str(dtype).removeprefix("torch."), op) for dtype, op in legal}
    cases = all_cases(1)
    assert sum(case.legal for case in cases) == LEGAL * len(REDUCING) + len(DTYPE_CODES) * len(COPYING) == 572
    assert sum(not case.legal for case in cases) == ILLEGAL * len(REDUCING) == 308


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize(
    "size", [3, 8, *(pytest.param(size, marks=pytest.mark.stress) for size in (1, 2, 4))]
)
def test_every_collective_dtype_and_reduction_agrees_with_the_reference(
    worlds: Worlds, size: int, topology: str
) -> None:
    world = worlds(size, **topology_options(topology, size))
    # 13 elements go the way of small messages, 2,500 (20 KB of float64) that of large ones.
    for count, cases in ((13, 880), (2500, 880)):
        matrix = all_cases(count)
        assert len(matrix) == cases
        check_cases(matrix, world.run(run_cases, matrix))
