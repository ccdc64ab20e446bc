"""The figures of ``training.py``: overheads and ratios with the intervals that the samples allow."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

ALONE = "alone"
RESAMPLES = 10_000
CONFIDENCE = 0.95

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Estimate:
    """A value and the interval that holds the true one with 95 % confidence."""

    value: float
    low: float
    high: float

    def __mul__(self, factor: float) -> Estimate:
        return Estimate(self.value * factor, self.low * factor, self.high * factor)


def bootstrap(rounds: int, statistic: Callable[[npt.NDArray[np.intp]], Array]) -> Estimate:
    """The percentile bootstrap (Efron 1979): the statistic of rounds drawn anew, with replacement.

    Args:
        rounds: how many there are.
        statistic: maps indices of rounds [repeats, rounds] to values [repeats].
    """
    drawn = np.random.default_rng(0).integers(rounds, size=(RESAMPLES, rounds))
    tail = 100 * (1 - CONFIDENCE) / 2
    low, high = np.percentile(statistic(drawn), [tail, 100 - tail])
    return Estimate(float(statistic(np.arange(rounds)[None])[0]), float(low), float(high))


def median(values: Array) -> Estimate:
    """The median of one value a round."""
    return bootstrap(len(values), lambda rounds: np.median(values[rounds], axis=1))


def ratio_of_medians(above: Array, below: Array) -> Estimate | None:
    """The median of ``above`` by that of ``below``; None where the latter may be zero or negative."""
    if median(below).low <= 0:
        return None
    return bootstrap(
        len(above), lambda rounds: np.median(above[rounds], axis=1) / np.median(below[rounds], axis=1)
    )


@dataclass
class Race:
    """The contenders on one model and one number of ranks.

    Attributes:
        steps: that a turn has.
        wall: by contender, seconds of a step in each round (the mean of a turn).
        cpu: the same in processor time of a rank (the mean of ranks).
    """

    task: str
    ranks: int
    parameters: int
    steps: int
    wall: dict[str, Array]
    cpu: dict[str, Array]

    @property
    def rounds(self) -> int:
        return len(self.wall[ALONE])

    def names(self) -> list[str]:
        """The contenders other than alone."""
        return [name for name in self.wall if name != ALONE]

    def overhead(self, name: str) -> Estimate:
        """Seconds that a step takes longer than alone: the median of the rounds' differences."""
        return median(self.wall[name] - self.wall[ALONE])

    def cpu_overhead(self, name: str) -> Estimate:
        """The same in processor time of a rank."""
        return median(self.cpu[name] - self.cpu[ALONE])

    def times_alone(self, name: str) -> Estimate:
        """How many times as long a step takes as alone: the median of the rounds' ratios."""
        return median(self.wall[name] / self.wall[ALONE])

    def against(self, name: str, other: str) -> Estimate | None:
        """The overhead of one as a share of the overhead of another; None where that may be none at all."""
        if other not in self.wall:
            return None
        alone = self.wall[ALONE]
        return ratio_of_medians(self.wall[name] - alone, self.wall[other] - alone)

    def record(self) -> dict[str, Any]:
        """For JSON: every sample, in seconds."""
        return {
            "task": self.task,
            "ranks": self.ranks,
            "parameters": self.parameters,
            "steps": self.steps,
            "wall": {name: values.tolist() for name, values in self.wall.items()},
            "cpu": {name: values.tolist() for name, values in self.cpu.items()},
        }


def race(task: str, answers: Sequence[Mapping[str, Any]]) -> Race:
    """Join what the ranks noted: a step lasts from the earliest rank's start to the latest rank's end."""
    wall, cpu = {}, {}
    for name in answers[0]["steps"]:
        notes = np.array(
            [answer["steps"][name] for answer in answers], dtype=np.int64
        )  # rank, round, step, 3
        began, ended, used = notes[..., 0].min(axis=0), notes[..., 1].max(axis=0), notes[..., 2].mean(axis=0)
        wall[name] = (ended - began).mean(axis=1) * 1e-9
        cpu[name] = used.mean(axis=1) * 1e-9
    return Race(task, len(answers), answers[0]["parameters"], len(answers[0]["steps"][ALONE][0]), wall, cpu)
