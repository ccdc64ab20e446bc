"""Detection of ranks that make the others wait, from the times in the records of commits.

Times in which operations waited cannot replace them: an operation may wait while its rank computes. A warning
of a straggler states how long this rank waited for it, from ``group.stats()``.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from statistics import median

from ..common.formatting import counted
from ..group.rebuild import Regroupable
from ..parallel import DistributedDataParallel
from ..statistics import LateRank
from .commit import CommitRecord

_WINDOW_STEPS = 20  # steps per comparison
_SLOWDOWN_FACTOR = 1.5
_MIN_EXCESS_S = 0.02  # seconds; smaller differences per step are not reported


class Stragglers:
    """Detector of ranks that compute for longer than the others; ``found``: those of the last 20 steps."""

    def __init__(self) -> None:
        self.found: tuple[int, ...] = ()
        self._rows: list[list[int]] = []
        self._late_before: dict[int, LateRank] = {}
        self._named: set[int] = set()
        self._began = 0.0

    def begin(self, regroupables: Iterable[Regroupable]) -> None:
        """Note that a step of this rank begins, which uses ``regroupables``."""
        self._began = _clock(regroupables)

    def elapsed_s(self, regroupables: Iterable[Regroupable]) -> float:
        """Return the seconds since the step began, less the time in which backward waited for other ranks."""
        return _clock(regroupables) - self._began

    def reset(self) -> None:
        """Discard all measurements: in a new group ranks may have other numbers."""
        self.found = ()
        self._rows.clear()
        self._late_before.clear()
        self._named.clear()

    def add(self, rows: Sequence[CommitRecord], rank: int, late: Callable[[], Iterable[LateRank]]) -> None:
        """Add the records of one commit; rank 0 warns of each straggler once.

        ``late`` returns the ranks for which this rank has waited since its group was made.
        """
        if len(rows) == 1:
            return
        self._rows.append([row.busy for row in rows])
        if len(self._rows) < _WINDOW_STEPS:
            return
        before, self._late_before = self._late_before, {each.rank: each for each in late()}
        # The median ignores single slow steps.
        usual = [median(each) / 1e6 for each in zip(*self._rows, strict=True)]
        self._rows.clear()
        slow = {each: others for each in range(len(usual)) if (others := _others(usual, each)) is not None}
        self.found = tuple(slow)
        new = [each for each in slow if each not in self._named]
        self._named.update(new)
        for each in new if rank == 0 else ():
            factor = usual[each] / max(slow[each], 1e-6)
            warnings.warn(
                f"rank {each} of {len(usual)} computes {factor:.1f} times as long as the others "
                f"({usual[each]:.3g} s a step, median of {_WINDOW_STEPS} steps), which wait for it"
                + _waited(before.get(each), self._late_before.get(each)),
                stacklevel=2,
            )


def _clock(regroupables: Iterable[Regroupable]) -> float:
    models = (each for each in regroupables if isinstance(each, DistributedDataParallel))
    return time.monotonic() - sum(model.waited() for model in models)


def _waited(before: LateRank | None, now: LateRank | None) -> str:
    if now is None or (before is not None and now.times == before.times):
        return ""
    times = now.times - (before.times if before else 0)
    seconds = now.seconds - (before.seconds if before else 0.0)
    where = f", in {counted(times, 'operation')}" if times else ""
    return f": rank 0 waited {seconds:.3g} s for it{where}"


def _others(usual: Sequence[float], rank: int) -> float | None:
    """Return the seconds that the other ranks take for a step, or None if ``rank`` is not slower."""
    others = median(each for index, each in enumerate(usual) if index != rank)
    return others if usual[rank] > max(_SLOWDOWN_FACTOR * others, others + _MIN_EXCESS_S) else None
