"""The measurements on one rank: a case, and the small benchmarks with one figure each."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from ..case import Case
from .data import block as block_of
from .data import check, encode, fill
from .engine import STORAGE, ContenderRank, Values

if TYPE_CHECKING:
    from .floor import HardwareLimit
    from .gloo import Gloo
    from .shoal import Shoal


class TimedCase:
    """Buffers and call of one variant of a case; the result of a first call is checked.

    Attributes:
        error: largest relative error of the result.

    Raises:
        Unsupported: the engine does not support the case.
        WrongResult: the result is wrong.
    """

    def __init__(self, engine: ContenderRank, case: Case, variant: str) -> None:
        self._engine, self._case = engine, case
        inputs, outputs = case.elements(engine.size)
        x, self._x = self._buffer(variant, inputs)
        out, self._out = self._buffer(variant, outputs) if outputs else (None, self._x)
        self._call = engine.operation(case.operation, x, out, variant)
        self._refill = _constant(case, engine.rank)
        fill(self._x, case.dtype, engine.rank)
        if outputs:
            self._out[:] = 0
        engine.barrier()
        self._call()
        self.error = 0.0
        if engine.checked(variant):
            self.error = check(case, engine.rank, engine.size, self._x, self._out)

    def _buffer(self, variant: str, count: int) -> tuple[Any, Values]:
        offset, dtype = self._case.size.offset, self._case.dtype
        if not count:
            return None, self._engine.empty("ordinary", dtype, 1)[1][:0]
        x, values = self._engine.empty(variant, dtype, count + offset)
        return x[offset:], values[offset:]

    def sample(self, repeat: int) -> tuple[float, float]:
        """Measure ``repeat`` calls, after a tenth as many to warm up.

        Before each call the rank rewrites its input, as a program would. Neither this nor the barrier after
        it (see ``Case.paced``) is included in the time.

        Returns:
            Average seconds of a call, and average seconds from one call to the next.
        """
        barrier = self._engine.barrier
        call, values, refill, paced = self._call, self._x, self._refill, self._case.paced
        clock = time.perf_counter_ns
        for _ in range(repeat // 10 + 1):
            values.fill(refill)
            call()
        barrier()
        total = 0
        began = clock()
        for _ in range(repeat):
            values.fill(refill)
            if paced:
                barrier()
            start = clock()
            call()
            total += clock() - start
        every = (clock() - began) / repeat * 1e-9
        # A ping-pong consists of two messages.
        messages = 2 if self._case.operation == "send_recv" else 1
        return total / repeat / messages * 1e-9, every


def _constant(case: Case, rank: int) -> Any:
    return STORAGE[case.dtype](encode(block_of(case.dtype, rank)[:1], case.dtype)[0])


def together(engine: ContenderRank, count: int, nbytes: int, repeat: int) -> dict[str, float]:
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


def split(engine: ContenderRank) -> dict[str, float]:
    """Seconds to create a group of all ranks."""
    engine.barrier()
    start = time.perf_counter()
    close = engine.new_group()
    seconds = time.perf_counter() - start
    engine.barrier()
    close()
    return {"seconds": seconds}


def late(engine: ContenderRank, seconds: float) -> dict[str, float]:
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


def futex(engine: HardwareLimit, repeat: int) -> dict[str, float]:
    """Seconds of a round trip between ranks 0 and 1 through the kernel, by the engine "floor"."""
    engine.barrier()
    start = time.perf_counter()
    engine.futex_round_trip(repeat)
    return {"seconds": (time.perf_counter() - start) / repeat}


def memory(engine: Gloo | Shoal, idle: float) -> dict[str, float]:
    """Growth of this rank's unique set size in bytes since it had only imported torch."""
    import psutil  # ranks of MPI do not have it

    engine.barrier()
    time.sleep(idle)
    return {"bytes": psutil.Process().memory_full_info().uss - engine.uss_before}
