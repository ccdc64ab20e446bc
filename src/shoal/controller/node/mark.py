"""An event, on the node where it was recorded: a moment, and an event on each of its GPUs."""

from __future__ import annotations

import time
from typing import Any

import torch


class Mark:
    """Recorded in the stream of the calling thread.

    Args:
        timing: whether it is for :meth:`elapsed`.
    """

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
        """Whether what was enqueued before it is done; wait for it, if so wanted."""
        for event in self._events:  # a processor has done what came before when the event is recorded
            if wait:
                event.synchronize()
        return all(event.query() for event in self._events)

    def elapsed(self, end: Mark) -> float:
        """Milliseconds from this one to another one; with GPUs, on the one that took longest."""
        if not self._events:
            return (end._at - self._at) * 1000
        return max(
            float(first.elapsed_time(last)) for first, last in zip(self._events, end._events, strict=True)
        )
