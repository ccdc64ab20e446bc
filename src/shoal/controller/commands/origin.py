"""The line of the user's program that issued an operation."""

from __future__ import annotations

import linecache
import sys
from pathlib import Path
from types import CodeType

import torch

#: code object and instruction offset: cheap to take; converted to a line on demand
Origin = tuple[CodeType, int]
#: origin of an interned call; of a recorded step, those of its operations
CallOrigin = Origin | list[Origin | None] | None

_CONTROLLER = Path(__file__).parents[1]
_INSIDE = tuple(
    f"{each}/" for each in (Path(torch.__file__).parent, _CONTROLLER, _CONTROLLER.parent / "common")
)


class _Files(dict[str, bool]):
    """Whether a file is inside, by name; hashing a code object would hash all its constants."""

    def __missing__(self, name: str) -> bool:
        inside = self[name] = name.startswith(_INSIDE) or name.startswith("<frozen")
        return inside


_inside = _Files()


def is_internal(code: CodeType) -> bool:
    """Return whether code belongs to torch, this package or ``shoal.common``."""
    return _inside[code.co_filename]


def current_origin() -> Origin | None:
    """Return the innermost position of this thread outside the code of :func:`is_internal`."""
    frame = sys._getframe(1)
    code = frame.f_code
    while _inside[code.co_filename]:
        outer = frame.f_back
        if outer is None:
            return None
        frame, code = outer, outer.f_code
    return code, frame.f_lasti


def first_origin(origin: CallOrigin) -> Origin | None:
    """Return the origin of a call, or of the first operation of a recorded step."""
    if isinstance(origin, list):
        return origin[0] if origin else None
    return origin


def format_origin(origin: CallOrigin) -> str:
    """Format the first origin as ``file.py:12, in train: loss.backward()``."""
    origin = first_origin(origin)
    if origin is None:
        return "torch's own thread"
    code, at = origin
    number = next((n for start, end, n in code.co_lines() if start <= at < end and n), code.co_firstlineno)
    text = linecache.getline(code.co_filename, number).strip()
    where = f"{code.co_filename}:{number}, in {code.co_name}"
    return f"{where}: {text}" if text else where
