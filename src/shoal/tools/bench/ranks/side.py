"""The small benchmarks on one rank."""

from __future__ import annotations

import time
from typing import Any

import psutil

from .engine import Engine


def together(engine: Engine, count: int, nbytes: int, repeat: int) -> dict[str, float]:
    """Seconds for ``count`` all-reduces, all submitted before the first wait, and one after another."""
    tensors = [engine.empty("ordinary", "fp32", nbytes // 4) for _ in range(count)]
    for _, values in tensors:
        values.fill(1.0)
    seconds = {"together": 0.0, "one by one": 0.0}
    for turn in range(repeat + 1):  # the first is the warm-up
        engine.barrier()
        start = time.perf_counter()
        for pending in [engine.start(x) for x, _ in tensors]:
            pending.wait()
        middle = time.perf_counter()
        engine.barrier()
        again = time.perf_counter()
        for x, _ in tensors:
            engine.start(x).wait()
        end = time.perf_counter()
        if turn:
            seconds["together"] += (middle - start) / repeat
            seconds["one by one"] += (end - again) / repeat
        for _, values in tensors:
            values.fill(1.0)
    return seconds


def split(engine: Engine) -> dict[str, float]:
    """Seconds to create a group of all ranks."""
    engine.barrier()
    start = time.perf_counter()
    close = engine.new_group()
    seconds = time.perf_counter() - start
    engine.barrier()
    close()
    return {"seconds": seconds}


def late(engine: Engine, seconds: float) -> dict[str, float]:
    """Share of a core that a rank uses while it waits in an all-reduce for the last rank."""
    x, values = engine.empty("ordinary", "fp32", 1024)
    values.fill(1.0)
    call = engine.operation("all_reduce", x, None, "ordinary")
    call()
    engine.barrier()
    used, start = time.process_time(), time.perf_counter()
    if engine.rank == engine.size - 1:
        time.sleep(seconds)
    call()
    return {"share": (time.process_time() - used) / (time.perf_counter() - start)}


def memory(engine: Any, idle: float) -> dict[str, float]:
    """Growth of this rank's unique set size in bytes since it had only imported torch."""
    engine.barrier()
    time.sleep(idle)
    return {"bytes": psutil.Process().memory_full_info().uss - engine.uss_before}
