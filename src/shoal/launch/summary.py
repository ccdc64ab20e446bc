"""What the user reads after a job that did not end well."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from contextlib import suppress

import psutil

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


def failure(first: Rank, ranks: Sequence[Rank], tail: Sequence[bytes]) -> bytes:
    """The summary of a job in which ``first`` was the first rank to fail.

    Args:
        first: the rank; all of ``ranks`` have ended.
        tail: the last lines of its stderr.
    """
    assert first.status is not None
    ran = f"after {first.seconds:.1f} s (process {first.pid})"
    text = f"shoal: rank {first.index} failed first: {describe(first.status)}, {ran}\n".encode()
    others = [rank for rank in ranks if rank is not first]
    if others:
        text += f"shoal: other ranks: {_others(others)}\n".encode()
    if not tail:
        return text + b"shoal: it wrote nothing to stderr\n"
    return text + b"shoal: the end of its stderr:\n" + b"".join(b"  | " + line + b"\n" for line in tail)


def stopped(number: int, ranks: Sequence[Rank]) -> bytes:
    """What is said when a signal to the launcher ended the job."""
    return f"shoal: stopped by {signal_name(number)}: {_others(ranks)}\n".encode()


def leftovers(processes: Sequence[psutil.Process]) -> bytes:
    """What is said when ranks finished but left processes behind."""
    names = []
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            names.append(f"{process.name()} ({process.pid})")
    return f"shoal: killed what the ranks left running: {', '.join(names)}\n".encode()


def _others(ranks: Sequence[Rank]) -> str:
    outcomes: dict[str, list[int]] = {}
    for rank in ranks:
        assert rank.status is not None
        outcome = "finished" if rank.status == 0 else describe(rank.status)
        if rank.stopped:
            outcome = "ended by the launcher"
        outcomes.setdefault(outcome, []).append(rank.index)
    return "; ".join(f"{numbers(indices)} {outcome}" for outcome, indices in outcomes.items())


def numbers(indices: Sequence[int]) -> str:
    """``0, 2-5`` for [0, 2, 3, 4, 5]; the indices are in order."""
    runs: list[list[int]] = []
    for index in indices:
        if runs and runs[-1][-1] == index - 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
