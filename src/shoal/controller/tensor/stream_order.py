"""Waits between streams, which keep the program's order for commands on the same memory.

Every stream of a space has its own log. Each storage records the log and position of its last write, and the
logs that used it since. A command that reads first waits, in its own log, for the last write on another
stream; a command that writes also waits for the uses. Nodes execute the waits; the master never blocks.

- Waits cannot form a cycle. All commands of all streams and nodes are appended in one order, under the
  master's lock, and a command waits for earlier commands only: those before it in its log; a WAIT for those
  appended before; an EXPECT for batches sent before; a ``receive`` for its ``send``; a collective for what
  precedes it on its members' default streams, which all have collectives in the same order
  (:meth:`StreamOrder.apart`). So the oldest unfinished command waits for nothing.
- The oldest unfinished command reaches its node without further calls of the program: the commands that a
  WAIT or an EXPECT waits for are sent before it is appended, and each connection sends the rest of its log
  when its node has finished the earlier batches (:mod:`shoal.controller.commands.connection`).
- No wait holds a lock that another wait needs: nodes wait in their stream threads, and the master reports
  finished batches from the callbacks of the replies.
- The random generator of a node is treated as a storage that every operation drawing numbers writes to, so
  these operations keep the program's order across streams.
- An id used by one stream is freed in that stream's log and reused by that stream only. An id used by several
  is released in each log: the last release frees the tensor; the id is reused after all have acknowledged.
- With one stream none of this is recorded. When the second stream is created, everything before counts as
  used by the default stream.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from ...errors import ShoalError
from ...future import Future, collect_all
from ..commands.batch import SegmentBatch
from ..commands.connection import NodeConnection, StreamConnection
from ..commands.interrupts import call_without_interrupt
from ..commands.space import Space, StreamLog
from ..commands.storage import Storage
from ..node import sessions
from ..protocol.commands import EVERY_NODE, EXPECT, FREE, NO_NODE, RELEASE, WAIT

if TYPE_CHECKING:
    from .calls import InternedCall
    from .operator_call import OperatorCall

#: maximum number of further streams per space; beyond it streams share logs, as in torch.cuda
MAX_STREAMS = 32


class _Selection(threading.local):
    """The logs that this thread entered, innermost last."""

    def __init__(self) -> None:
        self.logs: list[Space] = []


class StreamOrder:
    """The streams of a master's nodes, created with the second stream; `spaces`: those that exist."""

    def __init__(self, spaces: Iterable[Space]) -> None:
        self._generators: dict[NodeConnection, Storage] = {}
        self._logs: list[StreamLog] = []
        self._fences: dict[NodeConnection, tuple[Space, int]] = {}
        self._seen: dict[tuple[Space, Space], int] = {}
        self._begun: dict[Space, int] = {}
        self._by_home: dict[Space, list[StreamLog]] = {}
        self._returned: deque[StreamLog] = deque()
        self._selected = _Selection()
        self._stream = self._expected = 0
        for space in spaces:
            call_without_interrupt(partial(self.begin, space))

    def begin(self, home: Space) -> None:
        """Start to record the order of a space's commands."""
        if home.lost is None:
            self._mark(home)
        self._begun[home] = home.position
        home.ordering = self
        for connection in home.connections:
            connection.node.ordering = self

    @staticmethod
    def _mark(home: Space) -> None:
        """Append a command without effect: its position follows everything issued to the nodes before."""
        home.append_command(WAIT, NO_NODE, 0, 0, 0, 0)

    # -- streams -----------------------------------------------------------------------------------

    def open(self, home: Space) -> StreamLog:
        """Return the log of an unused or the least used stream, or raise `NodeLost`. Needs the lock."""
        self._take_back()
        home.raise_if_lost()
        there = self._by_home.setdefault(home, [])
        log = min(there, key=lambda log: log.users, default=None)
        if log is None or (log.users and len(there) < MAX_STREAMS):
            log = self._new(home)
            there.append(log)
        log.users += 1
        return log

    def _take_back(self) -> None:
        while self._returned:
            self._returned.popleft().users -= 1

    def _new(self, home: Space) -> StreamLog:
        self._stream += 1
        nodes = [connection.node for connection in home.connections]
        runs = [node.open_stream(self._stream) for node in nodes]
        connections = [node.add_stream(self._stream, run) for node, run in zip(nodes, runs, strict=True)]
        log = StreamLog(home, self._stream, tuple(connections))
        self._logs.append(log)
        return log

    def forget(self) -> None:
        """Drop the state of replaced nodes and closed spaces; the caller holds the lock."""
        self._take_back()
        self._logs = [each for each in self._logs if not each.home.is_forgotten]
        self._by_home = {home: logs for home, logs in self._by_home.items() if home.lost is None}
        self._begun = {home: at for home, at in self._begun.items() if home.lost is None}
        self._fences = {
            node: fence
            for node, fence in self._fences.items()
            if node.lost is None and not fence[0].home.is_forgotten
        }
        self._generators = {node: each for node, each in self._generators.items() if node.lost is None}
        self._seen = {
            (log, other): at
            for (log, other), at in self._seen.items()
            if not (log.home.is_forgotten or other.home.is_forgotten)
        }

    def give_back(self, log: StreamLog) -> None:
        """Release a stream of this log; called in any thread, by the garbage collector."""
        self._returned.append(log)

    def current(self, home: Space) -> Space:
        """The log that receives this thread's commands for a space; `NodeLost` if its node is lost."""
        log = next((log for log in reversed(self._selected.logs) if log.index == home.index), home)
        if log.home is not home:
            log.home.raise_if_lost()
        return log

    def innermost(self) -> Space | None:
        """The log that this thread entered last, or None."""
        return self._selected.logs[-1] if self._selected.logs else None

    def enter(self, log: Space) -> None:
        """Send this thread's commands for a space to one of its logs."""
        self._selected.logs.append(log)

    def leave(self, log: Space) -> None:
        """Undo this thread's last :meth:`enter` of this log; later entries stay."""
        logs = self._selected.logs
        for at in range(len(logs) - 1, -1, -1):
            if logs[at] is log:
                del logs[at]
                return

    # -- commands; the caller holds the lock -------------------------------------------------------

    def issue(self, log: Space, call: InternedCall, operation: OperatorCall) -> list[int]:
        """Append an interned call; return the ids of its results."""
        ids, storages = operation.ids, operation.storages()
        written = [storages[each] for each in call.written]
        if call.random:
            written += self.generators(log)
        made: list[int] = []

        def append() -> None:
            self._order(log, ids, storages, written)
            made.extend(log.append(call.number, ids, operation.scalars, call.count))
            self._used(log, storages, written)

        call_without_interrupt(append)
        log.appended(made)
        return made

    @contextmanager
    def using(
        self, log: Space, ids: Sequence[int], read: Sequence[Storage], written: Sequence[Storage] = ()
    ) -> Iterator[None]:
        """Context in which other commands are appended that read and write these storages."""
        call_without_interrupt(partial(self._order, log, ids, read, written))
        try:
            yield
        finally:
            call_without_interrupt(partial(self._used, log, read, written))

    def made(self, log: Space) -> Storage:
        """The storage of a tensor that the last command created."""
        storage = Storage()
        storage.past.written = log, log.position
        storage.past.users.add(log)
        return storage

    def fence(self, log: Space) -> None:
        """Make a log wait for everything issued to its nodes; the next command may use any tensor."""
        nodes = log.connected_nodes
        for other in self._logs:
            if nodes & other.connected_nodes:
                call_without_interrupt(partial(self.wait, log, other, other.position))

    def fenced(self, log: Space) -> None:
        """Make everything appended later for its nodes wait for the last command of this log."""
        for connection in log.connections:
            self._fences[connection.node] = log, log.position

    @contextmanager
    def apart(self, *homes: Space) -> Iterator[None]:
        """Context in which commands are appended that several nodes execute together.

        They go to the default streams, after everything issued to these nodes before and before everything
        issued later. So all of these nodes execute them in the same order.
        """
        with self.by_default(homes):
            for home in homes:
                self.fence(home)
            try:
                yield
            finally:
                for home in homes:
                    with suppress(ShoalError):  # the space is lost, but perhaps not all of its nodes
                        call_without_interrupt(partial(self._mark, home))
                    self.fenced(home)

    @contextmanager
    def by_default(self, homes: Iterable[Space]) -> Iterator[None]:
        """Context in which this thread's commands for these spaces go to their default streams."""
        entered: list[Space] = []
        try:
            for home in homes:
                self.enter(home)
                entered.append(home)
            yield
        finally:
            for home in reversed(entered):
                self.leave(home)

    def generators(self, log: Space) -> list[Storage]:
        """The storages that represent the random generators of its nodes."""
        return [self._generators.setdefault(connection.node, Storage()) for connection in log.connections]

    def ask(
        self, space: Space, command: int, id: int, storage: Storage
    ) -> list[tuple[StreamConnection, SegmentBatch]]:
        """Send a command that has a reply; return the batches that contain it."""
        log = self.current(space)
        with self.using(log, [id], [storage]):
            return log.send_request(command, id)

    def share(self, id: int, storage: Storage, space: Space, part: Space) -> int:
        """Give a tensor of a place an id in the space of one of its nodes; see :meth:`Space.share`."""
        log = self.current(part)
        with self.using(log, [], [storage]):
            self._await_view(log, space, id, storage)
            new = log.share(id, space)
        storage.past.views[part.number, new] = log, log.position
        return new

    def join(self, space: Space, given: Sequence[tuple[Space, int, Storage]]) -> tuple[int, Storage]:
        """Combine tensors of nodes into one tensor of a place; return its id there and its storage."""
        id, joined = space.new_id(), Storage()
        for part, each, storage in given:
            with self.using(part, [each], [storage], [storage]):
                part.give(each, space, id)
            joined.past.users |= storage.past.users
            joined.past.views.update(storage.past.views)
        self._mark(space)
        joined.past.written = space, space.position
        joined.past.users.add(space)
        return id, joined

    def _order(
        self, log: Space, ids: Sequence[int], used: Sequence[Storage], written: Sequence[Storage]
    ) -> None:
        """Append the waits for the other streams that a command depends on."""
        if log.home.freed:
            self.free(log.home)
        if self._fences:
            for connection in log.connections:
                if connection.node in self._fences:
                    self.wait(log, *self._fences[connection.node])
        for storage in (*used, *written):
            if storage.past.written is None:
                home = log.home
                storage.past.written = home, self._begun.get(home, 0)
                storage.past.users.add(home)
            if storage.past.written[0] is not log:
                self.wait(log, *storage.past.written)
        for id, storage in zip(ids, used, strict=False):
            self._await_view(log, log.home, id, storage)
        for storage in written:
            while left := [use for use in storage.past.uses.items() if self._is_ahead(log, *use)]:
                for use in left:  # flushing may free tensors of this memory, which adds a use
                    self.wait(log, *use)

    def _await_view(self, log: Space, home: Space, id: int, storage: Storage) -> None:
        made = storage.past.views.get((home.number, id))
        if made is not None and made[0] is not log:
            self.wait(log, *made)

    def _used(self, log: Space, used: Sequence[Storage], written: Sequence[Storage]) -> None:
        after = log.position
        for storage in used:
            storage.past.users.add(log)
            storage.past.uses[log] = after
        for storage in written:
            storage.past.users.add(log)
            storage.past.uses.clear()
            storage.past.written = log, after

    def wait(self, log: Space, other: Space, position: int) -> None:
        """Make a log wait until their common nodes have executed another log up to `position`."""
        if not self._is_ahead(log, other, position):
            return
        # Compared by connection, because a lost node may have been replaced by another of the same index.
        common = log.connected_nodes & other.connected_nodes
        for connection in other.connections:
            connection.flush()
        nodes = [EVERY_NODE] if len(common) == len(log.connections) else sorted(node.index for node in common)
        for index in nodes:
            log.append_command(WAIT, index, other.number, other.stream, position & 0xFFFFFFFF, position >> 32)
        self._seen[log, other] = position

    def _is_ahead(self, log: Space, other: Space, position: int) -> bool:
        """Whether a log has not waited yet for this position of another stream."""
        if other.stream == log.stream or other.home.is_forgotten:
            return False
        return self._seen.get((log, other), -1) < position

    def expect(
        self,
        log: Space,
        batches: Iterable[tuple[StreamConnection, SegmentBatch]],
        passed: Callable[[], list[Future[Any]]],
    ) -> None:
        """Make a log wait until batches of other nodes are done or these nodes are lost.

        Args:
            passed: called then to query these nodes' GPUs, where the work is only enqueued.
        """
        self._expected += 1
        number = self._expected
        call_without_interrupt(partial(log.append_command, EXPECT, number))
        log.poll()

        def notify(_: object) -> None:
            for connection in log.connections:
                with suppress(ShoalError):  # the waiting node is lost
                    connection.node.call(sessions.notify, number)

        def done(_: object) -> None:
            asked: list[Future[Any]] = []
            with suppress(ShoalError):  # the nodes are lost: nothing to wait for
                asked = passed()
            collect_all(asked).add_done_callback(notify)

        collect_all([batch.future for _, batch in batches]).add_done_callback(done)

    # -- freed ids ---------------------------------------------------------------------------------

    def free(self, home: Space) -> None:
        """Free released tensors; called with Ctrl-C deferred."""
        while home.freed:
            freed = home.freed.popleft()
            id, storage = freed if isinstance(freed, tuple) else (freed, Storage())
            while storage.joined is not None:
                storage = storage.joined
            users = [user for user in storage.past.users if user.home is home] or [home]
            if len(users) == 1:
                users[0].append_free(FREE, id)
            else:
                home.releasing_ids.append(
                    (id, [(connection, connection.sent) for user in users for connection in user.connections])
                )
                for user in users:
                    user.append_free(RELEASE, id, len(users))
            storage.past.views.pop((home.number, id), None)
            for user in users:
                if user in storage.past.users:
                    storage.past.uses[user] = user.position
        while home.releasing_ids and all(
            connection.acknowledged > batch for connection, batch in home.releasing_ids[0][1]
        ):
            home.reusable_ids.append(home.releasing_ids.popleft()[0])
