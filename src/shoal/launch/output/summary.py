"""The launcher's own messages, most of them about failures."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence

from ...common.formatting import counted, printable, ranks_named, signal_name
from ...errors import LaunchError
from ..ranks.rank import JobProcess, rank_names
from ..ranks.slots import MAX_RESTARTS, RESTART_WINDOW_S
from . import causes


def describe(status: int) -> str:
    """``exit code 7``, or ``killed by SIGSEGV``."""
    return f"exit code {status}" if status >= 0 else f"killed by {signal_name(-status)}"


def failure(ranks: Sequence[JobProcess], first: int, tail: Sequence[bytes]) -> bytes:
    """The summary of a job after the end of all ranks; ``first`` failed first, with ``tail`` on stderr."""
    culprit = ranks[first]
    name = culprit.name
    text = f"shoal: {culprit.described} failed first: {_outcome(culprit)}, {_ran(culprit)}\n".encode()
    others = [(rank, _relation(ranks, rank, first)) for rank in ranks if rank is not culprit]
    if others:
        text += f"shoal: {_grouped(others)}\n".encode()
    if not tail:
        return text + f"shoal: rank {name} wrote nothing to stderr\n".encode()
    text += f"shoal: the end of rank {name}'s stderr:\n".encode()
    return text + b"".join(b"  | " + line + b"\n" for line in tail)


def _ran(rank: JobProcess) -> str:
    return f"after {rank.seconds:.1f} s (process {rank.pid})"


def _outcome(culprit: JobProcess) -> str:
    assert culprit.status is not None
    if culprit.lost:
        return "its host was lost"
    if culprit.evicted:
        return f"the other ranks evicted it, and it ended: {describe(culprit.status)}"
    if not culprit.stopped:
        return describe(culprit.status)
    said = "".join(report.text for report in culprit.reports if report.kind == "failed")
    shown = printable(said)
    return (f"{shown}; " if shown else "") + "it did not end by itself and was ended by the launcher"


def _relation(ranks: Sequence[JobProcess], rank: JobProcess, first: int) -> str:
    """How a rank that did not fail first ended, and why if that is known."""
    assert rank.status is not None
    if rank.stopped:
        return "was ended by the launcher"
    if rank.lost:
        return "was lost with the host"
    if rank.status != 0 and causes.origin(ranks, rank) == first:
        return f"ended because rank {ranks[first].name} did ({describe(rank.status)})"
    if rank.status == 0 and any(rank.index in report.ranks for other in ranks for report in other.reports):
        return "ended with exit code 0 while others needed it"
    return _ended(rank.status)


def _end_of(rank: JobProcess) -> str:
    return "was lost with the host" if rank.lost else _ended(rank.status or 0)


def _ended(status: int) -> str:
    if status == 0:
        return "finished"
    return f"ended with exit code {status}" if status > 0 else f"was {describe(status)}"


def failed_but_going_on(rank: JobProcess, left: Sequence[JobProcess], then: str) -> bytes:
    """The message on a rank that failed while enough others go on; ``then``: the next action on its slot."""
    assert rank.status is not None
    on = "goes on" if len(left) == 1 else "go on"
    how = f"{'its host was lost' if rank.lost else describe(rank.status)}, {_ran(rank)}"
    if rank.evicted:
        how = f"evicted by the other ranks; {how}"
    return f"shoal: {rank.described} failed: {how}; {_named(left)} {on}{then}\n".encode()


def evicted(rank: JobProcess) -> bytes:
    return (
        f"shoal: {rank.described} (process {rank.pid}) is evicted: the other ranks go on without it, because "
        "it did not vote in time or they lost it. It prints the stacks of its threads, then gets SIGTERM, "
        "and SIGKILL if it does not exit\n"
    ).encode()


def ended_evicted(rank: JobProcess, then: str) -> bytes:
    """The message on an evicted process that ended with exit code 0; ``then``: the action on its slot."""
    return (
        f"shoal: {rank.described}, which was evicted, ended with exit code 0, {_ran(rank)}{then}\n".encode()
    )


def left(rank: JobProcess) -> bytes:
    """The message on a process that has left because of ``shoal scale``."""
    how = "" if rank.status in (0, -signal.SIGTERM) else f" ({describe(rank.status or 0)})"
    return f"shoal: {rank.described} has left{how}, {_ran(rank)}\n".encode()


def scaled(wanted: int, start: Sequence[int], stop: Sequence[int], later: int) -> str:
    """The message on a change of the number of ranks; processes are named by their slots."""
    parts = []
    if start:
        parts.append(f"{ranks_named(start)} {'starts' if len(start) == 1 else 'start'}")
    if stop:
        parts.append(f"{ranks_named(stop)} {'leaves' if len(stop) == 1 else 'leave'}")
    if later:
        parts.append(f"{later} more when others have left")
    return f"{counted(wanted, 'rank')} wanted: {', '.join(parts) or 'no change'}"


def spares(ranks: Sequence[JobProcess]) -> str:
    found = [rank for rank in ranks if rank.status is None and not rank.is_member and not rank.leaving]
    return f"; {_named(found)} can replace it" if found else ""


#: a phrase on a rank whose host is lost while no other host has a free slot
NO_PLACE = "; it is not replaced: no surviving host has a free slot"


def next_process(delay: float | None, *, spares: bool) -> str:
    """A phrase on the restart of a slot after ``delay`` seconds; None: there were too many restarts."""
    if delay is not None:
        does = "starts in its slot" if spares else "replaces it"
        return f"; a new process {does} in {delay:.0f} s"
    often = f"{MAX_RESTARTS} restarts in {RESTART_WINDOW_S / 60:.0f} minutes"
    return f"; it is not replaced after {often}"


def not_started(error: LaunchError, then: str) -> bytes:
    """The message on a process that could not be started to replace another one."""
    return f"shoal: {error}{then}\n".encode()


def succeeded_with_failures(ranks: Sequence[JobProcess], failed: Sequence[JobProcess], wanted: int) -> bytes:
    """The last line of a job of ``wanted`` ranks that succeeded although some ranks failed."""
    finished = [rank for rank in ranks if rank.status == 0 and rank.is_member and not rank.leaving]
    # The initial ranks that finished are only counted.
    shown = [*failed, *(rank for rank in finished if rank.newcomer)]
    ended = [(rank, _end_of(rank)) for rank in shown]
    return f"shoal: {len(finished)} of {counted(wanted, 'rank')} finished; {_grouped(ended)}\n".encode()


def stopped(number: int, ranks: Sequence[JobProcess]) -> bytes:
    ended = [(rank, _end_of(rank)) for rank in ranks]
    return f"shoal: stopped by {signal_name(number)}: {_grouped(ended)}\n".encode()


def waiting(seconds: float, left: Sequence[JobProcess]) -> bytes:
    """The message while ranks save their work after Ctrl-C."""
    return f"shoal: waiting {seconds:.0f} s for {_named(left)}; press Ctrl-C again to kill\n".encode()


def early_exits(ended: Sequence[JobProcess], running: Sequence[JobProcess]) -> bytes:
    """The message on ranks that exited with 0 without leaving a group, while others run."""
    still = "still runs" if len(running) == 1 else "still run"
    them = "it" if len(ended) == 1 else "them"
    text = f"shoal: {_named(ended)} ended with exit code 0 without leaving a group of shoal; "
    text += f"{_named(running)} {still}: a call that waits for {them}, such as torch's "
    text += "init_process_group, fails only at its timeout"
    return f"{text}\n".encode()


def leftovers(names: Sequence[str]) -> bytes:
    return f"shoal: killed processes that the ranks left running: {', '.join(names)}\n".encode()


def host_lost(host: str, why: str, ranks: Sequence[JobProcess]) -> bytes:
    gone = f", and with it {_named(ranks)}" if ranks else ""
    return f"shoal: host {host} is lost{gone}: {why}\n".encode()


def _grouped(outcomes: Sequence[tuple[JobProcess, str]]) -> str:
    """``ranks 0, 2-3 were killed by SIGINT; rank 1 finished``."""
    found: dict[str, list[JobProcess]] = {}
    for rank, outcome in outcomes:
        found.setdefault(outcome, []).append(rank)
    return "; ".join(
        f"{_named(those)} {outcome if len(those) == 1 else re.sub('^was ', 'were ', outcome)}"
        for outcome, those in found.items()
    )


def _named(ranks: Sequence[JobProcess]) -> str:
    """``rank 3.1``, or ``ranks 0, 2-5, 3.1-3.9``."""
    return ("rank " if len(ranks) == 1 else "ranks ") + rank_names(ranks)
