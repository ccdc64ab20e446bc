"""A node's half of an event: a time, and a CUDA event on each GPU."""

from __future__ import annotations

import time
from typing import Any

import torch


class Mark:
    """An event recorded in the stream of the calling thread; `timing`: whether :meth:`elapsed` is needed."""

    __slots__ = ("_at", "_events")

    def __init__(self, timing: bool) -> None:
        self._at = time.perf_counter()
        self._events: list[Any] = []
        if torch.cuda.is_available():
            for index in range(torch.cuda.device_count()):
                event = torch.cuda.Event(enable_timing=timing)  # type: ignore[no-untyped-call]
                event.record(torch.cuda.current_stream(index))
                self._events.append(event)

    def passed(self, wait: bool) -> bool:
        """Return whether the GPUs have done everything enqueued before it; with `wait`, wait for that."""
        for event in self._events:  # the CPU has done everything before it when the event is recorded
            if wait:
                event.synchronize()
        return all(event.query() for event in self._events)

    def elapsed(self, end: Mark) -> float:
        """Return the milliseconds from this event to `end`; with GPUs, the maximum over the GPUs."""
        if not self._events:
            return (end._at - self._at) * 1000
        return max(
            float(first.elapsed_time(last)) for first, last in zip(self._events, end._events, strict=True)
        )
