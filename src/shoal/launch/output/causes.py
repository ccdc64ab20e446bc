"""Finds the rank that failed first, and caused the failures of the others.

The rank that fails first may end last, so the order of exits is not enough.  Ranks report failures to the
launcher (:mod:`shoal.failure_report`).  If a rank reports that it was notified of a failure (``told``) of
another rank, that rank is the cause, provided that its own report is earlier, or that it died or left without
a report.  Following causes leads to ranks that failed by themselves.  The earliest of them failed first.

Without reports (programs that do not use shoal) the order of exits counts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..ranks.rank import JobProcess

#: time, and index of the rank
_Failure = tuple[float, int]


def cause(ranks: Sequence[JobProcess]) -> int | None:
    """The index of the rank that failed first, None if none failed.

    It may still be running, if it has reported a failure or others name it.
    """
    found = [
        _origin_of(ranks, rank)
        for rank in ranks
        if _failed_by_itself(rank) or (rank.status != 0 and any(r.kind == "failed" for r in rank.reports))
    ]
    return min(found)[1] if found else None


def origin(ranks: Sequence[JobProcess], rank: JobProcess) -> int:
    """The index of the rank that caused the failure of ``rank``: its own if it failed by itself."""
    return _origin_of(ranks, rank)[1]


def exit_code(ranks: Sequence[JobProcess], first: int) -> int:
    """The exit code of a job in which the rank ``first`` failed first.

    It is that of this rank; if the launcher ended the rank, the code that Python was about to exit with; if
    the rank did not fail in the end, the code of the first rank that failed.
    """
    culprit = ranks[first]
    if _failed_by_itself(culprit):
        return shell_code(culprit.status or 0)
    codes = [report.code for report in culprit.reports if report.code is not None]
    if codes and culprit.stopped:
        return codes[0]
    failed = [rank for rank in ranks if _failed_by_itself(rank)]
    earliest = min(failed, key=lambda rank: rank.ended_at, default=culprit)
    return shell_code(earliest.status or 0)


def shell_code(status: int) -> int:
    """A status as a shell gives it: 128 plus the signal number for a killed rank."""
    return status if status >= 0 else 128 - status


def _failed_by_itself(rank: JobProcess) -> bool:
    return rank.status not in (None, 0) and not rank.stopped


def _origin_of(ranks: Sequence[JobProcess], rank: JobProcess) -> _Failure:
    return _reported(ranks, rank, math.inf) or (rank.ended_at, rank.index)


def _reported(ranks: Sequence[JobProcess], rank: JobProcess, before: float) -> _Failure | None:
    """The failure that ``rank`` reported before the time ``before``: its own, or that of another rank."""
    for report in rank.reports:
        if report.at >= before:
            break
        if report.kind == "failed":
            return report.at, rank.index
        for other in report.ranks:
            # Times decrease with each step, so the recursion ends.
            if other != rank.index and (found := _cause_of(ranks, ranks[other], report.at)):
                return found
    return None


def _cause_of(ranks: Sequence[JobProcess], named: JobProcess, at: float) -> _Failure | None:
    """The cause of the failure of ``named``, which another rank was notified of at the time ``at``."""
    if found := _reported(ranks, named, at):
        return found
    # Without a report it left, died, or is about to end.
    silent = not named.reports or any(report.kind == "left" and report.at < at for report in named.reports)
    if silent and (named.status is None or _failed_by_itself(named)) and _failed_independently(ranks, named):
        return min(at, named.ended_at), named.index
    return None


def _failed_independently(ranks: Sequence[JobProcess], rank: JobProcess) -> bool:
    """Whether no failure of another rank can be the cause of the failure of ``rank``."""
    for report in rank.reports:
        if report.kind == "failed":
            return True
        if any(_failed_before(ranks[other], report.at) for other in report.ranks):
            return False
    return True


def _failed_before(rank: JobProcess, at: float) -> bool:
    if not rank.reports:
        return _failed_by_itself(rank)
    return any(report.kind == "failed" and report.at < at for report in rank.reports)
