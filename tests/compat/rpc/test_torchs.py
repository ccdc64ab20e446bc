"""Torch's own tests of RPC over shoal, and its examples as they are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from tests.compat.pool import Pool, Pools
from tests.compat.rank import Context
from tests.compat.rpc import torchs
from tests.compat.rpc.expected import OUT, QUICK, SLOW

#: seconds for a test; torch gives it 300
_LIMIT = 60.0


@pytest.fixture(scope="module")
def pools() -> Iterator[Pools]:
    with closing(Pools(backend=None)) as pools:
        yield pools


@pytest.fixture
def pool(pools: Pools) -> Pool:
    """Processes in which shoal is behind torch.distributed.rpc."""
    return pools(torchs.RANKS)


def _each(tests: dict[str, list[str]]) -> list[tuple[str, str]]:
    return [(suite, test) for suite, names in tests.items() for test in names]


@pytest.mark.parametrize(("suite", "test"), _each(QUICK))
def test_torchs_own(pool: Pool, suite: str, test: str) -> None:
    assert pool.run(torchs.run, suite, test, limit=_LIMIT) == [""] * torchs.RANKS


@pytest.mark.stress
@pytest.mark.parametrize(("suite", "test"), _each(SLOW))
def test_torchs_own_that_sleep(pool: Pool, suite: str, test: str) -> None:
    assert pool.run(torchs.run, suite, test, limit=_LIMIT) == [""] * torchs.RANKS


def listed(context: Context) -> dict[str, list[str]]:
    return {suite: torchs.tests_of(suite) for suite in torchs.SUITES}


def test_the_table_has_every_test_of_torchs_once(pool: Pool) -> None:
    theirs, *_ = pool.run(listed)
    for suite, names in theirs.items():
        out = [test for tests in OUT.get(suite, {}).values() for test in tests]
        assert sorted([*QUICK.get(suite, []), *SLOW.get(suite, []), *out]) == sorted(names)


@pytest.mark.stress
@pytest.mark.parametrize(
    ("suite", "test"),
    [(suite, test) for suite, reasons in OUT.items() for tests in reasons.values() for test in tests],
)
def test_what_is_left_out_would_not_pass(suite: str, test: str) -> None:
    with Pool(torchs.RANKS, backend=None) as pool:
        pool.start(torchs.run, suite, test)
        outcomes = pool.collect(_LIMIT)
    assert [outcome.value for outcome in outcomes if outcome.ok] != [""] * torchs.RANKS
