"""A pytest plugin of ``make gpu``: a line of JSON when a test begins, and one when it has ended.

So the outcomes are known of a run that hangs or is killed.  ``SHOAL_GPU_REPORT`` is the file.
"""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

_MOST_OUTPUT = 6000


def _write(**line: Any) -> None:
    with open(os.environ["SHOAL_GPU_REPORT"], "a") as file:
        file.write(json.dumps(line) + "\n")


def pytest_runtest_logstart(nodeid: str) -> None:
    _write(test=nodeid)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when != "call" and report.outcome == "passed":
        return
    said = "\n".join([report.longreprtext, *(f"{name}:\n{text}" for name, text in report.sections)])
    _write(
        test=report.nodeid,
        outcome=report.outcome,
        seconds=round(report.duration, 3),
        output=said[-_MOST_OUTPUT:] if report.outcome == "failed" else "",
    )
