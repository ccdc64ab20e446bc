"""Streams and events of nodes, as ``torch.cuda`` has them for a GPU.

    upload = shoal.Stream("node:0")
    with upload:
        x = batch.to("node:0")
    y = net(x)                      # on the default stream, after the upload: the wait is inserted by itself

``docs/controller.md`` has more.
"""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

import torch

from ...common.copy_refusal import refuses_copies
from ...errors import UsageError, WorkerLost
from ...future import Future
from ..commands.batch import SegmentBatch
from ..commands.line import NodeConnection
from ..commands.losses import anew, lost_by
from ..commands.space import Space
from ..node import sessions
from ..protocol.commands import MARK, WAIT
from ..protocol.metadata import WireMetadata, metadata
from ..tensor import current
from ..tensor.ordering import Streams
from ..tensor.tensor import TensorHandle

#: a device, what has one, an index, or None: node 0
Place = Any

_MARK = WireMetadata((), (), 0, torch.bool)


def _home(place: Place) -> Space:
    device = getattr(place, "device", place)
    if device is None:
        device = 0
    if not isinstance(device, int):
        device = torch.device(device)
        if device.type != "node":
            raise UsageError(f"{device} is no node: a stream is of a node, like 'node:0'")
        device = device.index or 0
    return current.master().space(device)


@refuses_copies(
    "a Stream",
    "a queue at each node",
    "Make another one",
)
class Stream:
    """A queue of operations of a node, beside the node's default stream.

    In ``with stream:`` operations on tensors of its node go to it, those of the calling thread.  An
    operation waits by itself, on the node, for what it needs of other streams.

    A stream is lost with its node: ``with stream:`` raises NodeLost, also when the node was replaced.

    Args:
        place: the node: ``"node:0"``, an index, or whatever has a ``device``; None: node 0.

    Attributes:
        device: of the node.
    """

    def __init__(self, place: Place = None) -> None:
        home = _home(place)
        streams = current.master().streams()
        with home.lock:
            log = streams.open(home)
        self._set(streams, log)
        weakref.finalize(self, streams.give_back, log).atexit = False

    def _set(self, streams: Streams, log: Space) -> None:
        self._streams = streams
        self.log = log
        self.device = log.home.device

    @property
    def stream_id(self) -> int:
        """Its number; 0: a default stream."""
        return self.log.stream

    def __enter__(self) -> Stream:
        _not_recorded(self.log)
        if self.log.lost is not None:
            raise anew(self.log.lost)
        self._streams.enter(self.log)
        return self

    def __exit__(self, *error: object) -> None:
        self._streams.leave(self.log)

    def synchronize(self) -> None:
        """Wait until all is done that was issued to it.

        Raises:
            RemoteOpError: an operation failed on one of its nodes, of which no error was raised yet.
            NodeLost: a node died.
        """
        Event().record(self).synchronize()
        for line in self.log.lines:
            line.raise_unseen()

    def query(self) -> bool:
        """Whether all is done that was issued to it; does not wait."""
        return Event().record(self).query()

    def record_event(self, event: Event | None = None) -> Event:
        """Record an event; a new one, if none is given."""
        return (Event() if event is None else event).record(self)

    def wait_event(self, event: Event) -> None:
        """Let what is issued to it from now on run after an event."""
        event.wait(self)

    def wait_stream(self, stream: Stream) -> None:
        """Let what is issued to it from now on run after all that was issued to another stream."""
        self.wait_event(stream.record_event())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.log is self.log

    def __hash__(self) -> int:
        return hash(self.log)

    def __repr__(self) -> str:
        return f"<shoal.Stream {self.stream_id} of {self.device}>"


def _not_recorded(log: Space) -> None:
    """Raise RecordingMismatch if this thread records a step."""
    if log.home.listener is not None:
        log.home.listener.commanded(log.home, (WAIT,))


def _of(streams: Streams, log: Space) -> Stream:
    """A stream that somebody has."""
    stream = Stream.__new__(Stream)
    stream._set(streams, log)
    return stream


def default_stream(place: Place = None) -> Stream:
    """The stream of a node to which operations go outside of ``with stream:``."""
    return _of(current.master().streams(), _home(place))


def current_stream(place: Place = None) -> Stream:
    """The stream of a node to which this thread's operations go.

    Args:
        place: the node; None: that of the innermost ``with stream:``, or node 0.
    """
    streams = current.master().streams()
    if place is None:
        return _of(streams, streams.innermost() or _home(None))
    return _of(streams, streams.current(_home(place)))


@refuses_copies(
    "an Event",
    "a position in the streams of the nodes",
    "Record another one",
)
class Event:
    """A moment of a stream: when all is done that was issued before.

    Args:
        enable_timing: whether it is for :meth:`elapsed_time`.
    """

    def __init__(self, enable_timing: bool = False) -> None:
        self._timing = enable_timing
        self._recorded: tuple[Space, int, list[tuple[NodeConnection, SegmentBatch]]] | None = None
        self._mark: TensorHandle | None = None

    def record(self, stream: Stream | None = None) -> Event:
        """Record it in a stream, the current one by default; what was recorded before is forgotten.

        What was issued to the stream is sent at once.

        Returns:
            itself.

        Raises:
            NodeLost: the stream's node died.
        """
        given = current_stream() if stream is None else stream
        log, streams = given.log, given._streams
        _not_recorded(log)
        with log.lock:
            if log.lost is not None:
                raise anew(log.lost)
            if self._timing or any(line.accelerators for line in log.lines):
                id = log.new_id()
                with streams.using(log, [], []):
                    log.note(MARK, id, int(self._timing))
                self._mark = TensorHandle(log.home, id, metadata(log.device, _MARK))
                self._mark.storage = streams.made(log)
            position = log.position
            sent = [(line, line.flush()) for line in log.lines]
            self._recorded = log, position, [(line, batch) for line, batch in sent if batch is not None]
        return self

    def wait(self, stream: Stream | None = None) -> None:
        """Let what is issued to a stream, the current one by default, run after this event; does not wait.

        It waits for all nodes of the event; where the stream has the same nodes, each waits for its own part.
        An event that was not recorded holds nobody.  If a node of the event is lost, the stream goes on.
        """
        given = current_stream() if stream is None else stream
        if self._recorded is None:
            return
        (recorded, position, batches), log = self._recorded, given.log
        _not_recorded(log)
        with log.lock:
            if {line.main for line in log.lines} == {line.main for line in recorded.lines}:
                given._streams.wait(log, recorded, position)  # each node for its own part
            else:
                given._streams.expect(log, batches, partial(_passed, recorded, self._mark, True))

    def query(self) -> bool:
        """Whether it has happened; True if it was not recorded.

        Raises:
            NodeLost: it will not.
        """
        if self._recorded is None:
            return True
        for line, batch in self._recorded[2]:
            if not batch.future.done():
                if line.main.lost is not None:
                    raise anew(line.main.lost)
                return False
        self._settle()
        return all(asked.wait() for asked in _passed(self._recorded[0], self._mark, False))

    def synchronize(self) -> None:
        """Wait until it has happened.

        Raises:
            NodeLost: it will not.
        """
        if self._recorded is None:
            return
        self._settle()
        for asked in _passed(self._recorded[0], self._mark, True):
            asked.wait()

    def _settle(self) -> None:
        assert self._recorded is not None
        for line, batch in self._recorded[2]:
            if not batch.future.done() or batch.future.exception() is not None:
                line.settle(batch)

    def elapsed_time(self, end_event: Event) -> float:
        """Milliseconds from this event to another one of the same node; waits for both.

        Raises:
            UsageError: one of them has no time, or they are of different nodes, whose clocks differ.
            NodeLost: the node died.
        """
        for each in (self, end_event):
            if each._mark is None or not each._timing:
                raise UsageError("an event has a time if it is made with enable_timing=True and recorded")
            each.synchronize()
        first, second = self._mark, end_event._mark
        assert first is not None
        assert second is not None
        common = {line.main for line in first.space.lines} & {line.main for line in second.space.lines}
        if not common:
            raise UsageError(
                f"the events are of {first.space.device} and {second.space.device}, whose clocks differ"
            )
        line = min(common, key=lambda line: line.index)
        given = first.space.number, first.id, second.space.number, second.id
        try:
            return float(line.call(sessions.elapsed, *given).wait())
        except WorkerLost as error:
            raise lost_by(line, error) from error

    def __repr__(self) -> str:
        where = "not recorded" if self._recorded is None else f"of {self._recorded[0].device}"
        return f"<shoal.Event {where}>"


def _passed(log: Space, mark: TensorHandle | None, wait: bool) -> list[Future[Any]]:
    """Ask the nodes that have GPUs whether these have come to an event, or to wait until they have."""
    if mark is None:
        return []
    return [
        line.main.call(sessions.passed, log.number, mark.id, wait) for line in log.lines if line.accelerators
    ]
