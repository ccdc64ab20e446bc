"""The interface of :class:`FakeRuntime` that tests use, over the streams of a real GPU.

A real stream cannot be held.  Streams made by :meth:`RecordingCuda.stream` begin with half a second of work
instead; what a test checks before :meth:`RecordingCuda.release` takes milliseconds.
"""

from __future__ import annotations

import threading
from typing import Any

import torch

from shoal.streams import CudaRuntime

#: about half a second on current cards
_HOLD_CYCLES = 2**30
#: a few microseconds
_WORK_CYCLES = 10_000


class RecordingCuda(CudaRuntime):
    """Records what is enqueued and used; see :class:`FakeRuntime` for the attributes."""

    def __init__(self) -> None:
        self.recorded: list[tuple[torch.Tensor, Any]] = []
        self.pool: list[Any] = []
        self.blocked = 0
        self._work: list[tuple[str, torch.device, torch.cuda.Event]] = []
        self._lock = threading.Lock()
        self._begin: dict[torch.device, torch.cuda.Event] = {}
        for index in range(torch.cuda.device_count()):
            device = torch.device("cuda", index)
            # The first use of a kernel or of a pool of streams may wait for all work of the device.
            for priority in (0, -1):
                with torch.cuda.stream(torch.cuda.Stream(device, priority)):
                    torch.cuda._sleep(1)
            torch.ones(1, device=device).add_(1)
            torch.cuda.synchronize(device)
            with torch.cuda.device(device):
                self._begin[device] = self._timed_event(self.current_stream(device))

    # -- as tests use it -------------------------------------------------------------------------

    def stream(self, device: torch.device, name: str) -> Any:
        """A new stream with half a second of work."""
        stream = torch.cuda.Stream(device)
        with torch.cuda.stream(stream):
            torch.cuda._sleep(_HOLD_CYCLES)
        return stream

    def enqueue(self, device: torch.device, work: str) -> None:
        stream = self.current_stream(device)
        with torch.cuda.device(device):
            torch.cuda._sleep(_WORK_CYCLES)
            with self._lock:
                self._work.append((work, device, self._timed_event(stream)))

    @property
    def done(self) -> list[str]:
        """The work that has run, in the order of its end."""
        with self._lock:
            found = [each for each in self._work if self.query(each[2])]
        return [
            work for work, *_ in sorted(found, key=lambda each: self._begin[each[1]].elapsed_time(each[2]))
        ]

    def release(self) -> None:
        """Nothing to do: the held streams continue by themselves."""

    def finish(self, device: torch.device) -> None:
        self.current_stream(device).synchronize()

    def is_high(self, stream: Any) -> bool:
        return bool(stream.priority < 0)

    def streams_of(self, tensor: torch.Tensor) -> set[Any]:
        return {stream for recorded, stream in self.recorded if recorded is tensor}

    def close(self) -> None:
        for device in self._begin:
            torch.cuda.synchronize(device)

    # -- the interface of a runtime --------------------------------------------------------------

    def stream_from_pool(self, device: torch.device, high_priority: bool) -> torch.cuda.Stream:
        self.pool.append(super().stream_from_pool(device, high_priority))
        return self.pool[-1]

    def synchronize(self, event: torch.cuda.Event, timeout: float | None = None) -> bool:
        self.blocked += 1
        return super().synchronize(event, timeout)

    def record_stream(self, tensor: torch.Tensor, stream: torch.cuda.Stream) -> None:
        super().record_stream(tensor, stream)
        self.recorded.append((tensor, stream))

    def _timed_event(self, stream: Any) -> torch.cuda.Event:
        event: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(stream)  # type: ignore[no-untyped-call]
        return event
