"""The part of a session that its streams share on a node: tensors, the progress of each stream, and waits.

A position in a log is how many numbers of it come before.  Each stream says after every command how far it is
in the logs that it executes, once there is a second stream; one that waits for a position is woken then.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from typing import Any

import torch


class SessionEnded(BaseException):
    """The session has ended: nobody will do what a stream waits for."""


class StreamProgress:
    """How far a stream is in one log.

    Attributes:
        done: the position.
    """

    __slots__ = ("_memory", "_turn", "_waiting", "done")

    def __init__(self, memory: NodeMemory) -> None:
        self.done = 0
        self._memory = memory
        self._turn = threading.Condition()
        self._waiting = 0

    def reach(self, position: int) -> None:
        """Everything before a position is done."""
        self.done = position
        if self._waiting:  # who waits says so before it looks how far this is
            self.wake()

    def wake(self) -> None:
        """Let all that wait look again."""
        with self._turn:
            self._turn.notify_all()

    def wait(self, position: int) -> None:
        """Wait until everything before a position is done.

        Raises:
            Ended: it will not be.
        """
        if self.done >= position:
            return
        with self._turn:
            self._waiting += 1
            try:
                self._turn.wait_for(lambda: self.done >= position or self._memory.ended)
            finally:
                self._waiting -= 1
        if self.done < position:
            raise SessionEnded


class NodeMemory:
    """Tensors of a session by space and id, and the progress of its streams.

    Attributes:
        lock: guards what several streams change at once.
        several: whether there is more than the default stream.
        node: its index, known once there are several.
        ended: whether the session is.
        poisons: numbers of failures, which no node that had the same index before has given.

    Args:
        epoch: how many nodes have had its index before.
    """

    def __init__(self, epoch: int) -> None:
        self.lock = threading.Lock()
        self.several = False
        self.node = -1
        self.ended = False
        self.poisons = itertools.count(epoch << 32)
        self._lists: dict[int, list[Any]] = {}
        self._progress: dict[tuple[int, int], StreamProgress] = {}
        self._enqueues: dict[int, list[Any]] = {}
        self._releases: dict[tuple[int, int], int] = {}
        self._told: dict[int, bool] = {}
        self._telling = threading.Condition()

    def tensors(self, space: int) -> list[Any]:
        """The tensors of a space, by id."""
        return self._lists.setdefault(space, [])

    def hold(self, space: int, id: int, value: Any) -> None:
        """Give a tensor of another space an id in this one too."""
        tensors = self.tensors(space)
        if len(tensors) <= id:
            tensors.extend([None] * (id + 1 - len(tensors)))
        tensors[id] = value

    def lists(self) -> list[list[Any]]:
        """The tensors of all spaces."""
        return list(self._lists.values())

    def progress(self, space: int, stream: int) -> StreamProgress:
        """How far a stream is in the log of a space."""
        with self.lock:
            found = self._progress.get((space, stream))
            if found is None:
                found = self._progress[space, stream] = StreamProgress(self)
            return found

    def open(self, stream: int, node: int) -> None:
        """There is a further stream; it has a stream on each GPU too."""
        self.node = node
        if torch.cuda.is_available():
            indices = range(torch.cuda.device_count())
            self._enqueues[0] = [torch.cuda.default_stream(index) for index in indices]
            self._enqueues[stream] = [torch.cuda.Stream(index) for index in indices]  # type: ignore[no-untyped-call]
        self.several = True

    def enqueues(self, stream: int) -> list[Any]:
        """The streams of GPUs on which a stream enqueues."""
        return self._enqueues.get(stream, [])

    def wait(self, space: int, stream: int, position: int) -> None:
        """Let the calling stream wait until another one has done so much of a log.

        On a GPU both have enqueued their work only, so the work that is enqueued from now on waits too.
        """
        self.progress(space, stream).wait(position)
        for other in self.enqueues(stream):
            torch.cuda.current_stream(other.device).wait_stream(other)

    def release(self, tensors: list[Any], space: int, id: int, count: int) -> None:
        """Free an id, if all of the ``count`` streams that used it have come to this."""
        with self.lock:
            value = tensors[id]
            if isinstance(value, torch.Tensor) and value.is_cuda:  # or its memory is given away too early
                value.record_stream(torch.cuda.current_stream(value.device))
            left = self._releases.pop((space, id), count) - 1
            if left:
                self._releases[space, id] = left
            else:
                tensors[id] = None

    def tell(self, number: int) -> None:
        """Let a stream that expects a number go on."""
        with self._telling:
            self._told[number] = True
            self._telling.notify_all()

    def expect(self, number: int) -> None:
        """Wait until the master tells of a number.

        Raises:
            Ended: it will not.
        """
        with self._telling:
            self._telling.wait_for(lambda: number in self._told or self.ended)
            if self._told.pop(number, None) is None:
                raise SessionEnded

    def forget(self, space: int, streams: Sequence[int]) -> None:
        """Forget a space, and streams, that nobody uses or waits for any more."""
        with self.lock:
            self._lists.pop(space, None)
            self._progress = {key: each for key, each in self._progress.items() if key[0] != space}
            self._releases = {key: left for key, left in self._releases.items() if key[0] != space}
        for stream in streams:
            self._enqueues.pop(stream, None)

    def end(self) -> None:
        """End all waits."""
        self.ended = True
        with self.lock:
            waited = list(self._progress.values())
        for each in waited:
            each.wake()
        with self._telling:
            self._telling.notify_all()
