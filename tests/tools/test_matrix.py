"""The table of releases on the installation page is that of the results that are kept."""

from __future__ import annotations

import json

import pytest
from tools import matrix

from shoal.common import torch_release


def test_the_page_has_the_results_that_are_kept() -> None:
    assert f"written by `make matrix` -->\n{matrix.table()}\n<!-- releases: end" in matrix.PAGE.read_text()


def test_the_releases_are_those_that_are_supported() -> None:
    first, above = torch_release.SUPPORTED
    minors = [(first[0], minor) for minor in range(first[1], above[1])]
    pinned = next(
        line
        for line in (matrix.ROOT / "constraints.txt").read_text().splitlines()
        if line.startswith("torch==")
    )
    tested = sorted((*matrix.RELEASES, pinned.removeprefix("torch==")))
    assert [tuple(map(int, release.split(".")[:2])) for release in tested] == minors


def test_nothing_failed_in_the_results_that_are_kept() -> None:
    kept = json.loads(matrix.RESULTS.read_text())
    assert kept.keys() <= set(matrix.RELEASES)
    for suites in kept.values():
        assert suites.keys() <= set(matrix.SUITES)
        for record in suites.values():
            assert record["passed"] > 0
            assert record["failures"] == []


@pytest.mark.parametrize("path", matrix.QUICK)
def test_the_quick_files_are_there(path: str) -> None:
    assert (matrix.ROOT / path).is_file()
