"""How much the objects of shoal in this process hold, to see what grows."""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from typing import Any

_CONTAINERS = (dict, list, set, deque, tuple)


def holdings() -> Counter[str]:
    """Objects by their classes, and elements of the containers in their attributes and in shoal's modules."""
    gc.collect()
    found: Counter[str] = Counter()
    for each in gc.get_objects():
        kind = type(each)
        module: object = kind.__module__
        if isinstance(module, str) and module.startswith("shoal."):  # some classes have a descriptor there
            name = f"{module}.{kind.__qualname__}"
            found[name] += 1
            _count(found, name, _attributes(each))
    for name, module in list(sys.modules.items()):
        if name.startswith("shoal."):
            _count(found, name, vars(module).items())
    found["threads"] = threading.active_count()
    found["descriptors"] = len(os.listdir("/proc/self/fd"))
    return found


def grown(before: Mapping[str, int], after: Mapping[str, int], least: int) -> dict[str, int]:
    """Names whose counts have risen by ``least`` or more, and by how much."""
    rise = {name: count - before.get(name, 0) for name, count in after.items()}
    return {name: by for name, by in sorted(rise.items()) if by >= least}


def _count(found: Counter[str], name: str, attributes: Any) -> None:
    for attribute, value in attributes:
        if isinstance(value, _CONTAINERS):
            found[f"{name}.{attribute}"] += len(value)


def _attributes(each: object) -> Iterator[tuple[str, Any]]:
    yield from getattr(each, "__dict__", {}).items()
    for kind in type(each).__mro__:
        for slot in vars(kind).get("__slots__", ()):
            if slot != "__weakref__" and hasattr(each, slot):
                yield slot, getattr(each, slot)
