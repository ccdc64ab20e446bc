"""A device of no substance: streams are queues that run nothing until somebody synchronises."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from shoal.streams import StreamRuntime


@dataclass(eq=False)
class FakeEvent:
    """Occurs when its stream has run what was enqueued before it."""

    stream: FakeStream
    occurred: bool = False


@dataclass(eq=False)
class FakeStream:
    """A queue of work; ``run`` takes from its head."""

    device: torch.device
    name: str
    queue: list[Callable[[], None]] = field(default_factory=list)

    def run_until(self, event: FakeEvent) -> None:
        while not event.occurred:
            self.queue.pop(0)()


class FakeRuntime(StreamRuntime):
    """Streams by name; ``done`` lists the work that has run, ``recorded`` whose memory is tied to what."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.recorded: list[tuple[torch.Tensor, str]] = []
        self.pool: list[FakeStream] = []
        self._current = threading.local()

    def enqueue(self, device: torch.device, work: str) -> None:
        """Put ``work`` on the current stream, as a kernel launch does."""
        self.current_stream(device).queue.append(lambda: self.done.append(work))

    def current_stream(self, device: torch.device) -> FakeStream:
        streams: dict[torch.device, FakeStream] = self._current.__dict__.setdefault("streams", {})
        return streams.setdefault(device, FakeStream(device, f"{threading.current_thread().name}'s"))

    def stream_from_pool(self, device: torch.device, high_priority: bool) -> FakeStream:
        priority = "high" if high_priority else "low"
        self.pool.append(FakeStream(device, f"{device.type} {priority} {len(self.pool)}"))
        return self.pool[-1]

    @contextmanager
    def use(self, stream: FakeStream) -> Iterator[None]:
        before = self.current_stream(stream.device)
        self._current.streams[stream.device] = stream
        yield
        self._current.streams[stream.device] = before

    def record(self, stream: FakeStream) -> FakeEvent:
        event = FakeEvent(stream)

        def occur() -> None:
            event.occurred = True

        stream.queue.append(occur)
        return event

    def wait_event(self, stream: FakeStream, event: FakeEvent) -> None:
        stream.queue.append(lambda: self.synchronize(event))

    def synchronize(self, event: FakeEvent) -> None:
        event.stream.run_until(event)

    def record_stream(self, tensor: torch.Tensor, stream: FakeStream) -> None:
        self.recorded.append((tensor, stream.name))

    def finish(self, device: torch.device) -> None:
        """Run all work of the current stream and what it waits for."""
        self.synchronize(self.record(self.current_stream(device)))

    def streams_of(self, tensor: torch.Tensor) -> set[str]:
        """The names of the streams to which the memory of ``tensor`` is tied."""
        return {name for recorded, name in self.recorded if recorded is tensor}
