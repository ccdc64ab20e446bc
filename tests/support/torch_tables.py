"""Torch's own tables of samples, which import more of its tests than they need."""

from __future__ import annotations

import sys
import types
import unittest


def stand_in() -> None:
    """Let torch's tests find ``expecttest``, of which they need here that there is a class."""
    try:
        import expecttest  # type: ignore[import-not-found, unused-ignore]  # noqa: F401
    except ImportError:
        module = types.ModuleType("expecttest")
        module.TestCase = unittest.TestCase  # type: ignore[attr-defined]
        sys.modules["expecttest"] = module
