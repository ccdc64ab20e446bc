"""Statistics of ``training.py``: overheads and ratios with confidence intervals."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

ALONE = "alone"
RESAMPLES = 10_000
CONFIDENCE = 0.95

#: what a contender does in addition to the one before it
PARTS = (
    ("autograd calls a hook with each gradient", ALONE, "hooks"),
    ("the gradients are copied into buckets", "hooks", "shoal-single"),
    ("the buckets are exchanged", "shoal-single", "shoal"),
)

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Estimate:
    """A value with its 95 % confidence interval."""

    value: float
    low: float
    high: float

    def __mul__(self, factor: float) -> Estimate:
        return Estimate(self.value * factor, self.low * factor, self.high * factor)


def bootstrap(rounds: int, statistic: Callable[[npt.NDArray[np.intp]], Array]) -> Estimate:
    """Percentile bootstrap (Efron 1979): the statistic of rounds resampled with replacement.

    Args:
        rounds: number of rounds.
        statistic: maps indices of rounds [repeats, rounds] to values [repeats].
    """
    drawn = np.random.default_rng(0).integers(rounds, size=(RESAMPLES, rounds))
    tail = 100 * (1 - CONFIDENCE) / 2
    low, high = np.percentile(statistic(drawn), [tail, 100 - tail])
    return Estimate(float(statistic(np.arange(rounds)[None])[0]), float(low), float(high))


def median(values: Array) -> Estimate:
    return bootstrap(len(values), lambda rounds: np.median(values[rounds], axis=1))


def ratio_of_medians(above: Array, below: Array) -> Estimate | None:
    """The ratio of the medians; None if the divisor may be zero or negative."""
    if median(below).low <= 0:
        return None
    return bootstrap(
        len(above), lambda rounds: np.median(above[rounds], axis=1) / np.median(below[rounds], axis=1)
    )


@dataclass
class Race:
    """The measurements of the contenders on one model and one number of ranks.

    Attributes:
        steps: number of steps in a turn.
        wall: by contender, seconds of a step in each round (the mean of a turn).
        cpu: the same in CPU time per rank (the mean of ranks).
        waited: by contender, seconds of a step in which a rank waits for another (the mean of ranks).
    """

    task: str
    ranks: int
    parameters: int
    steps: int
    wall: dict[str, Array]
    cpu: dict[str, Array]
    waited: dict[str, float] = field(default_factory=dict)

    @property
    def rounds(self) -> int:
        return len(self.wall[ALONE])

    def names(self) -> list[str]:
        return [name for name in self.wall if name != ALONE]

    def overhead(self, name: str) -> Estimate:
        """Seconds that a step takes longer than alone: the median difference of the rounds."""
        return median(self.wall[name] - self.wall[ALONE])

    def parts(self) -> list[tuple[str, Estimate]]:
        """The parts of shoal's overhead in seconds, each a difference of two contenders; [] without them."""
        if not all(before in self.wall and name in self.wall for _, before, name in PARTS):
            return []
        return [(title, median(self.wall[name] - self.wall[before])) for title, before, name in PARTS]

    def cpu_overhead(self, name: str) -> Estimate:
        return median(self.cpu[name] - self.cpu[ALONE])

    def times_alone(self, name: str) -> Estimate:
        """Duration of a step relative to alone: the median ratio of the rounds."""
        return median(self.wall[name] / self.wall[ALONE])

    def against(self, name: str, other: str) -> Estimate | None:
        """The overhead of one contender relative to another's; None if the latter may be zero."""
        if other not in self.wall:
            return None
        alone = self.wall[ALONE]
        return ratio_of_medians(self.wall[name] - alone, self.wall[other] - alone)

    def record(self) -> dict[str, Any]:
        """All samples, in seconds, for JSON."""
        return {
            "task": self.task,
            "ranks": self.ranks,
            "parameters": self.parameters,
            "steps": self.steps,
            "wall": {name: values.tolist() for name, values in self.wall.items()},
            "cpu": {name: values.tolist() for name, values in self.cpu.items()},
            "waited": self.waited,
        }


def race(task: str, answers: Sequence[Mapping[str, Any]]) -> Race:
    """Combine the ranks' measurements: a step lasts from the earliest start to the latest end."""
    wall, cpu, waited = {}, {}, {}
    for name in answers[0]["steps"]:
        notes = np.array(
            [answer["steps"][name] for answer in answers], dtype=np.int64
        )  # rank, round, step, 3
        began, ended, used = notes[..., 0].min(axis=0), notes[..., 1].max(axis=0), notes[..., 2].mean(axis=0)
        wall[name] = (ended - began).mean(axis=1) * 1e-9
        cpu[name] = used.mean(axis=1) * 1e-9
        waited[name] = float(np.mean([answer["waited"][name] for answer in answers]))
    first = answers[0]
    return Race(task, len(answers), first["parameters"], len(first["steps"][ALONE][0]), wall, cpu, waited)
