"""Conclusions from the rows of ``shoal top``: the ranks for which others wait, and what to do about them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import msgspec

from ..common.formatting import ranks_named
from ..rank_sampler import HELD_UP, RankRow


class Culprit(msgspec.Struct):
    """A rank for which others wait, directly or because they wait for ranks that wait for it.

    Attributes:
        rank: its number.
        row: what it does; None: it has no page, because its process has ended or belongs to another user.
        waiting: the rows of those that wait, the one that waits for the longest time first.
        circle: the ranks that wait for one another, in this order from ``rank`` on; empty if they do not.
    """

    rank: int
    row: RankRow | None
    waiting: list[RankRow]
    circle: list[int] = []

    def __str__(self) -> str:
        since = max(row.age_s or 0.0 for row in self.waiting)
        if self.circle:
            order = " -> ".join(map(str, [*self.circle, self.rank]))
            calls = ", ".join(
                f"rank {row.rank} in {row.call}" for row in self.waiting if row.rank in self.circle
            )
            who = ranks_named(sorted(self.circle))
            return f"{who} wait for one another, for up to {since:.1f} s: {order} ({calls})"
        who = ranks_named(sorted(row.rank for row in self.waiting))
        verb = "waits" if len(self.waiting) == 1 else "wait"
        fact = f"{who} {verb} for rank {self.rank}, for up to {since:.1f} s; it {self._filled(0)}"
        if self.row is None:
            return fact
        return f"{fact}, on another host" if self.row.remote else f"{fact} (process {self.row.pid})"

    @property
    def advice(self) -> str:
        """A remedy, as one sentence."""
        return _IN_CIRCLES if self.circle else self._filled(1)

    def _filled(self, part: int) -> str:
        row = self.row
        template = _DOING["" if row is None else row.state][part]
        return template.format(call="" if row is None else row.call, pid=0 if row is None else row.pid)


def by_job(rows: Sequence[RankRow]) -> list[tuple[str, list[RankRow]]]:
    """Divide ordered rows into jobs: the name and the rows of each."""
    jobs = groupby(rows, key=lambda row: (row.job, row.leader, row.size))
    return [(job, list(of_job)) for (job, *_), of_job in jobs]


def culprits(rows: Sequence[RankRow], least_s: float = 0.0) -> list[Culprit]:
    """Find the ranks for which others of one job wait for at least this many seconds, most waiting first.

    Ranks on other hosts count from 1 s on: the operation of a shorter wait has probably ended since the
    report.
    """
    by_rank = {row.rank: row for row in rows}
    # A stopped rank itself keeps the others from going on, not the rank that it waited for.
    waits_for = {
        row.rank: row.waits_for
        for row in rows
        if row.state not in HELD_UP and (row.age_s or 0.0) >= (_REPORTED_EVERY_S if row.remote else 0.0)
    }
    found: dict[int, Culprit] = {}
    for row in rows:
        rank = waits_for.get(row.rank)
        if rank is None or (row.age_s or 0.0) < least_s:
            continue
        seen = [row.rank]
        while rank not in seen and (further := waits_for.get(rank)) is not None:
            seen.append(rank)
            rank = further
        circle = seen[seen.index(rank) :] if rank in seen else []
        if circle:
            rank = min(circle)
            circle = circle[circle.index(rank) :] + circle[: circle.index(rank)]
        found.setdefault(rank, Culprit(rank, by_rank.get(rank), [], circle)).waiting.append(row)
    for each in found.values():
        each.waiting.sort(key=lambda row: -(row.age_s or 0.0))
    return sorted(found.values(), key=lambda each: (-len(each.waiting), each.rank))


#: seconds between two reports of a rank on another host, which are its heartbeats
_REPORTED_EVERY_S = 1.0
#: advice about ranks that wait for one another
_IN_CIRCLES = (
    "let all ranks call the same operations in the same order, and one of two ranks that exchange messages "
    "send first; shoal dumps shows what they called"
)
#: state of a rank for which others wait -> what it does, and what to do about it
_DOING = {
    "stopped": ("is stopped by a signal", "continue it: kill -CONT {pid}"),
    "traced": ("is in a debugger", "continue it there"),
    "silent": (
        "has not run for more than 5 s",
        "look whether its machine is overloaded (top, dmesg), or is stopped as a whole",
    ),
    "left": ("has left or is lost", "read its last messages"),
    "computes": ("computes, outside of shoal", "show where: py-spy dump --pid {pid}"),
    "runs": ("runs outside of shoal", "show what it does there: shoal top on its host"),
    "sleeps": (
        "neither computes nor communicates, as in a wait for input, a file or a lock",
        "show where: py-spy dump --pid {pid}",
    ),
    "moves": (
        "moves the data of {call}",
        "let it; if this takes long, check the network: shoal doctor --hosts",
    ),
    "waits": (
        "waits in {call}, but not for a rank that this one sees",
        "run this on its host; shoal dumps shows what all ranks called",
    ),
    "": (
        "is on no host that this one sees, or has ended",
        "run this on its host; if it has ended, read its last messages",
    ),
}
