"""Finds the rank whose failure caused those of the others.

Ranks end in an order that says little: who fails first may end last.  What they report says more
(:mod:`shoal.failure_report`).  A rank that was *told* of another one failed because of it, if that one had a
reason before: its own report is earlier, or it died or left without a word.  Followed to its end, this leads
to a rank that failed by itself.  The earliest of these is the cause.

Ranks that report nothing (programs that do not use shoal) are judged by the order in which they ended.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

from ...failure_report import Report

#: when, and which rank
_Failure = tuple[float, int]


class KnownRank(Protocol):
    """One rank as the launcher knows it; its index is its place in the list of all.

    Attributes:
        status: None while it runs, then the exit code, or minus the number of the signal.
        stopped: the launcher ended it because another rank had failed.
        ended_at: when its end was seen, in seconds of CLOCK_MONOTONIC.
        reports: what it reported, the earliest first.
    """

    @property
    def index(self) -> int: ...
    @property
    def status(self) -> int | None: ...
    @property
    def stopped(self) -> bool: ...
    @property
    def ended_at(self) -> float: ...
    @property
    def reports(self) -> Sequence[Report]: ...


def cause(ranks: Sequence[KnownRank]) -> int | None:
    """The index of the rank that failed first, None if none did.

    It may still run: it has reported a failure, or others name it, and it has not ended yet.
    """
    found = [
        _origin_of(ranks, rank)
        for rank in ranks
        if _failed_by_itself(rank) or (rank.status != 0 and _reports_failure(rank))
    ]
    return min(found)[1] if found else None


def origin(ranks: Sequence[KnownRank], rank: KnownRank) -> int:
    """The index of the rank because of which ``rank``, which has failed, did; its own if by itself."""
    return _origin_of(ranks, rank)[1]


def exit_code(ranks: Sequence[KnownRank], first: int) -> int:
    """The exit code of a job in which the rank ``first`` failed first.

    It is that rank's; if the launcher had to end it, the one that Python was about to give it; and if it did
    not fail in the end, the one of the first rank that did.
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
    """A status as a shell would say it: 128 and the signal's number for a killed rank."""
    return status if status >= 0 else 128 - status


def _reports_failure(rank: KnownRank) -> bool:
    return any(report.kind == "failed" for report in rank.reports)


def _failed_by_itself(rank: KnownRank) -> bool:
    return rank.status not in (None, 0) and not rank.stopped


def _origin_of(ranks: Sequence[KnownRank], rank: KnownRank) -> _Failure:
    return _reported(ranks, rank, math.inf) or (rank.ended_at, rank.index)


def _reported(ranks: Sequence[KnownRank], rank: KnownRank, before: float) -> _Failure | None:
    """The failure that ``rank`` reported ``before``: its own, or the one that it was told of."""
    for report in rank.reports:
        if report.at >= before:
            break
        if report.kind == "failed":
            return report.at, rank.index
        for other in report.ranks:
            # Each step leads further back, so this ends.
            if other != rank.index and (found := _led_to(ranks, ranks[other], report.at)):
                return found
    return None


def _led_to(ranks: Sequence[KnownRank], named: KnownRank, at: float) -> _Failure | None:
    """The failure that a rank was told of, ``at`` that time, when it was told of ``named``."""
    if found := _reported(ranks, named, at):
        return found
    # Without a word it left, died, or is about to end.
    silent = not named.reports or any(report.kind == "left" and report.at < at for report in named.reports)
    if silent and (named.status is None or _failed_by_itself(named)) and _was_not_told(ranks, named):
        return min(at, named.ended_at), named.index
    return None


def _was_not_told(ranks: Sequence[KnownRank], rank: KnownRank) -> bool:
    """Whether no failure of others can be the reason of that of ``rank``."""
    for report in rank.reports:
        if report.kind == "failed":
            return True
        if any(_had_failed(ranks[other], report.at) for other in report.ranks):
            return False
    return True


def _had_failed(rank: KnownRank, at: float) -> bool:
    if not rank.reports:
        return _failed_by_itself(rank)
    return any(report.kind == "failed" and report.at < at for report in rank.reports)
