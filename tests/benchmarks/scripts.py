"""What tests of the scripts in ``benchmarks/`` share."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def benchmark_script(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script ``benchmarks/name.py``, as a module."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module(name)
