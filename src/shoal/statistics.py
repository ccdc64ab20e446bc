"""Counters of the operations of a group on one rank: numbers, bytes, latencies, and waits for others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ._core import LATENCIES, Statistics, latency_quantile

#: buckets at which one of :func:`histogram_of` ends: 1.024 us, and four times as much each, to 17 s
_ENDS = range(9, 106, 8)


@dataclass(frozen=True, slots=True)
class LateRank:
    """A member that this rank waited for.

    Attributes:
        rank: numbered in the group.
        times: number of completed operations in which it was the last to arrive, of those for which this
            rank waited.
        seconds: time for which this rank waited for it.
    """

    rank: int
    times: int
    seconds: float


@dataclass(frozen=True, slots=True)
class GroupStatistics:
    """Counters of the operations of this rank since the group was made, returned by ``group.stats()``.

    An operation waits from when it begins until all members that it needs have called it too.  Moving data
    afterwards does not count.

    Attributes:
        completed, failed, pending: numbers of operations.
        bytes: of completed operations: for each the longer of its input and output.
        waits: number of waits for members that had not arrived yet.
        waited_s: sum of these waits, in seconds.  Operations of several lanes can wait at the same time.
        late: the members for which this rank waited, the one with the longest time first.
        latencies: numbers of completed operations by latency; bucket k has those from ``LATENCIES[k]`` to
            ``LATENCIES[k + 1]`` nanoseconds.  See :meth:`latency`.
    """

    completed: int
    failed: int
    pending: int
    bytes: int
    waits: int
    waited_s: float
    late: tuple[LateRank, ...]
    latencies: tuple[int, ...]

    def latency(self, quantile: float = 0.5) -> float | None:
        """The time from submission to completion that this share of operations did not exceed, in seconds.

        The middle of a bucket, and so correct to 13 %.  None if no operation has completed.

        Args:
            quantile: from 0 to 1, for example 0.99.
        """
        return latency_of(self.latencies, quantile)


def group_statistics(counters: Statistics, pending: int) -> GroupStatistics:
    """Make the public record from the counters of the core."""
    late = tuple(LateRank(each.rank, each.times, each.waited / 1e9) for each in counters.late)
    return GroupStatistics(
        counters.completed,
        counters.failed,
        pending,
        counters.bytes,
        counters.waits,
        counters.waited / 1e9,
        late,
        tuple(counters.latencies),
    )


def latency_of(counts: Sequence[int], quantile: float) -> float | None:
    """Return a quantile in seconds from the numbers of operations in each bucket; None if there are none."""
    if not 0.0 <= quantile <= 1.0:
        raise ValueError(f"quantile must be from 0 to 1, got {quantile}")
    nanoseconds = latency_quantile(counts, quantile)
    return nanoseconds / 1e9 if nanoseconds >= 0 else None


def histogram_of(counts: Sequence[int]) -> list[tuple[float, int]]:
    """Return 13 latencies in seconds, and the number of operations that took less than each."""
    return [(LATENCIES[end] / 1e9, sum(counts[:end])) for end in _ENDS]
