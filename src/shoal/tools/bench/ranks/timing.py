"""The measurement of a case on one rank."""

from __future__ import annotations

import time
from typing import Any

from ..case import Case
from .data import block as block_of
from .data import check, encode, fill
from .engine import STORAGE, Engine, Values


class TimedCase:
    """Buffers and call of one variant of a case; the result of a first call is checked.

    Attributes:
        error: largest relative error of the result.

    Raises:
        Unsupported: the engine does not support the case.
        WrongResult: the result is wrong.
    """

    def __init__(self, engine: Engine, case: Case, variant: str) -> None:
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
