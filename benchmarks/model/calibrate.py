"""Fit the model's parameters to measured points, and check predictions.

Reads results of ``benchmarks/scaling.py`` with ``SHOAL_TRANSPORT=tcp``. There all ranks share one machine's
cores, and sending is CPU work: everything that occupies a port takes ranks / cores times as long.
"""

from __future__ import annotations

import json
from dataclasses import astuple, dataclass
from pathlib import Path

import numpy as np

from .algorithms import shoal
from .parameters import Parameters

#: names of measured operations -> bytes
OPERATIONS = {"all_reduce 8 B": 8, "all_reduce 64 KB": 64 * 2**10, "all_reduce 1 MB, ordinary": 2**20}
_UNITS = (
    Parameters(1, 0, 0, 0),
    Parameters(0, 1, 0, 0),
    Parameters(0, 0, 1, 0),
    Parameters(0, 0, 0, 1),
)


@dataclass(frozen=True)
class Point:
    ranks: int
    nbytes: int
    seconds: float
    cores: int

    @property
    def coefficients(self) -> tuple[float, ...]:
        """The factors of the four parameters in the time of this all-reduce."""
        algorithm = shoal(self.nbytes, self.ranks)
        crowd = max(1.0, self.ranks / self.cores)
        latency, *occupied = (algorithm.time(self.ranks, self.nbytes, unit) for unit in _UNITS)
        return latency, *(crowd * each for each in occupied)

    def predicted(self, machine: Parameters) -> float:
        return float(np.dot(self.coefficients, astuple(machine)))


def read(path: Path) -> list[Point]:
    """Read the points of a record; raise ``ValueError`` if it was not measured over TCP."""
    record = json.loads(path.read_text())
    if record["transport"] != "tcp":
        raise ValueError(f"{path}: measured with transport {record['transport']!r}; set SHOAL_TRANSPORT=tcp")
    return [
        Point(int(ranks), nbytes, measured[f"{name}: time"], record["machine"]["cores"])
        for ranks, measured in record["results"].items()
        for name, nbytes in OPERATIONS.items()
    ]


def fit(points: list[Point], gamma: float) -> Parameters:
    """Fit latency, overhead and gap by least squares of the relative errors, with none negative.

    Args:
        points: at least three, with different sizes and numbers of ranks.
        gamma: a given value, because points measured over a network do not determine it.
    """
    rows = np.array([point.coefficients for point in points])
    seconds = np.array([point.seconds for point in points])
    matrix = rows[:, :3] / seconds[:, None]
    target = 1 - rows[:, 3] * gamma / seconds
    kept = [0, 1, 2]
    while True:
        found, *_ = np.linalg.lstsq(matrix[:, kept], target, rcond=None)
        if (found >= 0).all() or len(kept) == 1:
            break
        kept.pop(int(np.argmin(found)))
    values = [0.0, 0.0, 0.0]
    for index, value in zip(kept, found, strict=True):
        values[index] = float(value)
    latency, overhead, gap = values
    return Parameters(latency, overhead, gap, gamma)
