"""Imports of nodes before they serve: modules that register user-defined operators with torch."""

from __future__ import annotations

import importlib
from collections.abc import Iterable

from ...common.formatting import describe_error
from ...errors import UsageError


def checked(imports: object) -> tuple[str, ...]:
    """Return module names as a tuple; raises `UsageError` for other values."""
    if isinstance(imports, (list, tuple)) and all(isinstance(each, str) and each for each in imports):
        return tuple(imports)
    raise UsageError(f"imports={imports!r}: expected a list of module names, such as ['my_operators']")


def import_all(names: Iterable[str], where: str) -> None:
    """Import modules; raises `UsageError`, naming the process as `where`, if one cannot be imported."""
    for name in names:
        try:
            importlib.import_module(name)
        except Exception as error:
            raise UsageError(
                f"{where} cannot import {name!r}: {describe_error(error)}; it needs the module on its path, "
                "in PYTHONPATH or its working directory"
            ) from error
