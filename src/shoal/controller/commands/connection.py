"""The master's connection to one node: batches, their acknowledgement, failures, and the loss of the node.

A :class:`NodeConnection` owns one :class:`StreamConnection` per stream of the node, each of which owns its
:class:`TransferBudget` and :class:`FlushThread`. :mod:`.space` describes the data sent over them.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import InitVar, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from ...errors import GroupError, NodeLost, RpcError, ShoalError
from ...future import Future
from ...rpc import Peer
from ..node import sessions
from ..protocol.commands import LOST, OperationFailure, Segment
from ..protocol.workers import node_name
from .batch import Failures, SegmentBatch, fresh_copy, length
from .history import History, SegmentOrigins, describe_progress
from .interrupts import call_without_interrupt, interruptible
from .node_trace import NodeTrace
from .origin import current_origin

if TYPE_CHECKING:
    from ..tensor.stream_order import StreamOrder
    from .space import Space

#: commands in the log that trigger the first batch after a wait; each later batch needs twice as many
FIRST_BATCH_COMMANDS = 32
#: the maximum of that number; a batch has more commands if the node is far behind
MAX_BATCH_COMMANDS = 256
#: number of unacknowledged batches at which commands are held back in the log
MAX_UNACKNOWLEDGED_BATCHES = 4
#: maximum number of pending commands of a node before the program waits for it
MAX_PENDING_COMMANDS = 65_536
#: seconds that commands stay in the log when no more follow, and while batches are sent all the time
FLUSH_DELAY_S, BUSY_FLUSH_DELAY_S = 0.001, 0.002
#: rounds without commands after which the flush thread sleeps until it is woken
_IDLE_ROUNDS = 64
#: maximum seconds per wait of the flush thread for a busy node: it must end even if the node never replies
_MAX_WAIT_S = 0.1
#: timeout in seconds for a node's reply about a tensor's state or its clock
REPLY_TIMEOUT_S = 30.0
#: maximum unacknowledged bytes of uploaded tensors, unless it is a single one, before the program waits
MAX_UPLOAD_BYTES = 64 << 20
#: maximum unacknowledged bytes of copies from other nodes before the program waits
MAX_COPY_BYTES = 256 << 20


class StreamConnection:
    """The batches that one stream of a node gets; the caller of most methods holds the master's lock.

    Attributes:
        node: the node.
        index: index of the node.
        stream: number of the stream; 0: the default stream.
        spaces: the spaces with tensors on the node, or their logs of this stream.
        open: the space that commands are appended to.
        batches: batches sent and not yet taken off by :meth:`reap`.
        history: the last acknowledged operations.
        sent: number of batches sent.
        bytes: bytes sent.
        transfers: bytes of tensors on their way to the node.
        flusher: sends commands that stay in the log.
    """

    def __init__(self, node: NodeConnection, stream: int, send: Callable[..., Future[Any]]) -> None:
        self.node = node
        self.index = node.index
        self.stream = stream
        self._send = send
        self.spaces: list[Space] = []
        self.open: Space | None = None
        self.batches: deque[SegmentBatch] = deque()
        self.history = History()
        self.sent = self.bytes = 0
        #: the next batch, and its number of commands
        self._outbox: list[Segment] = []
        self._origins: list[SegmentOrigins] = []
        self._size = 0
        #: number of commands sent and not acknowledged
        self._unacknowledged = 0
        self._batch_threshold = FIRST_BATCH_COMMANDS
        self.transfers = TransferBudget(self)
        self.flusher = FlushThread(self)

    @property
    def lost(self) -> ShoalError | None:
        """The error if the node is lost."""
        return self.node.lost

    def add_segment(self, segment: Segment, origins: SegmentOrigins, size: int) -> None:
        """Add a segment of `size` commands to the next batch."""
        if self.node.lost is None:
            self._outbox.append(segment)
            self._origins.append(origins)
            self._size += size
            self.bytes += len(segment.numbers) + len(segment.scalars) + sum(map(length, segment.payloads))
            self.flusher.wake()

    @property
    def waiting(self) -> int:
        """Number of commands that are not sent."""
        return self._size if self.open is None else self._size + self.open.size

    @property
    def pending(self) -> int:
        """Number of commands that the node has not acknowledged."""
        return self._unacknowledged + self.waiting

    @property
    def acknowledged(self) -> int:
        """Number of acknowledged batches."""
        return self.sent - len(self.batches)

    @property
    def idle(self) -> bool:
        """Whether the node has acknowledged everything that was issued."""
        return not self.batches and not self.waiting

    def unacknowledged(self) -> list[SegmentOrigins]:
        """Return the segments that the node has not acknowledged, newest first."""
        segments = [each for batch in self.batches for each in batch.origins] + self._origins
        if self.open is not None:
            segments.append(self.open.next_segment_origins())
        return segments[::-1]

    def progress(self) -> str:
        """Describe the first operation that the node has not acknowledged; thread-safe."""
        segments = [each for batch in list(self.batches) if not batch.is_done for each in batch.origins]
        return describe_progress(segments, self.history, self.stream)

    def poll(self) -> None:
        """Send commands if there are enough for a batch; wait if too many are pending."""
        self.reap()
        while self.batches and self.node.pending >= MAX_PENDING_COMMANDS:
            with contextlib.suppress(ShoalError):  # the next use raises it; this command is in the log
                self._wait_batch(self.batches[0])
            self.reap()
        if self.waiting >= self._batch_threshold and len(self.batches) < MAX_UNACKNOWLEDGED_BATCHES:
            self._batch_threshold = min(2 * self._batch_threshold, MAX_BATCH_COMMANDS)
            self.flush()

    def flush(self) -> SegmentBatch | None:
        """Send the log; return the last unacknowledged batch, if any."""
        call_without_interrupt(self._flush)
        return self.batches[-1] if self.batches else None

    def _flush(self) -> None:
        if self.open is not None:
            self.open.cut()
        for space in self.spaces:
            if space.freed:
                space.cut()
        if self._size and self.node.lost is None:
            trace = self.node.trace
            begun = 0 if trace is None else time.monotonic_ns()
            # As plain tuples, which the encoder packs without pickle.
            segments = [tuple(segment) for segment in self._outbox]
            batch = SegmentBatch(self.sent, self._send(segments), self._origins, self._size)
            self.batches.append(batch)
            self.sent += 1
            if trace is not None:
                trace.sent(self.stream, batch, begun)
            self._unacknowledged += self._size
            self._outbox, self._origins, self._size = [], [], 0
            batch.bytes = self.transfers.sent()

    def flush_request(self) -> SegmentBatch:
        """Send a log with commands that return values; return its batch."""
        batch = self.flush()
        if batch is None:
            raise fresh_copy(self.node.lost or ShoalError(f"node {self.index}: nothing was sent"))
        batch.origin = current_origin()
        return batch

    def reap(self) -> None:
        """Handle the replies received so far."""
        while self.batches and self.batches[0].future.done():
            error = self.batches[0].future.exception()
            if error is not None:
                self.node.lose(error)  # before the batch is removed: its error mentions the batch
            batch = self.batches.popleft()
            self._unacknowledged -= batch.size
            self.transfers.uploads -= batch.bytes
            self.history.add(batch.origins)
            if self.node.trace is not None:
                self.node.trace.acknowledged(batch)
            if error is None:
                batch.values, failures = batch.future.value()
                for failure in failures:
                    self.node.failures.add(OperationFailure(*failure), batch)

    # -- waits; the caller need not hold the lock ------------------------------------------------

    def values_of(self, batch: SegmentBatch) -> list[Any]:
        """Wait for the values of a batch.

        Raises `NodeLost`, or `RemoteOpError` if one is poisoned or an operation without results failed.
        """
        self.wait_batch(batch)
        failures = self.node.failures
        failure = failures.first_without_results()
        if failure is not None:
            raise failures.take(failure)
        return [self.node.checked_value(*value) for value in batch.values]

    def wait_batch(self, batch: SegmentBatch) -> None:
        """Wait for a batch and all before it; raise `NodeLost` if the node is lost."""
        self._wait_batch(batch)
        with self.node.lock:
            self._batch_threshold = FIRST_BATCH_COMMANDS  # the node is idle
            self.reap()
            self.node.raise_if_lost()

    @interruptible
    def _wait_batch(self, batch: SegmentBatch) -> None:
        trace = self.node.trace
        with contextlib.nullcontext() if trace is None else trace.waiting():
            with self.node.lock:  # the node may wait for commands of other nodes that are not sent yet
                for node in self.node.nodes:
                    if node.streams[0].waiting and node.lost is None:
                        node.streams[0].flush()
            for each in list(self.batches):
                try:
                    each.future.wait()
                except (RpcError, GroupError) as error:
                    with self.node.lock:
                        self.node.lose(error)
                        self.reap()  # otherwise the error would keep the frames of waiting callers alive
                    raise fresh_copy(self.node.lost or error) from error
                if each is batch:
                    return


@dataclass(eq=False, repr=False)
class NodeConnection:
    """The master's connection to one node.

    Args:
        run: sends a batch to the default stream: ``run(session, stream, segments)``.

    Attributes:
        index: index of the node.
        lock: the master's lock.
        peer, session: the node's worker, and the session that it has with this master.
        nodes: the connections to all nodes, including this one.
        epoch: number of earlier workers with this index.
        accelerators: number of GPUs of the node.
        within: the device where the node creates tensors; -1: its CPU.
        ordering: the order of the streams, for spaces created later; None: there is only the default stream.
        streams: the connections of its streams; the first is that of the default stream.
        failures: failures of all streams of the node.
        lost: the error if the node is lost, otherwise None.
        predecessor_error: the error of the lost worker that had the index before, if any.
        trace: notified of batches and waits while a trace is running.
    """

    index: int
    lock: threading.RLock
    peer: Peer
    session: str
    run: InitVar[Callable[..., Future[Any]]]
    nodes: list[NodeConnection]
    epoch: int = 0
    accelerators: int = 0
    within: int = -1
    ordering: StreamOrder | None = None
    streams: list[StreamConnection] = field(default_factory=list, init=False)
    failures: Failures = field(init=False)
    lost: ShoalError | None = field(default=None, init=False)
    predecessor_error: ShoalError | None = field(default=None, init=False)
    trace: NodeTrace | None = field(default=None, init=False)

    def __post_init__(self, run: Callable[..., Future[Any]]) -> None:
        self.failures = Failures(self.index)
        self.add_stream(0, run)

    def call(self, fn: Callable[..., Any], *args: Any) -> Future[Any]:
        """Call ``fn(session, *args)`` on the node, outside the log."""
        return self.peer.call(fn, self.session, *args)

    def ask(self, fn: Callable[..., Any], *args: Any) -> Any:
        """Like :meth:`call`, but wait for the result, at most ``REPLY_TIMEOUT_S``."""
        return self.peer.options(timeout=REPLY_TIMEOUT_S).call(fn, self.session, *args).wait()

    def open_stream(self, number: int) -> Callable[..., Future[Any]]:
        """Open a further stream on the node; return what sends its batches. Raises `NodeLost`."""
        try:
            mailbox = self.call(sessions.open_stream, number, self.index).wait()
            return self.peer.bound_call(mailbox, sessions.run)
        except (RpcError, GroupError) as error:
            raise self.mark_lost(error) from error

    def add_stream(self, number: int, run: Callable[..., Future[Any]]) -> StreamConnection:
        """Add the connection of a stream that was opened."""
        self.streams.append(StreamConnection(self, number, partial(run, self.session, number)))
        return self.streams[-1]

    @property
    def pending(self) -> int:
        """Number of commands that the node has not acknowledged."""
        return sum(stream.pending for stream in self.streams)

    def reap(self) -> None:
        """Handle the replies received so far; the caller holds the lock."""
        for stream in self.streams:
            stream.reap()

    def synchronize(self) -> None:
        """Wait for everything that was issued; raise a failure that was not raised before."""
        with self.lock:
            batches = [(stream, stream.flush()) for stream in self.streams]
        for stream, batch in batches:
            if batch is not None:
                stream.wait_batch(batch)
        with self.lock:
            self.raise_if_lost()
        self.raise_unseen()

    def raise_unseen(self) -> None:
        """Raise the oldest failure of the node that was not raised before, if any."""
        with self.lock:
            self.reap()
            unseen = list(self.failures.unseen)
            if unseen:
                self.failures.mark_all_seen()
                raise self.failures.take(unseen[0], len(unseen) - 1)

    def unseen(self) -> list[str]:
        """Return the texts of the failures that were not raised, and mark them as seen."""
        return [str(self.failures.take(each)) for each in list(self.failures.unseen)]

    def stats(self) -> dict[str, int]:
        """Return counters over all spaces of the node; the caller holds the lock."""
        self.reap()
        logs = [log for stream in self.streams for log in stream.spaces]
        spaces = self.streams[0].spaces
        issued = sum(log.issued for log in logs)
        misses = sum(log.new_calls.total() for log in logs)
        return {
            "issued": issued,
            "hits": max(0, issued - misses),
            "misses": misses,
            "asked": sum(log.node_determined for log in logs),
            "pending": self.pending,
            "batches": sum(stream.sent for stream in self.streams),
            "bytes": sum(stream.bytes for stream in self.streams),
            "copies": self.streams[0].transfers.copies,
            "calls": sum(len(log.calls) for log in logs),
            "tensors": sum(space.tensors for space in spaces),
            "spaces": len(spaces),
        }

    # -- failures --------------------------------------------------------------------------------

    def checked_value(self, kind: str, value: Any) -> Any:
        """Return a value of a reply; raise the failure that poisons it, if any."""
        if kind != "poison":
            return value
        failure = OperationFailure(*value)
        with self.lock:
            for stream in self.streams:
                if stream.stream == failure.stream:  # its batch may contain operations that are not done yet
                    batch = next((each for each in stream.batches if each.number == failure.batch), None)
                    if batch is not None:
                        self.failures.add(failure, batch)
        raise self._take_failure(failure.poison)

    def _take_failure(self, poison: int) -> ShoalError:
        cause = self.failures.causes.get(poison)
        if cause is None:
            return self.failures.take(poison)
        return self.nodes[cause[0]].failure_reported_by(self.index, cause[1])

    def failure_reported_by(self, other: int, poison: int) -> ShoalError:
        """Return a failure of this node that node `other` reported; waits until the master has it too."""
        while poison != LOST and poison not in self.failures.errors:
            with self.lock:
                self.reap()
                stream = next((each for each in self.streams if each.batches), None)
                batch = None if stream is None else stream.batches[0]
            if self.lost is not None or stream is None or batch is None:
                break
            stream._wait_batch(batch)
        if poison in self.failures.errors or (self.lost is None and poison != LOST):
            return self._take_failure(poison)
        lost = f"node {self.index} was lost to node {other}: their connection broke"
        return fresh_copy(
            self.lost or self.predecessor_error or NodeLost(lost, node_name(self.index), (self.index,))
        )

    def raise_if_lost(self) -> None:
        """Raise `NodeLost` if the node is lost."""
        if self.lost is not None:
            raise fresh_copy(self.lost)

    def lose(self, why: BaseException | str) -> None:
        """Mark the node as lost: it and its places raise `NodeLost` from now on."""
        if self.lost is None:
            progress = "".join(f"\n{text}" for stream in self.streams if (text := stream.progress()))
            text = f"node {self.index} was lost: {why}{progress}"
            self._end(NodeLost(text, node_name(self.index), (self.index,)))

    def mark_lost(self, error: ShoalError) -> ShoalError:
        """Mark the node as lost after a failed call; return the error to raise."""
        with self.lock:
            self.lose(error)
            return fresh_copy(self.lost or error)

    def _end(self, why: ShoalError) -> None:
        self.lost = self.lost or why
        for stream in self.streams:
            for space in list(stream.spaces):
                space.lose(self.lost)

    # -- the end ---------------------------------------------------------------------------------

    def finish(self, seconds: float) -> None:
        """Send the log and wait up to `seconds` for everything that was issued."""
        deadline = time.monotonic() + seconds
        with self.lock:
            batches = [stream.flush() for stream in self.streams]
        for batch in batches:
            if batch is not None:
                with contextlib.suppress(ShoalError):  # reap() handles it
                    batch.future.wait(max(0.0, deadline - time.monotonic()))
        with self.lock:
            self.reap()

    def close(self, why: ShoalError) -> None:
        """End the threads; later uses of the node's tensors raise `why`."""
        with self.lock:
            self._end(why)
        for stream in self.streams:
            stream.flusher.close()

    def detach_in_fork(self, why: ShoalError) -> None:
        """Make all uses of the node raise `why`, without waiting; for a forked child."""
        self._end(why)
        for stream in self.streams:
            stream.batches.clear()


class TransferBudget:
    """The bytes of tensors on their way to a stream of a node; too many make the program wait.

    Attributes:
        uploads: bytes of uploaded tensors that the node has not acknowledged.
        unsent: how many of these are not sent.
        expected: bytes of copies from other nodes since the last wait for them.
        copies: number of copies from other nodes.
    """

    __slots__ = ("_stream", "copies", "expected", "unsent", "uploads")

    def __init__(self, stream: StreamConnection) -> None:
        self._stream = stream
        self.uploads = self.unsent = self.expected = self.copies = 0

    def reserve_upload(self, bytes: int) -> None:
        """Count bytes of the next upload; wait while too many are unacknowledged."""
        stream = self._stream
        while self.uploads and self.uploads + bytes > MAX_UPLOAD_BYTES and stream.lost is None:
            if not stream.batches:
                stream.flush()
            if stream.batches:
                stream._wait_batch(stream.batches[0])
            stream.reap()
        self.uploads += bytes
        self.unsent += bytes

    def reserve_copy(self, bytes: int) -> None:
        """Count bytes of a copy from another node; wait for this node if there are too many."""
        self.expected += bytes
        self.copies += 1
        if self.expected > MAX_COPY_BYTES:
            batch = self._stream.flush()
            if batch is not None:
                self._stream._wait_batch(batch)
                self._stream.reap()
            self.expected = bytes

    def sent(self) -> int:
        """Return the bytes of the uploads that are in the batch just sent."""
        bytes, self.unsent = self.unsent, 0
        return bytes


class FlushThread:
    """The thread that sends commands which stay in the log of a stream, after a delay.

    It polls every millisecond. Waking it for each command, with the interpreter lock that it then needs,
    would cost the program more.
    """

    def __init__(self, stream: StreamConnection) -> None:
        self._stream = stream
        self._awake = self._closed = False
        self._wake = threading.Event()
        name = f"shoal-node{stream.index}-log{stream.stream}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Wake the thread, so that commands are sent even if no more follow; the caller holds the lock."""
        if not self._awake:
            self._awake = True
            self._wake.set()

    def close(self, wait: bool = True) -> None:
        """End the thread."""
        self._closed = True
        self._wake.set()
        if wait:
            self._thread.join()

    def _run(self) -> None:
        stream = self._stream
        while not self._closed:
            self._wake.wait()
            self._wake.clear()
            quiet, sent, pause = 0, stream.sent, FLUSH_DELAY_S
            full: SegmentBatch | None = None
            while not self._closed:
                if full is None:
                    time.sleep(pause)
                else:
                    with contextlib.suppress(Exception):  # the next use of the node raises it
                        full.future.wait(_MAX_WAIT_S)
                with stream.node.lock:
                    stream.reap()
                    full, busy = None, sent != stream.sent
                    pause = BUSY_FLUSH_DELAY_S if busy else FLUSH_DELAY_S
                    quiet = 0 if busy or stream.waiting else quiet + 1
                    if len(stream.batches) >= MAX_UNACKNOWLEDGED_BATCHES:
                        full = stream.batches[0]
                    elif not busy:  # otherwise the program sends batches itself
                        stream.flush()
                    sent = stream.sent
                    if stream.lost is not None or quiet >= _IDLE_ROUNDS:
                        self._awake = False
                        if stream.open is not None:
                            stream.open.close_log()  # reopening it wakes the thread
                        break
