"""The record of a run and of its machine, and the statistics computed from it."""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from .case import Case, Size


@dataclass(frozen=True)
class Setting:
    """The heading of one table: an operation, a dtype and a number of ranks."""

    operation: str
    dtype: str
    ranks: int

    @property
    def stem(self) -> str:
        """Name of files and sections."""
        return f"{self.operation}-{self.dtype}-n{self.ranks}"

    def __str__(self) -> str:
        what = self.operation if self.operation == "barrier" else f"{self.operation}, {self.dtype}"
        return f"{what}, {self.ranks} ranks"


@dataclass
class Cell:
    """One variant's measurements in one case; samples are seconds per operation on the slowest rank."""

    samples: list[float] = field(default_factory=list)
    error: float = 0.0

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    @property
    def spread(self) -> float:
        """Half the interquartile range as a share of the median."""
        if len(self.samples) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.samples, n=4)
        return (high - low) / 2 / self.median


@dataclass
class BenchResult:
    """The result of a run.

    Attributes:
        rounds: number of samples per cell.
        cells: by setting, size and name of the variant.
        versions: by name of the contender.
        unavailable: missing measurements: (contender, ranks, case or "", reason).
        futex: seconds of a round trip between two processes through the kernel, one per round.
    """

    rounds: int
    cells: dict[Setting, dict[Size, dict[str, Cell]]] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    unavailable: list[tuple[str, int, str, str]] = field(default_factory=list)
    futex: list[float] = field(default_factory=list)

    def cell(self, case: Case, ranks: int, name: str) -> Cell:
        """Return the cell of a variant; create it if it is missing."""
        setting = Setting(case.operation, case.dtype, ranks)
        by_name = self.cells.setdefault(setting, {}).setdefault(case.size, {})
        return by_name.setdefault(name, Cell())

    def names(self, setting: Setting) -> list[str]:
        """The measured variants, in the order of the contenders."""
        return list(dict.fromkeys(name for by_name in self.cells[setting].values() for name in by_name))

    def sizes(self, setting: Setting) -> list[Size]:
        return sorted(self.cells[setting])

    def find(self, setting: Setting, size: Size, name: str) -> Cell | None:
        """The cell of a variant, or None if it was not measured."""
        cell = self.cells[setting].get(size, {}).get(name)
        return cell if cell and cell.samples else None

    def best(self, setting: Setting, size: Size, names: Sequence[str]) -> Cell | None:
        """The cell with the smallest median among ``names``."""
        cells = [cell for name in names if (cell := self.find(setting, size, name))]
        return min(cells, key=lambda cell: cell.median, default=None)

    def ratio(self, setting: Setting, size: Size, name: str, others: Sequence[str]) -> float | None:
        """The speedup of ``name`` over the fastest of ``others``: the median of the rounds' ratios.

        The samples of a round are about a second apart, so slow phases of the machine affect both.
        """
        own, other = self.find(setting, size, name), self.best(setting, size, others)
        if own is None or other is None:
            return None
        return statistics.median(b / a for a, b in zip(own.samples, other.samples, strict=False))

    def record(self) -> dict[str, Any]:
        """The record for JSON: all samples, the machine and all versions."""
        return {
            "date": datetime.date.today().isoformat(),
            "machine": machine(),
            "versions": self.versions,
            "rounds": self.rounds,
            "futex_round_trip": self.futex,
            "absent": [
                dict(zip(("contender", "ranks", "case", "reason"), entry, strict=True))
                for entry in self.unavailable
            ],
            "cells": [
                {
                    **asdict(setting),
                    "nbytes": size.nbytes,
                    "offset": size.offset,
                    "name": name,
                    **asdict(cell),
                }
                for setting, by_size in self.cells.items()
                for size, by_name in by_size.items()
                for name, cell in by_name.items()
                if cell.samples
            ],
        }

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(self.record(), indent=1) + "\n")


def machine() -> dict[str, str]:
    """Processor, cores, memory, system and Python, for readers."""
    info = Path("/proc/cpuinfo")
    match = re.search(r"model name\s*: (.*)", info.read_text()) if info.exists() else None
    return {
        "processor": match[1].strip() if match else platform.machine(),
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{psutil.virtual_memory().total / 2**30:.0f} GB",
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }


def description() -> str:
    here = machine()
    return f"{here['cores']} cores ({here['processor']}), {here['memory']}, {here['system']}"
