"""The releases of torch that this version of shoal stands on.

The data-parallel wrapper and the backend of torch.distributed use parts of torch that are not public
(docs/design.md lists them), so a release is supported when the whole test suite has passed on it.  Another
one is refused at ``import shoal``, in words: what it changed would show up later, as something obscure.
"""

from __future__ import annotations

import re
import sys
from importlib.util import find_spec
from pathlib import Path

#: the first release that is supported, and the first that is not; pyproject.toml says the same to pip
SUPPORTED = ((2, 13), (2, 14))
REQUIREMENT = "torch>={}.{},<{}.{}".format(*SUPPORTED[0], *SUPPORTED[1])


def check() -> None:
    """Raise ImportError, in a sentence that says what to install, if torch is another release."""
    if message := problem():
        raise ImportError(message, name="torch")


def problem() -> str | None:
    """The reason why the installed torch cannot be used; None if it can, or there is none."""
    version = _installed()
    if version is None:
        return None
    number = re.match(r"(\d+)\.(\d+)", version)
    least, above = SUPPORTED
    if number and least <= (int(number[1]), int(number[2])) < above:
        return None
    return (
        f"shoal was tried with torch {least[0]}.{least[1]} only, and this is torch {version}: "
        f"pip install '{REQUIREMENT}'"
    )


def torch_is_importing() -> bool:
    """Whether ``import torch`` has begun and not ended; near its end it imports shoal (entry points)."""
    spec = getattr(sys.modules.get("torch"), "__spec__", None)
    return bool(getattr(spec, "_initializing", False))


def _installed() -> str | None:
    """The version of the torch that ``import torch`` gives, without importing it, which takes a second."""
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
