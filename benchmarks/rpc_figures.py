"""The calls that the benchmark times, independent of the library; this module imports none.

A library provides three functions that begin a call and return a function that waits for its result: a call
without arguments, one that returns a small tensor, and one that takes a large tensor.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Begin = Callable[[], Callable[[], Any]]

#: shape of the small tensor
SMALL = (20, 20)
LARGE = 64 * 2**20


@dataclass
class Work:
    """Amounts of work.

    Attributes:
        calls: calls one after another.
        pipelined: calls at once.
        window: maximum number of these that are pending at a time.
        large: calls with the large tensor.
        callers: number of threads for the last figure.
    """

    calls: int = 2000
    pipelined: int = 10000
    window: int = 500
    large: int = 5
    callers: int = 4


@dataclass
class Library:
    nothing: Begin | None = None
    echo: Begin | None = None
    large: Begin | None = None


def measure(library: Library, work: Work) -> dict[str, float]:
    figures: dict[str, float] = {}
    if library.nothing is not None:
        figures |= latency("no-op", library.nothing, work.calls)
    if library.echo is not None:
        figures |= latency("echo 20x20", library.echo, work.calls)
    if library.nothing is not None and work.pipelined:
        figures["1 caller [calls/s]"] = work.pipelined / pipelined(library.nothing, work.pipelined, work)
        figures[f"{work.callers} callers [calls/s]"] = work.pipelined / at_once(library.nothing, work)
    if library.large is not None:
        library.large()()  # maps its memory
        figures["64 MB [ms]"] = statistics.median(times(library.large, work.large)) * 1e3
    return figures


def latency(name: str, begin: Begin, calls: int) -> dict[str, float]:
    """Return latency percentiles of consecutive calls, in microseconds."""
    times(begin, calls // 10)
    taken = sorted(times(begin, calls))
    return {f"{name} [us, p{p}]": taken[min(calls - 1, calls * p // 100)] * 1e6 for p in (10, 50, 99)}


def times(begin: Begin, calls: int) -> list[float]:
    """Return the seconds of each of ``calls`` consecutive calls."""
    taken = []
    for _ in range(calls):
        before = time.perf_counter()
        begin()()
        taken.append(time.perf_counter() - before)
    return taken


def pipelined(begin: Begin, calls: int, work: Work) -> float:
    """Return the seconds of ``calls`` calls, with a window of pending calls."""
    before = time.perf_counter()
    window = min(work.window, calls)
    pending = [begin() for _ in range(window)]
    for index in range(calls - window):
        pending[index % window]()
        pending[index % window] = begin()
    for wait in pending:
        wait()
    return time.perf_counter() - before


def at_once(begin: Begin, work: Work) -> float:
    """The same from several threads, which share calls and window."""
    share = Work(window=max(1, work.window // work.callers))
    threads = [
        threading.Thread(target=pipelined, args=(begin, work.pipelined // work.callers, share))
        for _ in range(work.callers)
    ]
    before = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - before
