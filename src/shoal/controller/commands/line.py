"""The master's line to one node: batches on their way, their acknowledgement, failures, and the node's loss.

:mod:`.space` says what travels on it.
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

#: commands of the first batch after a wait; each further one takes twice as many
FIRST = 32
#: commands of a batch at most, unless the node is far behind
BATCH = 256
#: batches that a busy node is sent ahead
AHEAD = 4
#: commands that may be ahead of a node before the program waits for it
LIMIT = 65_536
#: seconds that a command may stay in the log when none comes after it, and while batches go out all the time
DELAY, BUSY = 0.001, 0.002
#: rounds without a command after which the thread that sends what stays in the log goes to sleep
_QUIET = 64
#: seconds at a time that the thread waits for a busy node: it has to end also if the node never replies
_SLICE = 0.1
#: bytes of the master's tensors that may be ahead of a node before the program waits for it, but for one
UPLOADS = 64 << 20
#: bytes of copies from other nodes that may be ahead of a node before the program waits for it
COPIES = 256 << 20

#: sends a batch: segments
Send = Callable[[list[Segment]], Future[Any]]


class NodeConnection:
    """One node, as the master reaches it; each further stream of a node has a line of its own beside it.

    Attributes:
        index: of the node.
        lines: of all nodes, this one among them.
        epoch: how many nodes had the index before.
        lock: the master's.
        spaces: that the node holds tensors of.
        open: the space that commands are appended to.
        lost: why the node cannot be used any more; None: it can.
        before: why the one cannot that had the index before, if any.
        batches: that were sent, and are not taken in.
        accelerators: how many GPUs the node has.
        within: on which of its devices tensors are made; -1: its processor.
        failures: of the node, on all of its streams.
        history: the last operations that the node has acknowledged.
        sent: how many batches were sent.
        stream: that it is for.
        main: the line of the default stream.
        further: the lines of the other ones.
        call: calls a function of a session at the node; the line of a default stream has it.
        opens: gives what sends the batches of a further stream; the line of a default stream has it.
        ordering: of the streams, for spaces that are made later.
        watch: hears of batches and waits, while there is a trace; the line of a default stream has it.
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
        #: bytes of the master's tensors: that the node has not acknowledged, and of these, that are not sent
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
        """A segment, of ``size`` commands, for the next batch."""
        if self.lost is None:
            self._outbox.append(segment)
            self._origins.append(origins)
            self._size += size
            _, _, numbers, scalars, _, payloads = segment
            self._bytes += len(numbers) + len(scalars) + sum(map(length, payloads))
            self.arm()

    def arm(self) -> None:
        """Have commands that are issued from now on sent, also if none comes after them."""
        if not self._armed:
            self._armed = True
            self._wake.set()

    @property
    def pending(self) -> int:
        """Commands that the node has not executed, as far as it is known here."""
        return sum(line._ahead + line._waiting for line in (self, *self.further))

    @property
    def acknowledged(self) -> int:
        """How many batches are done."""
        return self.sent - len(self.batches)

    @property
    def _waiting(self) -> int:
        return self._size if self.open is None else self._size + self.open.size

    @property
    def idle(self) -> bool:
        """Whether the node has acknowledged all that was issued."""
        return not self.batches and not self._waiting

    def unacknowledged(self) -> list[Issued]:
        """The segments that the node has not acknowledged, the newest first."""
        waiting = [each for batch in self.batches for each in batch.origins] + self._origins
        if self.open is not None:
            waiting.append(self.open.uncut())
        return waiting[::-1]

    def look(self) -> None:
        """Send commands if they are worth a batch; wait if there are too many."""
        self.reap()
        while self.batches and self.main.pending >= LIMIT:
            with contextlib.suppress(ShoalError):  # the next use hears of it: this command is in the log
                self._settle(self.batches[0])
            self.reap()
        if self._waiting >= self._worth and len(self.batches) < AHEAD:
            self._worth = min(2 * self._worth, BATCH)
            self.flush()

    def carry(self, bytes: int) -> None:
        """Count bytes that go to the node next; wait for it if it has too many to take already."""
        while self._uploads and self._uploads + bytes > UPLOADS and self.lost is None:
            if not self.batches:
                self.flush()
            if self.batches:
                self._settle(self.batches[0])
            self.reap()
        self._uploads += bytes
        self._unsent += bytes

    def expect(self, bytes: int) -> None:
        """Count bytes that will come from other nodes; wait for this node if these are too many."""
        self._expected += bytes
        self._copies += 1
        if self._expected > COPIES:
            batch = self.flush()
            if batch is not None:
                self._settle(batch)
                self.reap()
            self._expected = bytes

    def flush(self) -> SegmentBatch | None:
        """Send what is in the log; the last batch that was sent and not replied."""
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
        """Send what is in the log, with commands that are replied to."""
        batch = self.flush()
        if batch is None:
            raise anew(self.lost or ShoalError(f"node {self.index}: nothing was sent"))
        batch.origin = issuing_line()
        return batch

    def reap(self) -> None:
        """Take in the replies that have come."""
        while self.batches and self.batches[0].future.done():
            error = self.batches[0].future.exception()
            if error is not None:
                self.lose(error)  # which tells of this batch
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

        Raises:
            RemoteOpError: one of them could not be computed, or an operation without results failed.
            NodeLost: the node died.
        """
        self.settle(batch)
        alone = self.failures.first_alone()
        if alone is not None:
            raise self.failures.raised(alone)
        return [self._value(*value) for value in batch.values]

    def settle(self, batch: SegmentBatch) -> None:
        """Wait until a batch and all before it are done."""
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
        with self.lock:  # the node may wait for what others have not been sent yet
            for line in self.lines:
                if line._waiting and line.lost is None:
                    line.flush()
        for each in list(self.batches):
            try:
                each.future.wait()
            except (RpcError, GroupError) as error:
                with self.lock:
                    self.lose(error)
                    self.reap()  # or the error would keep the frames of who waited here
                raise anew(self.lost or error) from error
            if each is batch:
                return

    def synchronize(self) -> None:
        """Wait for all that was issued; raise what failed and was not raised yet."""
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
        """Raise what failed on the node and was not raised yet."""
        with self.lock:
            self.reap()
            unseen = self.failures.unseen()
            if unseen:
                self.failures.see_all()
                raise self.failures.raised(unseen[0], len(unseen) - 1)

    def stats(self) -> dict[str, int]:
        """Counts, over all spaces of the node; the caller holds the lock."""
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
        """The failures that were never raised, in words."""
        return [str(self.failures.raised(each)) for each in self.failures.unseen()]

    def _value(self, kind: str, value: Any) -> Any:
        if kind != "poison":
            return value
        failure = OperationFailure(*value)
        with self.lock:
            for line in (self.main, *self.main.further):
                if line.stream == failure.stream:  # whose batch, with other operations, may not be done yet
                    batch = next((each for each in line.batches if each.number == failure.batch), None)
                    if batch is not None:
                        self.failures.add(failure, batch)
        raise self._raised(failure.poison)

    def _raised(self, poison: int) -> ShoalError:
        of = self.failures.elsewhere(poison)
        return self.failures.raised(poison) if of is None else self.lines[of[0]].known(of[1], self.index)

    def known(self, poison: int, by: int) -> ShoalError:
        """The failure of this node of which node ``by`` was told; waits until it is known here too."""
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
        """Let the node, and the places that it is in, raise NodeLost from now on."""
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
        """Give the node some seconds for what was issued."""
        deadline = time.monotonic() + seconds
        with self.lock:
            batches = [line.flush() for line in (self, *self.further)]
        for batch in batches:
            if batch is not None:
                with contextlib.suppress(ShoalError):  # it is told by what is asked afterwards
                    batch.future.wait(max(0.0, deadline - time.monotonic()))
        with self.lock:
            for line in (self, *self.further):
                line.reap()

    def close(self, why: ShoalError) -> None:
        """End the thread; tensors that are used afterwards raise ``why``."""
        for line in self.further:
            line.close(why)
        with self.lock:
            self._end(why)
            self._closed = True
        self._wake.set()
        self._thread.join()

    def end(self) -> None:
        """End the thread, and wait for nothing: the stream is not used any more."""
        self._closed = True
        self._wake.set()

    def _flush_late(self) -> None:
        """Send what stays in the log, after a moment.

        The thread looks every millisecond, and is not woken when something happens: to be woken, and to get
        the interpreter then, costs the program more than a look does.
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
                    with contextlib.suppress(Exception):  # the next use of the node hears of it
                        full.future.wait(_SLICE)
                with self.lock:
                    self.reap()
                    full, busy = None, sent != self.sent
                    pause = BUSY if busy else DELAY
                    quiet = 0 if busy or self._waiting else quiet + 1
                    if len(self.batches) >= AHEAD:
                        full = self.batches[0]
                    elif not busy:  # what the program sends by itself goes without this thread
                        self.flush()
                    sent = self.sent
                    if self.lost is not None or quiet >= _QUIET:
                        self._armed = False
                        if self.open is not None:
                            self.open.leave()  # which arms it again when it opens
                        break
