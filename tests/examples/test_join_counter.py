"""The counter example: it counts all batches, and prints what its first lines say."""

from __future__ import annotations

from types import ModuleType

import pytest

import shoal
from shoal.testing import run_threads
from tests.examples.load import EXAMPLES, load
from tests.support.quick_launcher import QuickLauncher


@pytest.fixture(scope="module")
def join_counter() -> ModuleType:
    return load("join_counter")


@pytest.mark.parametrize("batches", [(3,), (0, 5), (2, 2, 2), (4, 0, 1, 7)])
def test_every_rank_knows_the_batches_of_all(join_counter: ModuleType, batches: tuple[int, ...]) -> None:
    def rank(group: shoal.ProcessGroup) -> int:
        total: int = join_counter.count(group, batches[group.rank]).total
        return total

    assert run_threads(rank, len(batches)) == [sum(batches)] * len(batches)


def test_it_prints_what_its_first_lines_say(join_counter: ModuleType, launcher: QuickLauncher) -> None:
    lines = (join_counter.__doc__ or "").splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("    $ shoal run"))
    expected = [line.strip() for line in lines[start + 1 : lines.index("", start)]]
    code, out, err = launcher.run(3, str(EXAMPLES / "join_counter.py"))
    assert code == 0, out + err
    assert out.splitlines() == expected
