"""The launcher's own lines, most of them about a job that did not end well."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from contextlib import suppress

import psutil

from ..wording import counted, ranks_named
from . import causes
from .process import Rank


def describe(status: int) -> str:
    """``exit code 7``, or ``killed by SIGSEGV``."""
    return f"exit code {status}" if status >= 0 else f"killed by {signal_name(-status)}"


def signal_name(number: int) -> str:
    """``SIGTERM`` for 15; real-time signals have no names of their own."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def failure(ranks: Sequence[Rank], first: int, tail: Sequence[bytes]) -> bytes:
    """The summary of a job in which a rank failed.

    Args:
        ranks: all of them; they have ended.
        first: the index of the one that failed first.
        tail: the last lines of its stderr.
    """
    culprit = ranks[first]
    ran = f"after {culprit.seconds:.1f} s (process {culprit.pid})"
    text = f"shoal: rank {first} failed first: {_outcome(culprit)}, {ran}\n".encode()
    others = [(rank, _relation(ranks, rank, first)) for rank in ranks if rank is not culprit]
    if others:
        text += f"shoal: {_grouped(others)}\n".encode()
    if not tail:
        return text + f"shoal: rank {first} wrote nothing to stderr\n".encode()
    text += f"shoal: the end of rank {first}'s stderr:\n".encode()
    return text + b"".join(b"  | " + line + b"\n" for line in tail)


def _outcome(culprit: Rank) -> str:
    assert culprit.status is not None
    if not culprit.stopped:
        return describe(culprit.status)
    said = "".join(report.text for report in culprit.reports if report.kind == "failed")
    shown = "".join(each if each.isprintable() else "?" for each in said)
    return (f"{shown}; " if shown else "") + "it did not end by itself and was ended by the launcher"


def _relation(ranks: Sequence[Rank], rank: Rank, first: int) -> str:
    """How a rank ended that did not fail first, and why if that is known."""
    assert rank.status is not None
    if rank.stopped:
        return "was ended by the launcher"
    if rank.status != 0 and causes.origin(ranks, rank) == first:
        return f"ended because rank {first} did ({describe(rank.status)})"
    if rank.status == 0 and any(rank.index in report.ranks for other in ranks for report in other.reports):
        return "ended with exit code 0 while others needed it"
    return _ended(rank.status)


def _ended(status: int) -> str:
    if status == 0:
        return "finished"
    return f"ended with exit code {status}" if status > 0 else f"was {describe(status)}"


def outlived(rank: Rank, left: Sequence[int]) -> bytes:
    """The line for a rank that failed while enough others go on."""
    assert rank.status is not None
    on = "goes on" if len(left) == 1 else "go on"
    how = f"{describe(rank.status)}, after {rank.seconds:.1f} s (process {rank.pid})"
    return f"shoal: rank {rank.index} failed: {how}; {ranks_named(left)} {on}\n".encode()


def outlived_all(ranks: Sequence[Rank], failed: Sequence[Rank]) -> bytes:
    """The last line of a job that ended well though ranks had failed."""
    ended = [(rank, _ended(rank.status or 0)) for rank in failed]
    finished = f"{len(ranks) - len(failed)} of {counted(len(ranks), 'rank')} finished"
    return f"shoal: {finished}; {_grouped(ended)}\n".encode()


def stopped(number: int, ranks: Sequence[Rank]) -> bytes:
    """The line for a job that a signal to the launcher ended."""
    ended = [(rank, _ended(rank.status or 0)) for rank in ranks]
    return f"shoal: stopped by {signal_name(number)}: {_grouped(ended)}\n".encode()


def waiting(seconds: float, left: Sequence[int]) -> bytes:
    """The line while ranks save their work after Ctrl-C."""
    return f"shoal: waiting {seconds:.0f} s for {ranks_named(left)}; press Ctrl-C again to kill\n".encode()


def unannounced(ended: Sequence[int], running: Sequence[int]) -> bytes:
    """The line for ranks that exited with 0 and left no group, while others run."""
    still = "still runs" if len(running) == 1 else "still run"
    them = "it" if len(ended) == 1 else "them"
    text = f"shoal: {ranks_named(ended)} ended with exit code 0 without leaving a group of shoal; "
    text += f"{ranks_named(running)} {still}: waiting for {them}, as torch's init_process_group does, "
    text += "lasts until its timeout"
    return f"{text}\n".encode()


def leftovers(processes: Sequence[psutil.Process]) -> bytes:
    """The line for processes that finished ranks left behind."""
    names = []
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            names.append(f"{process.name()} ({process.pid})")
    return f"shoal: killed what the ranks left running: {', '.join(names)}\n".encode()


def _grouped(outcomes: Sequence[tuple[Rank, str]]) -> str:
    """``ranks 0, 2-3 were killed by SIGINT; rank 1 finished``."""
    found: dict[str, list[int]] = {}
    for rank, outcome in outcomes:
        found.setdefault(outcome, []).append(rank.index)
    return "; ".join(
        f"{ranks_named(indices)} {outcome if len(indices) == 1 else re.sub('^was ', 'were ', outcome)}"
        for outcome, indices in found.items()
    )
