"""The operations that the benchmark of the master-worker mode times, the same for every library.

A library gives functions that issue operations, and one that waits for all that was issued; this module
imports none of them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

Figures = dict[str, float]

#: elements of the small tensors, by row and column, and bytes of the large one
SMALL = (20, 20)
LARGE = 64 * 2**20
#: of the network: features of its input, width, and rows of a batch
FEATURES, WIDTH, ROWS = 20, 64, 32

ADD, ADD_CPU = "x + y [1/s]", "x + y [us of the caller's thread]"
ADD_TEAM, REPLAY = "x + y on 4 [1/s]", "replay [1/s]"
FETCH, STEP, LARGE_MS = "fetch", "MLP step [ms]", "64 MB [ms]"


@dataclass
class Work:
    """How much is timed.

    Attributes:
        operations: of 20 x 20, one after another, of which nothing is waited for until the end.
        fetches: of a number, one after another.
        steps: training steps of a small network.
        large: copies of 64 MB.
        soak: operations after which the master and its node must have grown by nothing; 0: none.
    """

    operations: int = 20_000
    fetches: int = 2000
    steps: int = 200
    large: int = 9
    soak: int = 1_000_000


@dataclass
class Library:
    """One library's operations; None where it has no such figure.

    Attributes:
        add: issue this many x + y.
        add_team: the same on a place of four nodes.
        replay: issue this many operations that were recorded.
        fetch: get a number whose tensor is there.
        step: issue a training step.
        large: bring 64 MB to where they are used, and wait for it.
        wait: for all that was issued.
    """

    wait: Callable[[], object]
    add: Callable[[int], object] | None = None
    add_team: Callable[[int], object] | None = None
    replay: Callable[[int], object] | None = None
    fetch: Callable[[], object] | None = None
    step: Callable[[], object] | None = None
    large: Callable[[], object] | None = None


def measure(library: Library, work: Work) -> Figures:
    """The figures of one library."""
    figures: Figures = {}
    for name, issue in ((ADD, library.add), (ADD_TEAM, library.add_team), (REPLAY, library.replay)):
        if issue is not None:
            issue(max(1, work.operations // 10))
            library.wait()
            begun, thread = time.perf_counter(), time.thread_time()
            issue(work.operations)
            used = time.thread_time() - thread
            library.wait()
            figures[name] = work.operations / (time.perf_counter() - begun)
            if name == ADD:
                figures[ADD_CPU] = used / work.operations * 1e6
    if library.fetch is not None:
        times(library.fetch, max(1, work.fetches // 10))
        taken = sorted(times(library.fetch, work.fetches))
        for p in (10, 50, 99):
            figures[f"{FETCH} [us, p{p}]"] = taken[min(len(taken) - 1, len(taken) * p // 100)] * 1e6
    if library.step is not None:
        for _ in range(max(2, work.steps // 10)):
            library.step()
        library.wait()
        begun = time.perf_counter()
        for _ in range(work.steps):
            library.step()
        library.wait()
        figures[STEP] = (time.perf_counter() - begun) / work.steps * 1e3
    if library.large is not None:
        library.large()  # its memory is mapped now
        figures[LARGE_MS] = statistics.median(times(library.large, work.large)) * 1e3
    return figures


def times(fn: Callable[[], object], count: int) -> list[float]:
    """The seconds of each of ``count`` calls."""
    taken = []
    for _ in range(count):
        begun = time.perf_counter()
        fn()
        taken.append(time.perf_counter() - begun)
    return taken
