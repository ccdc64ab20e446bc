"""The offsets between the clocks of hosts, estimated from the collectives in which they take part.

Processes of one host read the same CLOCK_MONOTONIC.  No rank can leave an all-reduce before the last one has
begun it.  So for ranks a and b of hosts A and B, the begin on b is earlier than the end on a, and vice versa:
each collective bounds the offset of B's clock from both sides.  The tightest bounds of all collectives leave
an interval, whose middle is the estimate.  Where a rank waited for a member, that member had begun when the
wait ended.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

#: collectives whose end on any rank is later than the begin on every rank
SYNCHRONIZING = frozenset({"all_reduce", "all_gather", "reduce_scatter", "barrier"})


@dataclass(frozen=True, slots=True)
class ClockOffset:
    """How far a clock is ahead of the reference.

    Attributes:
        offset: in nanoseconds; subtracting it from a time gives a time of the reference.
        error: maximum error in nanoseconds; None: unknown.
        source: how it was determined.
    """

    offset: int
    error: int | None
    source: str


class ClockBounds:
    """Collects bounds; clocks are identified by any names."""

    def __init__(self) -> None:
        #: how far the first clock is ahead of the second one at least
        self._ahead: dict[tuple[str, str], int] = {}

    def add(self, earlier: str, begun: int, later: str, ended: int) -> None:
        """Note that an event, at ``begun`` of clock ``earlier``, was before one at ``ended`` of ``later``."""
        if earlier != later:
            ahead = begun - ended
            self._ahead[earlier, later] = max(ahead, self._ahead.get((earlier, later), ahead))

    def offsets(self, reference: str, realtime: Mapping[str, int]) -> dict[str, ClockOffset]:
        """Return the offset of each clock.

        Args:
            reference: the clock that has the offset 0.
            realtime: for every clock its time minus that of CLOCK_REALTIME of its host, which is used for
                clocks that no collective connects.
        """
        found = {reference: ClockOffset(0, 0, "reference")}
        heap = [(0, reference)]
        while heap:  # the smallest sum of errors first
            error, clock = heapq.heappop(heap)
            if error != found[clock].error:
                continue
            for other, middle, own_error in self._estimates(clock):
                total = error + own_error
                known = found.get(other)
                if known is None or (known.error is not None and total < known.error):
                    found[other] = ClockOffset(found[clock].offset + middle, total, "collectives")
                    heapq.heappush(heap, (total, other))
        for clock, ahead in realtime.items():
            if clock not in found:
                found[clock] = ClockOffset(ahead - realtime[reference], None, "the real time of the hosts")
        return found

    def _estimates(self, clock: str) -> Iterable[tuple[str, int, int]]:
        """For each clock with bounds from both sides: how far it is ahead of ``clock``, and the error."""
        for (other, base), low in self._ahead.items():
            if base == clock and (base, other) in self._ahead:
                high = -self._ahead[base, other]
                # If the clocks run at different speeds, the bounds can contradict each other.
                yield other, (low + high) // 2, (abs(high - low) + 1) // 2
