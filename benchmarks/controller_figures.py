"""The operations that the benchmark of the master-worker mode times, independent of the library.

A library provides functions that issue operations, and one that waits for them. This module imports none.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

Figures = dict[str, float]

#: shape of the small tensors
SMALL = (20, 20)
LARGE = 64 * 2**20
#: number of averaged tensors, and bytes of each
GRADIENTS, GRADIENT = 20, 2**20
#: number of nodes of a place
PLACE = 4
#: input features, width and batch size of the network
FEATURES, WIDTH, ROWS = 20, 64, 32

ADD, ADD_CPU = "x + y [1/s]", "x + y [us of the caller's thread]"
ADD_TEAM, REPLAY = "x + y on 4 [1/s]", "replay [1/s]"
FETCH, STEP, ADAM = "fetch", "MLP step [ms]", "MLP step, Adam [ms]"
LARGE_MS, BACK_MS, BETWEEN_MS = "64 MB [ms]", "64 MB back [ms]", "64 MB between nodes [ms]"
AVERAGE_MS = "average 20 x 1 MB [ms]"
DIGITS_MS = "digits step on 4 [ms]"
#: operations of a recorded step, and images per step of the digits
RECORDED, IMAGES = 500, 32


@dataclass
class Work:
    """Amounts of work.

    Attributes:
        operations: operations on 20 x 20 tensors, with one wait at the end.
        fetches: fetches of a number, one after another.
        steps: training steps of a small network.
        large: copies of 64 MB, and averages of 20 MB.
        soak: operations after which the memory of master and node may not have grown; 0 means none.
    """

    operations: int = 20_000
    fetches: int = 2000
    steps: int = 200
    large: int = 9
    soak: int = 1_000_000


@dataclass
class Library:
    """A library's operations; None if it lacks one.

    Attributes:
        wait: wait for everything issued.
        add: issue this many x + y.
        add_team: the same on a place of four nodes.
        replay: issue this many recorded steps of 500 operations each.
        fetch: fetch a number that was already computed.
        step: issue a training step.
        adam: the same with Adam, whose operations take lists of tensors.
        large: copy 64 MB to the device, and wait.
        back: copy 64 MB back.
        between: copy 64 MB from one node to another, and wait.
        average: average 20 tensors of 1 MB over four nodes, and wait.
        digits: issue this many training steps of the digits network on four nodes.
    """

    wait: Callable[[], object]
    add: Callable[[int], object] | None = None
    add_team: Callable[[int], object] | None = None
    replay: Callable[[int], object] | None = None
    fetch: Callable[[], object] | None = None
    step: Callable[[], object] | None = None
    adam: Callable[[], object] | None = None
    large: Callable[[], object] | None = None
    back: Callable[[], object] | None = None
    between: Callable[[], object] | None = None
    average: Callable[[], object] | None = None
    digits: Callable[[int], object] | None = None


# -- rows -----------------------------------------------------------------------------------------


def eager(library: Library, work: Work) -> Figures:
    """Operations with one wait at the end, and their cost in the issuing thread."""
    if library.add is None:
        return {}
    rate, used = rate_of(library.add, library, work)
    return {ADD: rate, ADD_CPU: used}


def eager_on_a_place(library: Library, work: Work) -> Figures:
    return {} if library.add_team is None else {ADD_TEAM: rate_of(library.add_team, library, work)[0]}


def replayed(library: Library, work: Work) -> Figures:
    """The same as recorded steps, after the calls that record."""
    if library.replay is None:
        return {}
    library.replay(5)
    library.wait()
    steps = max(1, work.operations // RECORDED)
    begun = time.perf_counter()
    library.replay(steps)
    library.wait()
    return {REPLAY: steps * RECORDED / (time.perf_counter() - begun)}


def fetched(library: Library, work: Work) -> Figures:
    """Fetches of numbers from an idle node, in microseconds."""
    if library.fetch is None:
        return {}
    times(library.fetch, max(1, work.fetches // 10))
    taken = sorted(times(library.fetch, work.fetches))
    return {
        f"{FETCH} [us, p{p}]": taken[min(len(taken) - 1, len(taken) * p // 100)] * 1e6 for p in (10, 50, 99)
    }


def stepped(library: Library, work: Work) -> Figures:
    figures: Figures = {}
    for name, step in ((STEP, library.step), (ADAM, library.adam)):
        if step is not None:
            times(step, max(2, work.steps // 10))
            library.wait()
            begun = time.perf_counter()
            times(step, work.steps)
            library.wait()
            figures[name] = (time.perf_counter() - begun) / work.steps * 1e3
    return figures


def moved(library: Library, work: Work) -> Figures:
    ways = {LARGE_MS: library.large, BACK_MS: library.back, BETWEEN_MS: library.between}
    return {name: each(way, work) for name, way in ways.items() if way is not None}


def averaged(library: Library, work: Work) -> Figures:
    return {} if library.average is None else {AVERAGE_MS: each(library.average, work)}


def trained(library: Library, work: Work) -> Figures:
    if library.digits is None:
        return {}
    library.digits(max(10, work.steps // 10))
    library.wait()
    begun = time.perf_counter()
    library.digits(work.steps)
    library.wait()
    return {DIGITS_MS: (time.perf_counter() - begun) / work.steps * 1e3}


ROWS_OF_FIGURES = (eager, eager_on_a_place, replayed, fetched, stepped, moved, averaged, trained)


def measure(library: Library, work: Work) -> Figures:
    figures: Figures = {}
    for row in ROWS_OF_FIGURES:
        gc.collect()  # avoids a slow collection, of all of torch, in a short row
        figures |= row(library, work)
    return figures


def rate_of(issue: Callable[[int], object], library: Library, work: Work) -> tuple[float, float]:
    """Return operations per second, and microseconds of the issuing thread per operation."""
    issue(max(1, work.operations // 10))
    library.wait()
    begun, thread = time.perf_counter(), time.thread_time()
    issue(work.operations)
    used = time.thread_time() - thread
    library.wait()
    return work.operations / (time.perf_counter() - begun), used / work.operations * 1e6


def each(fn: Callable[[], object], work: Work) -> float:
    """Return the median milliseconds of a call."""
    fn()  # maps its memory
    return statistics.median(times(fn, work.large)) * 1e3


def times(fn: Callable[[], object], count: int) -> list[float]:
    """Return the seconds of each of ``count`` calls."""
    taken = []
    for _ in range(count):
        begun = time.perf_counter()
        fn()
        taken.append(time.perf_counter() - begun)
    return taken
