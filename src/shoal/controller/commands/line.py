"""The master's connection to one node: batches, their acknowledgement, failures, and the loss of the node.

:mod:`.space` describes the data sent over it.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from ...errors import GroupError, NodeLost, RpcError, ShoalError
from ...future import Future
from ..protocol.commands import LOST, OperationFailure, Segment
from ..protocol.naming import node_name
from .batch import SegmentBatch, length
from .failures import Failures
from .history import History, Issued
from .interrupts import undisturbed, waiting
from .issuing import issuing_line
from .losses import anew, unfinished
from .parties import OnLine, Watching

#: commands in the log that trigger the first batch after a wait; each later batch needs twice as many
FIRST = 32
#: the maximum of that number; a batch has more commands if the node is far behind
BATCH = 256
#: number of unacknowledged batches at which commands are held back in the log
AHEAD = 4
#: maximum number of pending commands of a node before the program waits for it
LIMIT = 65_536
#: seconds that commands stay in the log when no more follow, and while batches are sent all the time
DELAY, BUSY = 0.001, 0.002
#: rounds without commands after which the flush thread sleeps until it is woken
_QUIET = 64
#: maximum seconds per wait of the flush thread for a busy node: it must end even if the node never replies
_SLICE = 0.1
#: maximum unacknowledged bytes of uploaded tensors, unless it is a single one, before the program waits
UPLOADS = 64 << 20
#: maximum unacknowledged bytes of copies from other nodes before the program waits
COPIES = 256 << 20

#: sends the segments of a batch; the future is the reply
Send = Callable[[list[Segment]], Future[Any]]


class NodeConnection:
    """The master's connection to one stream of a node.

    The connection of the default stream also has `call`, `opens` and `watch`.

    Attributes:
        index: index of the node.
        lines: default-stream connections of all nodes, including this one.
        epoch: number of earlier workers with this index.
        lock: the master's lock.
        spaces: the spaces with tensors on the node.
        open: the space that commands are appended to.
        lost: the error if the node is lost, otherwise None.
        before: the error of the lost worker that had the index before, if any.
        batches: batches sent and not yet taken off by :meth:`reap`.
        accelerators: number of GPUs of the node.
        within: the device where the node creates tensors; -1: its CPU.
        failures: failures of all streams of the node.
        history: the last acknowledged operations.
        sent: number of batches sent.
        stream: number of the stream.
        main: the connection of the node's default stream.
        further: the connections of the node's other streams.
        call: calls a function of the session on the node, outside the log.
        opens: opens a further stream; returns the function that sends its batches.
        ordering: the order of the streams, for spaces created later.
        watch: notified of batches and waits while a trace is running.
    """

    __slots__ = (
        "_ahead", "_armed", "_bytes", "_closed", "_copies", "_expected", "_origins", "_outbox", "_send",
        "_size", "_thread", "_unsent", "_uploads", "_wake", "_worth",
        "accelerators", "batches", "before", "call", "epoch", "failures", "further", "history", "index",
        "lines", "lock", "lost", "main", "open", "opens", "ordering", "sent", "spaces", "stream", "watch",
        "within",
    )  # fmt: skip

    def __init__(
        self,
        index: int,
        lock: threading.RLock,
        send: Send,
        lines: list[NodeConnection],
        epoch: int = 0,
        accelerators: int = 0,
        within: int = -1,
        stream: int = 0,
        main: NodeConnection | None = None,
    ) -> None:
        self.index = index
        self.lines = lines
        self.epoch = epoch
        self.lock = lock
        self.spaces: list[OnLine] = []
        self.open: OnLine | None = None
        self.lost: ShoalError | None = None
        self.before: ShoalError | None = None
        self.batches: deque[SegmentBatch] = deque()
        self.accelerators = accelerators
        self.within = within
        self._send = send
        self._outbox: list[Segment] = []
        self._origins: list[Issued] = []
        self.history = History()
        self.watch: Watching | None = None
        self._size = self._ahead = self._bytes = self._copies = 0
        self._worth = FIRST
        self._expected = 0
        #: bytes of uploaded tensors that the node has not acknowledged, and how many of these are not sent
        self._uploads = self._unsent = 0
        self.sent = 0
        self.stream = stream
        self.main = self if main is None else main
        self.call: Callable[..., Future[Any]]
        self.opens: Callable[[int], Send]
        self.ordering: Any = None
        self.further: list[NodeConnection] = []
        if main is None:
            self.failures = Failures(index)
        else:
            self.failures = main.failures
            self.lost = main.lost
            main.further.append(self)
        self._armed = False
        self._wake = threading.Event()
        self._closed = False
        self._thread = threading.Thread(
            target=self._flush_late, name=f"shoal-node{index}-log{stream}", daemon=True
        )
        self._thread.start()

    # -- batches; the caller holds the lock -----------------------------------------------------

    def take(self, segment: Segment, origins: Issued, size: int) -> None:
        """Add a segment of `size` commands to the next batch."""
        if self.lost is None:
            self._outbox.append(segment)
            self._origins.append(origins)
            self._size += size
            _, _, numbers, scalars, _, payloads = segment
            self._bytes += len(numbers) + len(scalars) + sum(map(length, payloads))
            self.arm()

    def arm(self) -> None:
        """Wake the flush thread, so that commands are sent even if no more follow."""
        if not self._armed:
            self._armed = True
            self._wake.set()

    @property
    def pending(self) -> int:
        """Number of commands that the node has not acknowledged."""
        return sum(line._ahead + line._waiting for line in (self, *self.further))

    @property
    def acknowledged(self) -> int:
        """Number of acknowledged batches."""
        return self.sent - len(self.batches)

    @property
    def _waiting(self) -> int:
        return self._size if self.open is None else self._size + self.open.size

    @property
    def idle(self) -> bool:
        """Whether the node has acknowledged everything that was issued."""
        return not self.batches and not self._waiting

    def unacknowledged(self) -> list[Issued]:
        """Return the segments that the node has not acknowledged, newest first."""
        waiting = [each for batch in self.batches for each in batch.origins] + self._origins
        if self.open is not None:
            waiting.append(self.open.uncut())
        return waiting[::-1]

    def look(self) -> None:
        """Send commands if there are enough for a batch; wait if too many are pending."""
        self.reap()
        while self.batches and self.main.pending >= LIMIT:
            with contextlib.suppress(ShoalError):  # the next use raises it; this command is in the log
                self._settle(self.batches[0])
            self.reap()
        if self._waiting >= self._worth and len(self.batches) < AHEAD:
            self._worth = min(2 * self._worth, BATCH)
            self.flush()

    def carry(self, bytes: int) -> None:
        """Count bytes of the next upload; wait while too many are unacknowledged."""
        while self._uploads and self._uploads + bytes > UPLOADS and self.lost is None:
            if not self.batches:
                self.flush()
            if self.batches:
                self._settle(self.batches[0])
            self.reap()
        self._uploads += bytes
        self._unsent += bytes

    def expect(self, bytes: int) -> None:
        """Count bytes of a copy from another node; wait for this node if there are too many."""
        self._expected += bytes
        self._copies += 1
        if self._expected > COPIES:
            batch = self.flush()
            if batch is not None:
                self._settle(batch)
                self.reap()
            self._expected = bytes

    def flush(self) -> SegmentBatch | None:
        """Send the log; return the last unacknowledged batch, if any."""
        undisturbed(self._flush)
        return self.batches[-1] if self.batches else None

    def _flush(self) -> None:
        if self.open is not None:
            self.open.cut()
        for space in self.spaces:
            if space.freed:
                space.cut()
        if self._size and self.lost is None:
            begun = 0 if self.main.watch is None else time.monotonic_ns()
            future = self._send(self._outbox)
            self.batches.append(SegmentBatch(self.sent, future, self._origins, self._size))
            self.sent += 1
            if self.main.watch is not None:
                self.main.watch.sent(self.stream, self.batches[-1], begun)
            self._ahead += self._size
            self._outbox, self._origins, self._size = [], [], 0
            self.batches[-1].bytes, self._unsent = self._unsent, 0

    def flush_asked(self) -> SegmentBatch:
        """Send a log with commands that return values; return its batch."""
        batch = self.flush()
        if batch is None:
            raise anew(self.lost or ShoalError(f"node {self.index}: nothing was sent"))
        batch.origin = issuing_line()
        return batch

    def reap(self) -> None:
        """Handle the replies received so far."""
        while self.batches and self.batches[0].future.done():
            error = self.batches[0].future.exception()
            if error is not None:
                self.lose(error)  # before the batch is removed: its error mentions the batch
            batch = self.batches.popleft()
            self._ahead -= batch.size
            self._uploads -= batch.bytes
            self.history.add(batch.origins)
            if self.main.watch is not None:
                self.main.watch.acknowledged(batch)
            if error is not None:
                continue
            batch.values, failures = batch.future.value()
            for told in failures:
                self.failures.add(OperationFailure(*told), batch)

    # -- sync points -----------------------------------------------------------------------------

    def answers(self, batch: SegmentBatch) -> list[Any]:
        """Wait for the values of a batch.

        Raises `NodeLost`, or `RemoteOpError` if one is poisoned or an operation without results failed.
        """
        self.settle(batch)
        alone = self.failures.first_alone()
        if alone is not None:
            raise self.failures.raised(alone)
        return [self._value(*value) for value in batch.values]

    def settle(self, batch: SegmentBatch) -> None:
        """Wait for a batch and all before it; raise `NodeLost` if the node is lost."""
        self._settle(batch)
        with self.lock:
            self._worth = FIRST  # the node is idle
            self.reap()
            if self.lost is not None:
                raise anew(self.lost)

    def _settle(self, batch: SegmentBatch) -> None:
        watch = self.main.watch
        if watch is None:
            self._await(batch)
        else:
            with watch.waiting():
                self._await(batch)

    @waiting
    def _await(self, batch: SegmentBatch) -> None:
        with self.lock:  # the node may wait for commands of other nodes that are not sent yet
            for line in self.lines:
                if line._waiting and line.lost is None:
                    line.flush()
        for each in list(self.batches):
            try:
                each.future.wait()
            except (RpcError, GroupError) as error:
                with self.lock:
                    self.lose(error)
                    self.reap()  # otherwise the error would keep the frames of waiting callers alive
                raise anew(self.lost or error) from error
            if each is batch:
                return

    def synchronize(self) -> None:
        """Wait for everything that was issued; raise a failure that was not raised before."""
        with self.lock:
            batches = [(line, line.flush()) for line in (self, *self.further)]
        for line, batch in batches:
            if batch is not None:
                line.settle(batch)
        with self.lock:
            if self.lost is not None:
                raise anew(self.lost)
        self.raise_unseen()

    def raise_unseen(self) -> None:
        """Raise the oldest failure of the node that was not raised before, if any."""
        with self.lock:
            self.reap()
            unseen = self.failures.unseen()
            if unseen:
                self.failures.see_all()
                raise self.failures.raised(unseen[0], len(unseen) - 1)

    def stats(self) -> dict[str, int]:
        """Return counters over all spaces of the node; the caller holds the lock."""
        lines = (self, *self.further)
        for line in lines:
            line.reap()
        spaces = [space for line in lines for space in line.spaces]
        issued = sum(space.issued for space in spaces)
        misses = sum(space.missed.total() for space in spaces)
        return {
            "issued": issued,
            "hits": max(0, issued - misses),
            "misses": misses,
            "asked": sum(space.awaited for space in spaces),
            "pending": self.pending,
            "batches": sum(line.sent for line in lines),
            "bytes": sum(line._bytes for line in lines),
            "copies": self._copies,
            "calls": sum(len(space.calls) for space in spaces),
            "tensors": sum(space.tensors for space in self.spaces),
            "spaces": len(self.spaces),
        }

    # -- failures --------------------------------------------------------------------------------

    def unseen(self) -> list[str]:
        """Return the texts of the failures that were not raised, and mark them as seen."""
        return [str(self.failures.raised(each)) for each in self.failures.unseen()]

    def _value(self, kind: str, value: Any) -> Any:
        if kind != "poison":
            return value
        failure = OperationFailure(*value)
        with self.lock:
            for line in (self.main, *self.main.further):
                if line.stream == failure.stream:  # its batch may contain operations that are not done yet
                    batch = next((each for each in line.batches if each.number == failure.batch), None)
                    if batch is not None:
                        self.failures.add(failure, batch)
        raise self._raised(failure.poison)

    def _raised(self, poison: int) -> ShoalError:
        of = self.failures.elsewhere(poison)
        return self.failures.raised(poison) if of is None else self.lines[of[0]].known(of[1], self.index)

    def known(self, poison: int, by: int) -> ShoalError:
        """Return a failure of this node that node `by` reported; waits until the master has it too."""
        while poison != LOST and self.failures.error(poison) is None:
            with self.lock:
                lines = (self, *self.further)
                for line in lines:
                    line.reap()
                line = next((each for each in lines if each.batches), self)
                batch = line.batches[0] if line.batches else None
            if self.lost is not None or batch is None:
                break
            line._settle(batch)
        if self.failures.error(poison) is not None or (self.lost is None and poison != LOST):
            return self._raised(poison)
        lost = f"node {self.index} was lost to node {by}: their connection broke"
        return anew(self.lost or self.before or NodeLost(lost, node_name(self.index), (self.index,)))

    def lose(self, why: BaseException | str) -> None:
        """Mark the node as lost: it and its places raise `NodeLost` from now on."""
        if self.main is not self:
            self.main.lose(why)
        elif self.lost is None and not self._closed:
            text = f"node {self.index} was lost: {why}{self._unfinished()}"
            self._end(NodeLost(text, node_name(self.index), (self.index,)))

    def _unfinished(self) -> str:
        told = (unfinished(line.batches, line.history, line.stream) for line in (self, *self.further))
        return "".join(f"\n{each}" for each in told if each)

    def _end(self, why: ShoalError) -> None:
        for line in self.further:
            line._end(why)
        self.lost = self.lost or why
        for space in list(self.spaces):
            space.lose(self.lost)

    # -- the end ---------------------------------------------------------------------------------

    def finish(self, seconds: float) -> None:
        """Send the log and wait up to `seconds` for everything that was issued."""
        deadline = time.monotonic() + seconds
        with self.lock:
            batches = [line.flush() for line in (self, *self.further)]
        for batch in batches:
            if batch is not None:
                with contextlib.suppress(ShoalError):  # reap() handles it
                    batch.future.wait(max(0.0, deadline - time.monotonic()))
        with self.lock:
            for line in (self, *self.further):
                line.reap()

    def close(self, why: ShoalError) -> None:
        """End the thread; later uses of the node's tensors raise `why`."""
        for line in self.further:
            line.close(why)
        with self.lock:
            self._end(why)
            self._closed = True
        self._wake.set()
        self._thread.join()

    def end(self) -> None:
        """End the thread of an unused stream without waiting for it."""
        self._closed = True
        self._wake.set()

    def _flush_late(self) -> None:
        """Send commands that stay in the log, after a delay.

        The thread polls every millisecond. Waking it for each command, with the interpreter lock that it then
        needs, would cost the program more.
        """
        while not self._closed:
            self._wake.wait()
            self._wake.clear()
            quiet, sent, pause = 0, self.sent, DELAY
            full: SegmentBatch | None = None
            while not self._closed:
                if full is None:
                    time.sleep(pause)
                else:
                    with contextlib.suppress(Exception):  # the next use of the node raises it
                        full.future.wait(_SLICE)
                with self.lock:
                    self.reap()
                    full, busy = None, sent != self.sent
                    pause = BUSY if busy else DELAY
                    quiet = 0 if busy or self._waiting else quiet + 1
                    if len(self.batches) >= AHEAD:
                        full = self.batches[0]
                    elif not busy:  # otherwise the program sends batches itself
                        self.flush()
                    sent = self.sent
                    if self.lost is not None or quiet >= _QUIET:
                        self._armed = False
                        if self.open is not None:
                            self.open.leave()  # reopening it arms the thread
                        break
