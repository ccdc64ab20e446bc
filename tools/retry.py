"""Run pytest, and run each module with a failed test once more by itself.

    python -m tools.retry -m "not stress" -n 4 --dist loadfile

Takes options of pytest (no paths) and runs all tests. It fails if a module fails again. The output of each
first failure is printed at the end, under FLAKY: a test that fails once in fifty runs is a bug to be found.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent

#: maximum number of failed modules to retry; with more, the change is at fault
MOST_RETRIES = 8

#: exit codes of pytest
PASSED, FAILED, NO_TESTS = 0, 1, 5


@dataclass(frozen=True)
class Case:
    """A test that ran.

    Attributes:
        module: path of the collected file, relative to the root of the checkout.
        name: name of the function, with its class, if any, and its parameters.
        outcome: "passed", "failed" or "skipped".
        output: traceback and output of a failure.
    """

    module: str
    name: str
    outcome: str
    output: str = ""


@dataclass
class Result:
    """The outcome of a run.

    Attributes:
        code: exit code; 0 if every test passed, possibly in the second run.
        cases: the last outcome of each test.
        flaky: failures of the first run whose modules passed in the second.
    """

    code: int
    cases: dict[tuple[str, str], Case] = field(default_factory=dict)
    flaky: list[Case] = field(default_factory=list)

    def count(self, outcome: str, folder: str = "") -> int:
        """Return the number of tests with this outcome in the modules below ``folder``."""
        return sum(case.outcome == outcome and case.module.startswith(folder) for case in self.cases.values())


def run(
    options: Sequence[str],
    paths: Sequence[str] = (),
    *,
    python: str = sys.executable,
    environment: Mapping[str, str] | None = None,
) -> Result:
    """Run pytest on ``paths`` (default: all tests), then each failed module again by itself."""
    code, cases = _pytest([*options, *paths], python, environment)
    result = Result(code, cases)
    failed = [case for case in cases.values() if case.outcome == "failed"]
    modules = sorted({case.module for case in failed})
    if code != FAILED or not failed:
        return result
    if len(modules) > MOST_RETRIES:
        print(f"\n{len(modules)} modules failed, more than {MOST_RETRIES}: none is run again", flush=True)
        return result
    again = set()
    for module in modules:
        print(f"\n{module} failed and is run again by itself", flush=True)
        alone = ["-n", "0"] if "-n" in options else []
        code, cases = _pytest([*options, *alone, module], python, environment)
        result.cases.update(cases)
        if code != PASSED:
            again.add(module)
    result.flaky = [case for case in failed if case.module not in again]
    result.code = FAILED if again else PASSED
    return result


def report(result: Result) -> None:
    for case in result.flaky:
        print(f"\nFLAKY {case.module}::{case.name} failed in the first run:\n{case.output}")
    counts = [f"{result.count(outcome)} {outcome}" for outcome in ("passed", "failed", "skipped")]
    print(f"\n{', '.join(counts)}", flush=True)


def _pytest(
    arguments: Sequence[str], python: str, environment: Mapping[str, str] | None
) -> tuple[int, dict[tuple[str, str], Case]]:
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder) / "junit.xml"
        recorded = [f"--junitxml={record}"]
        code = subprocess.run(
            [python, "-m", "pytest", *arguments, *recorded], cwd=ROOT, env=environment, check=False
        ).returncode
        if not record.exists():
            return code or FAILED, {}
        cases = [_case(element) for element in ElementTree.parse(record).iter("testcase")]
    found: dict[tuple[str, str], Case] = {}
    for case in cases:  # a test whose teardown fails is listed twice
        before = found.get((case.module, case.name))
        if before is None or before.outcome != "failed":
            found[case.module, case.name] = case
    return code, found


def _case(element: ElementTree.Element) -> Case:
    failures = [child for child in element if child.tag in ("failure", "error")]
    outcome = "failed" if failures else "passed" if element.find("skipped") is None else "skipped"
    printed = [child.text or "" for child in element if child.tag in ("system-out", "system-err")]
    output = [child.text or child.get("message", "") for child in failures]
    module, classes = _collected(element.get("classname", ""), element.get("name", ""))
    name = "::".join([*classes, element.get("name", "")])
    return Case(module, name, outcome, "\n".join([*output, *printed] if failures else []))


def _collected(dotted: str, name: str) -> tuple[str, list[str]]:
    """Return a test's file and the classes that contain it, from the junit file's ``classname``.

    ``classname`` is the module's path and the classes, joined by dots; if pytest could not import the module,
    it is empty and ``name`` is the path. The junit attribute ``file`` is not used: for an inherited test it
    names the defining file, not the one to run again.
    """
    parts = (dotted or name).split(".")
    for length in range(len(parts), 0, -1):
        path = "/".join(parts[:length]) + ".py"
        if (ROOT / path).exists():
            return path, parts[length:]
    return "/".join(parts) + ".py", []


if __name__ == "__main__":
    started = time.monotonic()
    outcome = run(sys.argv[1:])
    report(outcome)
    print(f"in {time.monotonic() - started:.0f} s", flush=True)
    sys.exit(outcome.code)
