"""The state of a session that its streams share on a node: tensors, the progress of each stream, and waits.

A position in a log is the number of numbers before it. Once there is a second stream, each stream sets its
position after every command and wakes the streams that wait for it.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from typing import Any

import torch

from .history import Timing


class SessionEnded(BaseException):
    """The session ended while a stream waited."""


class StreamProgress:
    """The position `done` that a stream has reached in one log."""

    __slots__ = ("_session", "_waiting", "done")

    def __init__(self, session: SessionState) -> None:
        self.done = 0
        self._session = session
        self._waiting = 0

    def reach(self, position: int) -> None:
        self.done = position
        if self._waiting:  # no lost wakeup: wait() increments it before it reads the position
            with self._session.changed:
                self._session.changed.notify_all()

    def wait(self, position: int) -> None:
        """Wait until a position is reached; raises `SessionEnded` if the session ends first."""
        if self.done >= position:
            return
        with self._session.changed:
            self._waiting += 1
            try:
                self._session.changed.wait_for(lambda: self.done >= position or self._session.ended)
            finally:
                self._waiting -= 1
        if self.done < position:
            raise SessionEnded


class SessionState:
    """Tensors of a session by space and id, and the progress of its streams.

    Attributes:
        lock: guards state that several streams change.
        changed: notified when a stream has reached an awaited position, and of what `await_number` waits for.
        has_streams: whether there are streams other than the default one.
        node: index of the node, set once there are several streams.
        ended: whether the session has ended.
        timing: times of commands while a trace is running, else None.
        poisons: numbers for failures, different from those of earlier workers with the same index.
    """

    def __init__(self, epoch: int) -> None:
        self.lock = threading.Lock()
        self.changed = threading.Condition()
        self.has_streams = False
        self.node = -1
        self.ended = False
        self.timing: Timing | None = None
        self.poisons = itertools.count(epoch << 32)
        self._tensors: dict[int, list[Any]] = {}
        self._progress: dict[tuple[int, int], StreamProgress] = {}
        self._cuda_streams: dict[int, list[Any]] = {}
        self._releases: dict[tuple[int, int], int] = {}
        self._numbers: set[int] = set()

    def tensors(self, space: int) -> list[Any]:
        return self._tensors.setdefault(space, [])

    def store(self, space: int, id: int, value: Any) -> None:
        """Store a tensor of another space under an id of this one."""
        tensors = self.tensors(space)
        if len(tensors) <= id:
            tensors.extend([None] * (id + 1 - len(tensors)))
        tensors[id] = value

    def tensor_lists(self) -> list[list[Any]]:
        return list(self._tensors.values())

    def progress(self, space: int, stream: int) -> StreamProgress:
        """Return the progress of a stream in the log of a space."""
        with self.lock:
            found = self._progress.get((space, stream))
            if found is None:
                found = self._progress[space, stream] = StreamProgress(self)
            return found

    def open(self, stream: int, node: int) -> None:
        """Add a further stream, with a CUDA stream on each GPU."""
        self.node = node
        if torch.cuda.is_available():
            indices = range(torch.cuda.device_count())
            self._cuda_streams[0] = [torch.cuda.default_stream(index) for index in indices]
            self._cuda_streams[stream] = [torch.cuda.Stream(index) for index in indices]  # type: ignore[no-untyped-call]
        self.has_streams = True

    def cuda_streams(self, stream: int) -> list[Any]:
        return self._cuda_streams.get(stream, [])

    def wait(self, space: int, stream: int, position: int) -> None:
        """Make the calling stream wait until another one has reached a position in its log.

        GPU work up to the position is only enqueued then, so the GPU streams of the caller wait for it too.
        """
        self.progress(space, stream).wait(position)
        for other in self.cuda_streams(stream):
            torch.cuda.current_stream(other.device).wait_stream(other)

    def release(self, tensors: list[Any], space: int, id: int, count: int) -> None:
        """Free an id once all of the `count` streams that used it have called this."""
        with self.lock:
            value = tensors[id]
            if isinstance(value, torch.Tensor) and value.is_cuda:  # or its memory is reused too early
                value.record_stream(torch.cuda.current_stream(value.device))
            left = self._releases.pop((space, id), count) - 1
            if left:
                self._releases[space, id] = left
            else:
                tensors[id] = None

    def notify(self, number: int) -> None:
        """Resume a stream that expects a number."""
        with self.changed:
            self._numbers.add(number)
            self.changed.notify_all()

    def await_number(self, number: int) -> None:
        """Wait until the master sends a number; raises `SessionEnded` if the session ends first."""
        with self.changed:
            self.changed.wait_for(lambda: number in self._numbers or self.ended)
            if number not in self._numbers:
                raise SessionEnded
            self._numbers.remove(number)

    def forget(self, space: int, streams: Sequence[int]) -> None:
        """Forget a space and streams that are no longer used or waited for."""
        with self.lock:
            self._tensors.pop(space, None)
            self._progress = {key: each for key, each in self._progress.items() if key[0] != space}
            self._releases = {key: left for key, left in self._releases.items() if key[0] != space}
        for stream in streams:
            self._cuda_streams.pop(stream, None)

    def end(self) -> None:
        """End all waits."""
        with self.changed:
            self.ended = True
            self.changed.notify_all()
