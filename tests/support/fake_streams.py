"""A device of no substance, whose streams are threads that a test can hold, step and break."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial

import torch

from shoal.future.state import Latch
from shoal.streams import StreamRuntime

#: Seconds that a test waits for a stream before it says so.
_PATIENCE = 30.0


class FakeGraph:
    """Work that streams have captured instead of running it.

    A replay runs it in the reverse of the captured order, as far as the events that streams waited for allow
    it, so that a missing event has an effect.

    Attributes:
        keep: kept as long as the graph, as its memory is on a GPU.
    """

    def __init__(self, origin: FakeStream) -> None:
        self.keep: list[object] = []
        #: what makes the work of one replay, and the nodes that it runs after
        self._nodes: list[tuple[Callable[[], Callable[[], object]], frozenset[int]]] = []
        #: the nodes before the next one of each stream; None: the capture has ended
        self._before: dict[FakeStream, frozenset[int]] | None = {}
        self._origin = origin
        self.join(origin, frozenset())

    def add(self, stream: FakeStream, make: Callable[[], Callable[[], object]]) -> None:
        before = self.before(stream)
        assert self._before is not None
        self._before[stream] = before | {len(self._nodes)}
        self._nodes.append((make, before))

    def before(self, stream: FakeStream) -> frozenset[int]:
        """The nodes that the next one of a stream runs after."""
        assert self._before is not None
        return self._before[stream]

    def join(self, stream: FakeStream, nodes: frozenset[int]) -> None:
        """Capture the stream from now on, behind ``nodes``."""
        if self._before is None:
            raise RuntimeError("dependency created on a capture that has ended")
        self._before[stream] = self._before.get(stream, frozenset()) | nodes
        stream.graph = self

    def end(self) -> None:
        assert self._before is not None
        streams, self._before = self._before, None
        for stream in streams:
            stream.graph = None
        if len(streams[self._origin]) < len(self._nodes):
            raise RuntimeError("capturing stream has unjoined work")

    def replay(self, stream: FakeStream) -> None:
        waiting, done = list(range(len(self._nodes))), set[int]()
        while waiting:
            number = max(each for each in waiting if self._nodes[each][1] <= done)
            waiting.remove(number)
            done.add(number)
            stream.enqueue(self._nodes[number][0]())


class FakeEvent:
    """Occurs when its stream has run what was enqueued before it; fails if the stream breaks before.

    Attributes:
        captured: the graph that has captured it, and the nodes before it; None: it is a normal event.
    """

    captured: tuple[weakref.ref[FakeGraph], frozenset[int]] | None = None

    def __init__(self, stream: FakeStream) -> None:
        self.stream = stream
        self.error: Exception | None = None
        self._over = Latch()

    def occur(self, error: Exception | None = None) -> None:
        self.error = error
        self._over.set()

    def wait(self, timeout: float | None) -> bool:
        """Whether it occurred in time; raises what broke the stream."""
        if self.captured is not None:
            raise RuntimeError("operation not permitted on an event last recorded in a capturing stream")
        over = self._over.wait(timeout)
        if over and self.error is not None:
            raise self.error
        return over


class FakeStream:
    """Work that a thread of its own runs, one piece after another.

    Args:
        held: whether nothing runs until :meth:`release` or :meth:`step`.

    Attributes:
        graph: captures what is enqueued now; None: it runs.
        reserved: called before anything is enqueued, while a library uses the stream; None: none does.
    """

    def __init__(self, device: torch.device, name: str, *, held: bool = False) -> None:
        self.device = device
        self.name = name
        self.graph: FakeGraph | None = None
        self.reserved: Callable[[], object] | None = None
        self._condition = threading.Condition()
        self._queue: deque[Callable[[Exception | None], None]] = deque()
        self._allowed = 0 if held else None
        self._broken: Exception | None = None
        self._closed = False
        self._thread: threading.Thread | None = None

    # -- what tests do ---------------------------------------------------------------------------

    def hold(self) -> None:
        """Run nothing more until :meth:`release`."""
        with self._condition:
            self._allowed = 0

    def step(self, count: int = 1) -> None:
        """Let a held stream run ``count`` more pieces of work."""
        with self._condition:
            assert self._allowed is not None, f"{self.name} is not held"
            self._allowed += count
            self._condition.notify_all()

    def release(self) -> None:
        """Run what there is and what comes."""
        with self._condition:
            self._allowed = None
            self._condition.notify_all()

    @property
    def broken(self) -> Exception | None:
        """What it failed with."""
        return self._broken

    def fail(self, error: Exception) -> None:
        """Run nothing ever again: all events that have not occurred yet fail with ``error``."""
        with self._condition:
            self._broken = self._broken or error
            self._condition.notify_all()

    # -- what a device does ----------------------------------------------------------------------

    def enqueue(
        self, work: Callable[[], object], make: Callable[[], Callable[[], object]] | None = None
    ) -> None:
        """Run ``work``, or capture it; then each replay runs what ``make`` returns, or ``work``."""
        if self.reserved is not None:
            self.reserved()
        if self.graph is not None:
            self.graph.add(self, make or (lambda: work))
        else:
            self._put(lambda error: None if error is not None else work())

    def record(self) -> FakeEvent:
        event = FakeEvent(self)
        if self.graph is not None:
            event.captured = weakref.ref(self.graph), self.graph.before(self)
        else:
            self._put(event.occur)
        return event

    def wait_event(self, event: FakeEvent) -> None:
        """What comes now runs after ``event``; a failure of the one stream is one of the other."""
        if event.captured is not None:
            graph, nodes = event.captured[0](), event.captured[1]
            if graph is None or self.graph not in (None, graph):
                raise RuntimeError("dependency created on another capture")
            graph.join(self, nodes)
        elif self.graph is not None:
            raise RuntimeError("dependency created on uncaptured work in another stream")
        else:
            self.enqueue(partial(event.wait, None))

    def close(self) -> None:
        """End the thread; what was not run is failed."""
        with self._condition:
            self._closed = True
            self._broken = self._broken or RuntimeError(f"{self.name} was closed")
            self._condition.notify_all()
        if self._thread is not None:
            self._thread.join(_PATIENCE)
            assert not self._thread.is_alive(), f"{self.name} waits for an event that never occurs"

    def _put(self, work: Callable[[Exception | None], object]) -> None:
        with self._condition:
            self._queue.append(work)
            self._condition.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=f"stream {self.name}", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        while True:
            with self._condition:
                while not (self._broken or (self._queue and self._allowed != 0)):
                    self._condition.wait()
                if not self._queue:
                    if self._closed:
                        return
                    self._condition.wait()
                    continue
                work, error = self._queue.popleft(), self._broken
                if self._allowed:
                    self._allowed -= 1
            try:
                work(error)
            except Exception as failure:
                self.fail(failure)
            # What it refers to must not live until the next piece of work comes.
            del work


@dataclass(eq=False)
class _Capture:
    """A capture that has begun; ``thread``: the one that may not ask for events, None: all may not."""

    thread: int | None
    #: the name of a thread that has asked
    asked_by: str = ""


class FakeRuntime(StreamRuntime):
    """Streams by name.

    Args:
        held: whether new streams begin held.

    Attributes:
        done: the work that has run, see :meth:`enqueue`.
        recorded: whose memory is tied to which stream.
        pool: the streams that were given out for independent work.
        blocked: how often the host blocked until an event occurred.
    """

    def __init__(self, *, held: bool = False) -> None:
        self.done: list[str] = []
        self.recorded: list[tuple[torch.Tensor, FakeStream]] = []
        self.pool: list[FakeStream] = []
        self.blocked = 0
        self._held = held
        self._streams: list[FakeStream] = []
        self._captures: list[_Capture] = []
        #: of each thread: its current streams and device, and whether it is prepared
        self._current = threading.local()

    def stream(self, device: torch.device, name: str) -> FakeStream:
        """A new stream."""
        stream = FakeStream(device, name, held=self._held)
        self._streams.append(stream)
        return stream

    def stream_named(self, name: str) -> FakeStream:
        """The latest of that name."""
        return next(stream for stream in reversed(self._streams) if stream.name == name)

    def enqueue(self, device: torch.device, work: str) -> None:
        """Put ``work`` on the current stream, as a kernel launch does."""
        self.current_stream(device).enqueue(lambda: self.done.append(work))

    @contextmanager
    def holding(self) -> Iterator[None]:
        """A context in which new streams begin held; those it gave stay so until they are released."""
        self._held = True
        try:
            yield
        finally:
            self._held = False

    @contextmanager
    def capture(self, device: torch.device, mode: str = "global") -> Iterator[FakeGraph]:
        """A context in which a new current stream captures its work, as in ``torch.cuda.graph``.

        Whoever asks for an event meanwhile gets an error and ends the capture, except in prepared threads;
        with the mode "thread_local", only this thread may not.
        """
        stream = self.stream(device, "capture")
        graph = FakeGraph(stream)
        capture = _Capture(None if mode == "global" else threading.get_ident())
        self._captures.append(capture)
        with self.use(stream):
            try:
                yield graph
            except BaseException:
                with suppress(RuntimeError):
                    graph.end()
                raise
            finally:
                self._captures.remove(capture)
            graph.end()
            if capture.asked_by:
                raise RuntimeError(f"the capture was ended by a question of {capture.asked_by} for an event")

    def broken(self) -> list[str]:
        """The streams that failed, and with what."""
        return [f"{stream.name}: {stream.broken!r}" for stream in self._streams if stream.broken]

    def release(self) -> None:
        """Hold no stream any more."""
        self._held = False
        for stream in self._streams:
            stream.release()

    def close(self) -> None:
        """End the threads of all streams."""
        for stream in self._streams:
            stream.fail(RuntimeError("the device was closed"))
        for stream in self._streams:
            stream.close()

    # -- the interface ---------------------------------------------------------------------------

    def devices(self) -> list[torch.device]:
        return list({stream.device: None for stream in list(self._streams)})

    def current_stream(self, device: torch.device) -> FakeStream:
        streams: dict[torch.device, FakeStream] = self._current.__dict__.setdefault("streams", {})
        if device not in streams:
            streams[device] = self.stream(device, f"{threading.current_thread().name}'s")
        return streams[device]

    def stream_from_pool(self, device: torch.device, high_priority: bool) -> FakeStream:
        priority = "high" if high_priority else "low"
        self.pool.append(self.stream(device, f"{device.type} {priority} {len(self.pool)}"))
        return self.pool[-1]

    def current_device(self) -> torch.device | None:
        """The device that this thread has made current; None: another one, as in a new thread."""
        return getattr(self._current, "device", None)

    @contextmanager
    def use(self, stream: FakeStream) -> Iterator[None]:
        before, device = self.current_stream(stream.device), self.current_device()
        self._current.streams[stream.device] = stream
        self._current.device = stream.device
        try:
            yield
        finally:
            self._current.streams[stream.device] = before
            self._current.device = device

    def capturing(self, device: torch.device) -> bool:
        return self.current_stream(device).graph is not None

    def handle(self, stream: FakeStream) -> int:
        return id(stream)

    def stream_of(self, handle: int) -> FakeStream:
        """The stream of a handle; raises KeyError."""
        for stream in self._streams:
            if id(stream) == handle:
                return stream
        raise KeyError(handle)

    def record(self, stream: FakeStream) -> FakeEvent:
        return stream.record()

    def wait_event(self, stream: FakeStream, event: FakeEvent) -> None:
        stream.wait_event(event)

    def prepare_thread(self, device: torch.device) -> None:
        self._current.prepared = True
        self._current.device = device

    def query(self, event: FakeEvent) -> bool:
        self._refuse_during_captures()
        return event.wait(0.0)

    def _refuse_during_captures(self) -> None:
        if getattr(self._current, "prepared", False):
            return
        for capture in list(self._captures):
            if capture.thread in (None, threading.get_ident()):
                capture.asked_by = threading.current_thread().name
                raise RuntimeError("operation not permitted when stream is capturing")

    def synchronize(self, event: FakeEvent, timeout: float | None = None) -> bool:
        self._refuse_during_captures()
        self.blocked += 1
        return event.wait(timeout)

    def record_stream(self, tensor: torch.Tensor, stream: FakeStream) -> None:
        self.recorded.append((tensor, stream))

    def finish(self, device: torch.device) -> None:
        """Wait until the current stream has run all that it has."""
        assert self.record(self.current_stream(device)).wait(_PATIENCE), "a stream is held"

    def is_high(self, stream: FakeStream) -> bool:
        return " high " in stream.name

    def streams_of(self, tensor: torch.Tensor) -> set[FakeStream]:
        """The streams to which the memory of ``tensor`` is tied."""
        return {stream for recorded, stream in self.recorded if recorded is tensor}
