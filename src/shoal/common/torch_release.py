"""The releases of torch that shoal supports.

The data-parallel wrapper, the master-worker mode and the backend of torch.distributed use private parts of
torch (docs/torch-internals.md lists them), so a release is supported when the tests pass with it
(`make matrix`). ``import shoal`` refuses older releases, and warns once of newer ones.
"""

from __future__ import annotations

import re
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path

#: the first supported release, and the first untested one; pyproject.toml has the same bounds
SUPPORTED = ((2, 11), (2, 16))
REQUIREMENT = "torch>={}.{},<{}.{}".format(*SUPPORTED[0], *SUPPORTED[1])


def check() -> None:
    """Check the installed torch.

    Raises:
        ImportError: torch is older than the supported releases; the message says what to install.

    Warns:
        RuntimeWarning: torch is newer than the tested releases.
    """
    if message := problem():
        raise ImportError(message, name="torch")
    if message := untested():
        warnings.warn(message, RuntimeWarning, stacklevel=3)


def problem() -> str | None:
    """Return the error message if the installed torch is too old; None if not, or without torch."""
    version = installed()
    number = None if version is None else _number(version)
    if version is None or (number is not None and number >= SUPPORTED[0]):
        return None
    return f"shoal needs {REQUIREMENT}, but torch {version} is installed: pip install '{REQUIREMENT}'"


def untested() -> str | None:
    """Return a warning if the installed torch is newer than the tested releases, else None."""
    version = installed()
    number = None if version is None else _number(version)
    if number is None or number < SUPPORTED[1]:
        return None
    return (
        f"torch {version} is newer than the releases that shoal was tested with ({REQUIREMENT}); "
        f"if something fails, try: pip install '{REQUIREMENT}'"
    )


def is_doctor() -> bool:
    """Whether this process is ``shoal doctor`` or a child of it, which reports an old torch itself."""
    program, *arguments = getattr(sys, "argv", None) or [""]
    name = Path(program).name
    is_shoal = name == "shoal" or (name == "-m" and "shoal" in sys.orig_argv)
    return is_shoal and arguments[:1] == ["doctor"]


def _number(version: str) -> tuple[int, int] | None:
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else None


def torch_is_importing() -> bool:
    """Whether ``import torch`` is running; near its end it imports shoal (entry points)."""
    spec = getattr(sys.modules.get("torch"), "__spec__", None)
    return bool(getattr(spec, "_initializing", False))


def installed() -> str | None:
    """Return the version of torch without importing it, which would take a second."""
    loaded = getattr(sys.modules.get("torch"), "__version__", None)
    if loaded is not None:
        return str(loaded)
    spec = find_spec("torch") if "torch" not in sys.modules else None
    if spec is None or spec.origin is None:
        return None
    try:
        text = Path(spec.origin).with_name("version.py").read_text()
    except OSError:
        return None
    found = re.search(r"""^__version__\s*=\s*["']([^"']+)""", text, re.MULTILINE)
    return found[1] if found else None
