"""The cores of each rank, for ``shoal run --bind``."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

_TOPOLOGY = "/sys/devices/system/cpu/cpu{}/topology/{}"


def usable() -> list[int]:
    """The cores that this process may use, ordered by socket and physical core."""
    return sorted(os.sched_getaffinity(0), key=lambda core: (*_place(core), core))


def shares(cores: Sequence[int], size: int) -> list[list[int]]:
    """Divide ``cores`` by ``size`` ranks, into parts with sizes that differ by at most one.

    If there are fewer cores than ranks, each rank gets one core, shared with other ranks.
    """
    count = len(cores)
    if count < size:
        return [[cores[rank % count]] for rank in range(size)]
    return [list(cores[rank * count // size : (rank + 1) * count // size]) for rank in range(size)]


def _place(core: int) -> tuple[int, int]:
    """Socket and physical core; (0, ``core``) if the kernel does not report them."""
    with suppress(OSError, ValueError):
        package = int(Path(_TOPOLOGY.format(core, "physical_package_id")).read_text())
        return package, int(Path(_TOPOLOGY.format(core, "core_id")).read_text())
    return 0, core
