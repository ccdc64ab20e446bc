"""Suspension of a whole job with its launcher, as by Ctrl-Z."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence

from ..ranks.rank import JobProcess
from .rank_launcher import RankLauncher
from .signals import stop_this_process


def suspend_job(number: int, ranks: Sequence[JobProcess], rank_launcher: RankLauncher) -> float:
    """Stop the ranks, and this process by signal ``number``, until it is continued; return the seconds."""
    began = time.monotonic()
    running = [rank for rank in ranks if rank.status is None]
    for rank in running:
        # Not SIGTSTP: it does not stop a process whose parent is in another session.
        rank.send_group(signal.SIGSTOP)
    rank_launcher.suspend()
    stop_this_process(number)
    rank_launcher.resume()
    for rank in running:
        rank.send_group(signal.SIGCONT)
    return time.monotonic() - began
