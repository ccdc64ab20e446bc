"""Fit the model's parameters to measured points, and check predictions.

Reads results of ``benchmarks/hosts.py``, and of ``benchmarks/scaling.py`` with ``SHOAL_TRANSPORT=tcp``. There
all ranks share one machine's cores, and sending is CPU work: everything that occupies a port takes ranks /
cores times as long. An exception are the bytes on links with a limited rate, which is then given, not fitted.
"""

from __future__ import annotations

import json
import statistics
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .algorithms import CHOICES, Algorithm, chosen, shoal
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
    """A measured all-reduce.

    Attributes:
        cores: of the machine with all ranks.
        algorithm: None: that of ``algorithm="auto"``.
        gap: seconds per byte of the links, if their rate is limited.
    """

    ranks: int
    nbytes: int
    seconds: float
    cores: int
    algorithm: Algorithm | None = None
    gap: float | None = None

    @property
    def coefficients(self) -> tuple[float, ...]:
        """The factors of the four parameters in the time of this all-reduce."""
        algorithm = self.algorithm or shoal(self.nbytes, self.ranks)
        crowd = max(1.0, self.ranks / self.cores)
        latency, overhead, gap, gamma = (algorithm.time(self.ranks, self.nbytes, unit) for unit in _UNITS)
        return latency, crowd * overhead, gap if self.gap is not None else crowd * gap, crowd * gamma

    def predicted(self, machine: Parameters) -> float:
        return float(np.dot(self.coefficients, astuple(machine)))


def read(path: Path) -> list[Point]:
    """Read the points of a record; raise ``ValueError`` if it is not one of all-reduces over TCP."""
    record = json.loads(path.read_text())
    if "megabits" in record:
        return _read_hosts(path, record)
    if record["transport"] != "tcp":
        raise ValueError(f"{path}: measured with transport {record['transport']!r}; set SHOAL_TRANSPORT=tcp")
    return [
        Point(int(ranks), nbytes, measured[f"{name}: time"], record["machine"]["cores"])
        for ranks, measured in record["results"].items()
        for name, nbytes in OPERATIONS.items()
    ]


def _read_hosts(path: Path, record: dict[str, Any]) -> list[Point]:
    if record["operation"] != "all_reduce":
        raise ValueError(f"{path}: measured {record['operation']}; the model has all_reduce only")
    gap = 8e-6 / record["megabits"] if record["megabits"] else None
    points = []
    for places, sizes in record["results"].items():
        hosts, ranks = map(int, places.split("x"))
        if ranks > 1 or hosts & (hosts - 1):
            raise ValueError(
                f"{path}: {hosts} hosts of {ranks}; the model has powers of two, of one rank each"
            )
        for size, contenders in sizes.items():
            for name in filter(contenders.get, CHOICES):
                seconds = statistics.median(contenders[name]["seconds"])
                algorithm = chosen(name, int(size), hosts)
                points.append(Point(hosts, int(size), seconds, record["cores"], algorithm, gap))
    return points


def fit(points: list[Point], gamma: float) -> Parameters:
    """Fit latency, overhead and, unless given, gap by least squares of the relative errors, none negative.

    Args:
        points: at least three, with different sizes and numbers of ranks.
        gamma: a given value, because points measured over a network do not determine it.
    """
    rows = np.array([point.coefficients for point in points])
    seconds = np.array([point.seconds for point in points])
    given_gap = points[0].gap or 0.0
    matrix = rows[:, :3] / seconds[:, None]
    target = 1 - (rows[:, 3] * gamma + rows[:, 2] * given_gap) / seconds
    kept = [0, 1] if given_gap else [0, 1, 2]
    while True:
        found, *_ = np.linalg.lstsq(matrix[:, kept], target, rcond=None)
        if (found >= 0).all() or len(kept) == 1:
            break
        kept.pop(int(np.argmin(found)))
    values = [0.0, 0.0, given_gap]
    for index, value in zip(kept, found, strict=True):
        values[index] = float(value)
    latency, overhead, gap = values
    return Parameters(latency, overhead, gap, gamma)
