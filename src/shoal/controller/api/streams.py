"""Streams and events of nodes, as ``torch.cuda`` has them for a GPU.

    upload = shoal.Stream("node:0")
    with upload:
        x = batch.to("node:0")
    y = net(x)                      # on the default stream, after the upload: the wait is automatic

See ``docs/controller.md``.
"""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any, NamedTuple

import torch

from ...common.copy_refusal import refuses_copies
from ...errors import UsageError, WorkerLost
from ...future import Future
from ..commands.batch import SegmentBatch
from ..commands.connection import StreamConnection
from ..commands.space import Space
from ..node import sessions
from ..protocol.commands import MARK, WAIT
from ..protocol.metadata import WireMetadata, metadata
from ..tensor import current
from ..tensor.stream_order import StreamOrder
from ..tensor.tensor import TensorHandle

#: a device, an object with a ``device``, an index, or None: node 0
NodeLike = Any

_MARK = WireMetadata((), (), 0, torch.bool)


def _space_of(place: NodeLike) -> Space:
    device = getattr(place, "device", place)
    if device is None:
        device = 0
    if not isinstance(device, int):
        device = torch.device(device)
        if device.type != "node":
            raise UsageError(f"{device} is not a node: a stream needs a node, such as 'node:0'")
        device = device.index or 0
    return current.master().space(device)


@refuses_copies("a Stream", "a queue at each node", "Create another one")
class Stream:
    """A queue of operations on a node, in addition to the node's default stream.

    In ``with stream:`` the calling thread's operations on tensors of the node are issued to it. Waits for
    operands from other streams are inserted automatically and happen on the node.

    A stream is lost with its node: ``with stream:`` raises NodeLost, even after the node was replaced.

    Args:
        place: the node: ``"node:0"``, an index, or an object with a ``device``; None: node 0.

    Attributes:
        device: device of the node.
    """

    def __init__(self, place: NodeLike = None) -> None:
        home = _space_of(place)
        streams = current.master().streams()
        with home.lock:
            log = streams.open(home)
        self._set(streams, log)
        weakref.finalize(self, streams.give_back, log).atexit = False

    def _set(self, streams: StreamOrder, log: Space) -> None:
        self._streams = streams
        self.log = log
        self.device = log.home.device

    @property
    def stream_id(self) -> int:
        """The number of the stream; 0: a default stream."""
        return self.log.stream

    def __enter__(self) -> Stream:
        _refuse_in_recording(self.log)
        self.log.raise_if_lost()
        self._streams.enter(self.log)
        return self

    def __exit__(self, *error: object) -> None:
        self._streams.leave(self.log)

    def synchronize(self) -> None:
        """Wait until everything issued to the stream is done.

        Raises:
            RemoteOpError: an operation failed on one of its nodes and its error was not raised yet.
            NodeLost: a node was lost.
        """
        Event().record(self).synchronize()
        for connection in self.log.connections:
            connection.node.raise_unseen()

    def query(self) -> bool:
        """Return whether everything issued to the stream is done, without waiting."""
        return Event().record(self).query()

    def record_event(self, event: Event | None = None) -> Event:
        """Record `event`, or a new one, and return it."""
        return (Event() if event is None else event).record(self)

    def wait_event(self, event: Event) -> None:
        """Make all operations issued to this stream later wait for an event."""
        event.wait(self)

    def wait_stream(self, stream: Stream) -> None:
        """Make all operations issued to this stream later wait for those already issued to `stream`."""
        self.wait_event(stream.record_event())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.log is self.log

    def __hash__(self) -> int:
        return hash(self.log)

    def __repr__(self) -> str:
        return f"<shoal.Stream {self.stream_id} of {self.device}>"


def _refuse_in_recording(log: Space) -> None:
    """Raise RecordingMismatch if this thread records a step."""
    if log.home.listener is not None:
        log.home.listener.command_issued(log.home, (WAIT,))


def _stream_of(streams: StreamOrder, log: Space) -> Stream:
    """Wrap an existing log in a stream."""
    stream = Stream.__new__(Stream)
    stream._set(streams, log)
    return stream


def default_stream(place: NodeLike = None) -> Stream:
    """Return the stream of a node that operations use outside of ``with stream:``."""
    return _stream_of(current.master().streams(), _space_of(place))


def current_stream(place: NodeLike = None) -> Stream:
    """Return the stream of a node that this thread's operations use.

    Args:
        place: the node; None: that of the innermost ``with stream:``, or node 0.
    """
    streams = current.master().streams()
    if place is None:
        return _stream_of(streams, streams.innermost() or _space_of(None))
    return _stream_of(streams, streams.current(_space_of(place)))


class _Record(NamedTuple):
    """A position in the log of a stream, and the batches that it was sent in."""

    log: Space
    position: int
    batches: list[tuple[StreamConnection, SegmentBatch]]


@refuses_copies("an Event", "a position in the streams of the nodes", "Record another one")
class Event:
    """An event in a stream; it happens when everything issued to the stream before it is done.

    Args:
        enable_timing: whether :meth:`elapsed_time` will be called.
    """

    def __init__(self, enable_timing: bool = False) -> None:
        self._timing = enable_timing
        self._recorded: _Record | None = None
        self._mark: TensorHandle | None = None

    def record(self, stream: Stream | None = None) -> Event:
        """Record the event in a stream, by default the current one, and return the event.

        This replaces an earlier record and sends everything issued to the stream.

        Raises:
            NodeLost: the stream's node was lost.
        """
        given = current_stream() if stream is None else stream
        log, streams = given.log, given._streams
        _refuse_in_recording(log)
        with log.lock:
            log.raise_if_lost()
            if self._timing or any(connection.node.accelerators for connection in log.connections):
                id = log.new_id()
                with streams.using(log, [], []):
                    log.append_command(MARK, id, int(self._timing))
                self._mark = TensorHandle(log.home, id, metadata(log.device, _MARK))
                self._mark.storage = streams.made(log)
            position = log.position
            sent = [(connection, connection.flush()) for connection in log.connections]
            self._recorded = _Record(
                log, position, [(each, batch) for each, batch in sent if batch is not None]
            )
        return self

    def wait(self, stream: Stream | None = None) -> None:
        """Make operations issued later to a stream, by default the current one, wait for this event.

        The call itself does not wait. The stream waits for all nodes of the event; if it has the same nodes,
        each waits for its own part. An event that was not recorded is ignored. If a node of the event is
        lost, the stream continues.
        """
        given = current_stream() if stream is None else stream
        if self._recorded is None:
            return
        recorded, log = self._recorded, given.log
        _refuse_in_recording(log)
        with log.lock:
            if log.connected_nodes == recorded.log.connected_nodes:
                given._streams.wait(log, recorded.log, recorded.position)  # each node for its own part
            else:
                given._streams.expect(
                    log, recorded.batches, partial(_query_gpus, recorded.log, self._mark, True)
                )

    def query(self) -> bool:
        """Return whether the event has happened; True if it was not recorded.

        Raises:
            NodeLost: a node was lost before the event happened.
        """
        if self._recorded is None:
            return True
        for connection, batch in self._recorded.batches:
            if not batch.future.done():
                connection.node.raise_if_lost()
                return False
        self._settle()
        return all(asked.wait() for asked in _query_gpus(self._recorded.log, self._mark, False))

    def synchronize(self) -> None:
        """Wait until the event has happened.

        Raises:
            NodeLost: a node was lost before the event happened.
        """
        if self._recorded is None:
            return
        self._settle()
        for asked in _query_gpus(self._recorded.log, self._mark, True):
            asked.wait()

    def _settle(self) -> None:
        assert self._recorded is not None
        for connection, batch in self._recorded.batches:
            if not batch.future.done() or batch.future.exception() is not None:
                connection.wait_batch(batch)

    def elapsed_time(self, end_event: Event) -> float:
        """Return the milliseconds from this event to another one on the same node; waits for both.

        Raises:
            UsageError: one of them was not recorded with timing, or they are on different nodes.
            NodeLost: the node was lost.
        """
        for each in (self, end_event):
            if each._mark is None or not each._timing:
                raise UsageError("elapsed_time needs recorded events created with enable_timing=True")
            each.synchronize()
        first, second = self._mark, end_event._mark
        assert first is not None
        assert second is not None
        common = first.space.connected_nodes & second.space.connected_nodes
        if not common:
            raise UsageError(
                f"the events are on {first.space.device} and {second.space.device}, whose clocks differ"
            )
        node = min(common, key=lambda node: node.index)
        given = first.space.number, first.id, second.space.number, second.id
        try:
            return float(node.call(sessions.elapsed, *given).wait())
        except WorkerLost as error:
            raise node.mark_lost(error) from error

    def __repr__(self) -> str:
        where = "not recorded" if self._recorded is None else f"of {self._recorded.log.device}"
        return f"<shoal.Event {where}>"


def _query_gpus(log: Space, mark: TensorHandle | None, wait: bool) -> list[Future[Any]]:
    """Ask nodes with GPUs whether their GPUs have reached an event; with `wait`, to reply once they have."""
    if mark is None:
        return []
    return [
        connection.node.call(sessions.event_reached, log.number, mark.id, wait)
        for connection in log.connections
        if connection.node.accelerators
    ]
