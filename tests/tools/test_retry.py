"""A failed module is run again, and a test that fails twice fails the run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tools import retry

ALONE = ["-p", "no:cacheprovider", "-q"]


@pytest.fixture
def tests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of tests of their own, in the place of the project's."""
    monkeypatch.setattr(retry, "ROOT", tmp_path)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    return tmp_path


def write(folder: Path, name: str, *lines: str) -> None:
    (folder / name).write_text("\n".join(["from pathlib import Path", *lines]) + "\n")


FAILS_ONCE = (
    "def test_once():",
    "    seen = Path(__file__).with_name('seen')",
    "    first = not seen.exists()",
    "    seen.touch()",
    "    assert not first, 'the first time'",
)


def test_a_test_that_fails_once_passes_and_is_flaky(tests: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write(tests, "test_flaky.py", *FAILS_ONCE)
    write(tests, "test_good.py", "def test_good(): pass")
    result = retry.run(ALONE)
    retry.report(result)
    assert result.code == 0
    assert [(case.module, case.name) for case in result.flaky] == [("test_flaky.py", "test_once")]
    assert (result.count("passed"), result.count("failed")) == (2, 0)
    printed = capfd.readouterr().out
    assert "FLAKY test_flaky.py::test_once failed in the first run:" in printed
    assert "the first time" in printed.partition("FLAKY")[2]
    assert printed.endswith("\n2 passed, 0 failed, 0 skipped\n")


def test_a_test_that_fails_again_fails_the_run(tests: Path) -> None:
    write(tests, "test_bad.py", "def test_bad(): assert 0, 'always'", *FAILS_ONCE)
    result = retry.run(ALONE)
    assert result.code == 1
    assert (result.count("passed"), result.count("failed")) == (1, 1)
    assert result.flaky == []


def test_an_error_at_teardown_is_a_failure(tests: Path) -> None:
    write(
        tests, "test_teardown.py", "import pytest", "@pytest.fixture", "def broken():", "    yield",
        "    assert 0, 'at the end'", "def test_it(broken): pass",
        "def test_both(broken): assert 0, 'itself'",
    )  # fmt: skip
    result = retry.run(ALONE)
    assert result.code == 1
    assert (result.count("passed"), result.count("failed")) == (0, 2)


def test_a_worker_that_dies_fails_one_test_which_is_run_again(tests: Path) -> None:
    """Its files that have ended must not be given to a worker that then waits for tests."""
    for number in range(6):
        write(tests, f"test_good_{number}.py", "def test_good(): pass")
    late = "    time.sleep(1)  # the other worker has nothing left"
    ends = [FAILS_ONCE[0], late, *FAILS_ONCE[1:-1], "    first and os._exit(1)"]
    write(tests, "test_last.py", "import os, time", *ends, "def test_other(): pass")
    path = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    plugin = ["-p", "tools.lost_workers", "-n", "2", "--dist", "loadfile", "--no-loadscope-reorder"]
    result = retry.run([*ALONE, *plugin], environment={**os.environ, "PYTHONPATH": path})
    assert result.code == 0
    assert [(case.module, case.name) for case in result.flaky] == [("test_last.py", "test_once")]
    assert "crashed while running 'test_last.py::test_once'" in result.flaky[0].output
    assert (result.count("passed"), result.count("failed")) == (8, 0)


def test_a_file_that_cannot_be_imported_fails_the_run(tests: Path) -> None:
    write(tests, "test_broken.py", "import no_such_module")
    write(tests, "test_good.py", "def test_good(): pass")
    assert retry.run(ALONE).code != 0


def test_many_failed_modules_are_not_run_again(tests: Path) -> None:
    for number in range(retry.MOST_RETRIES + 1):
        write(
            tests, f"test_bad_{number}.py", "def test_bad():", f"    Path('runs').open('a').write('{number}')"
        )
        with (tests / f"test_bad_{number}.py").open("a") as file:
            file.write("    assert 0\n")
    result = retry.run(ALONE)
    assert result.code == 1
    assert len((tests / "runs").read_text()) == retry.MOST_RETRIES + 1


def test_no_tests_at_all_is_a_failure(tests: Path) -> None:
    assert retry.run(ALONE).code == retry.NO_TESTS


def test_tests_that_classes_inherit_count_each_and_run_again_where_they_failed(tests: Path) -> None:
    write(tests, "shared.py", "class Shared:", "    def test_it(self): self.check()")
    write(
        tests, "test_two.py", "from shared import Shared", "class TestGood(Shared):",
        "    def check(self): pass",
        "class TestFlaky(Shared):", "    def check(self):", "        seen = Path(__file__).with_name('seen')",
        "        first = not seen.exists()", "        seen.touch()", "        assert not first",
    )  # fmt: skip
    result = retry.run(ALONE)
    assert result.code == 0
    assert (result.count("passed"), result.count("failed")) == (2, 0)
    assert [(case.module, case.name) for case in result.flaky] == [("test_two.py", "TestFlaky::test_it")]
