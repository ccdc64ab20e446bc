"""Which stream waits for which: commands of several streams on one memory keep the program's order.

Every stream of a space has a log of its own.  Each storage remembers which log wrote to it last, up to which
position, and which logs used it since.  A command that reads waits, in its own log, for the last write on
another stream; one that writes waits for the uses too.  A node executes a wait when its stream comes there,
so the master waits for nothing.

- No waits can form a cycle.  Under the master's lock all commands of all streams and nodes are appended in
  one order, and a command waits for earlier ones only: by its place in its own log; by a WAIT for what was
  appended then; by an EXPECT of batches sent before; a ``receive`` for its ``send``; and a collective
  for what its members' default streams have before it, and all of these come to it in this order
  (:meth:`Streams.apart`).  So the oldest of all commands that are not done waits for none.
- That one is at its node, or will be without the program's help.  The commands that a WAIT or an EXPECT waits
  for are sent before it is appended, and each line sends the rest of its log by itself, as soon as its node
  is through with what it has (:mod:`shoal.controller.commands.line`).
- No wait is under a lock that another one needs: nodes wait in the threads of their streams, and the master
  tells of batches in the callbacks of their replies.
- The random generator of a node is a storage that every operation writes to that draws numbers: so they
  keep the program's order, whatever streams they are on.
- An id that one stream used is freed in its log, and used again by that stream only.  One that several used
  is released in the log of each: the last one that comes to it frees the tensor, and the id is used again
  once all of them have said that they did.
- Before there is a second stream nothing of this is kept.  Whatever was done then counts as used by the
  default stream when the second one is made.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from ...errors import GroupError, RpcError, ShoalError
from ...future import Future, collect_all
from ..commands.batch import SegmentBatch
from ..commands.interrupts import undisturbed
from ..commands.line import NodeConnection
from ..commands.losses import anew, lost_by
from ..commands.space import Branch, Space
from ..commands.storage import Storage
from ..node import sessions
from ..protocol.commands import EVERY_NODE, EXPECT, FREE, NO_NODE, RELEASE, WAIT

if TYPE_CHECKING:
    from .calls import InternedCall

#: streams of a space; those who want more share them, as those of torch.cuda
MOST = 32


class Streams:
    """The streams of a master's nodes, once there are several.

    Args:
        spaces: that there are.
    """

    def __init__(self, spaces: Iterable[Space]) -> None:
        self._generators: dict[NodeConnection, Storage] = {}
        self._logs: list[Branch] = []
        self._fences: dict[NodeConnection, tuple[Space, int]] = {}
        self._seen: dict[tuple[Space, Space], int] = {}
        self._begun: dict[Space, int] = {}
        self._by_home: dict[Space, list[Branch]] = {}
        self._returned: deque[Branch] = deque()
        self._chosen = threading.local()
        self._stream = self._expected = 0
        for space in spaces:
            undisturbed(partial(self.begin, space))

    def begin(self, home: Space) -> None:
        """Keep the order of a space from now on."""
        if home.lost is None:
            # After this position all that was done before on its nodes is done, of whatever space.
            home.note(WAIT, NO_NODE, 0, 0, 0, 0)
        self._begun[home] = home.position
        home.ordering = self
        for line in home.lines:
            line.ordering = self

    # -- streams -----------------------------------------------------------------------------------

    def open(self, home: Space) -> Branch:
        """The log of a stream that nobody has, or, if there are many, few; the caller holds the lock.

        Raises:
            NodeLost: one of its nodes is lost.
        """
        self._take_back()
        if home.lost is not None:
            raise anew(home.lost)
        there = self._by_home.setdefault(home, [])
        log = min(there, key=lambda log: log.holders, default=None)
        if log is None or (log.holders and len(there) < MOST):
            log = self._new(home)
            there.append(log)
        log.holders += 1
        return log

    def _take_back(self) -> None:
        while self._returned:
            self._returned.popleft().holders -= 1

    def _new(self, home: Space) -> Branch:
        self._stream += 1
        sends = []
        for main in home.lines:
            try:
                sends.append(main.opens(self._stream))
            except (RpcError, GroupError) as error:
                raise lost_by(main, error) from error
        lines = [
            NodeConnection(
                main.index, main.lock, send, main.lines, main.epoch, main.accelerators, main.within,
                self._stream, main,
            )
            for main, send in zip(home.lines, sends, strict=True)
        ]  # fmt: skip
        log = Branch(home, self._stream, tuple(lines))
        self._logs.append(log)
        return log

    def forget(self) -> None:
        """Forget nodes that were replaced, and what is over; the caller holds the lock."""
        self._take_back()
        self._logs = [each for each in self._logs if not each.home.over]
        self._by_home = {home: logs for home, logs in self._by_home.items() if home.lost is None}
        self._begun = {home: at for home, at in self._begun.items() if home.lost is None}
        self._fences = {
            line: fence
            for line, fence in self._fences.items()
            if line.lost is None and not fence[0].home.over
        }
        self._generators = {line: each for line, each in self._generators.items() if line.lost is None}
        self._seen = {
            (log, other): at
            for (log, other), at in self._seen.items()
            if not (log.home.over or other.home.over)
        }

    def give_back(self, log: Branch) -> None:
        """Somebody has the stream of this log no more; in whatever thread the garbage collector runs."""
        self._returned.append(log)

    def current(self, home: Space) -> Space:
        """The log to which this thread's commands for a space go.

        Raises:
            NodeLost: that was of a node in whose place this one is.
        """
        chosen: list[Space] = getattr(self._chosen, "logs", [])
        log = next((log for log in reversed(chosen) if log.index == home.index), home)
        if log.home is not home and log.home.lost is not None:
            raise anew(log.home.lost)
        return log

    def innermost(self) -> Space | None:
        """The log that this thread chose last, if any."""
        chosen: list[Space] = getattr(self._chosen, "logs", [])
        return chosen[-1] if chosen else None

    def enter(self, log: Space) -> None:
        """Let this thread's commands for a space go to one of its logs."""
        if not hasattr(self._chosen, "logs"):
            self._chosen.logs = []
        self._chosen.logs.append(log)

    def leave(self, log: Space) -> None:
        """Undo this thread's last :meth:`enter` of a log, whatever it has entered since."""
        chosen: list[Space] = getattr(self._chosen, "logs", [])
        for at in range(len(chosen) - 1, -1, -1):
            if chosen[at] is log:
                del chosen[at]
                return

    # -- commands; the caller holds the lock -------------------------------------------------------

    def issue(
        self,
        log: Space,
        call: InternedCall,
        ids: list[int],
        storages: Sequence[Storage],
        scalars: list[float],
    ) -> list[int]:
        """Append an interned call on tensors with these ids and storages; the ids of its results."""
        written = [storages[each] for each in call.written]
        if call.random:
            written += self.generators(log)
        made: list[int] = []

        def append() -> None:
            self._order(log, ids, storages, written)
            made.extend(log.append(call.number, ids, scalars, call.count))
            self._used(log, storages, written)

        undisturbed(append)
        log.appended(made)
        return made

    @contextmanager
    def using(
        self, log: Space, ids: Sequence[int], read: Sequence[Storage], written: Sequence[Storage] = ()
    ) -> Iterator[None]:
        """Append any other commands that use tensors with these ids and storages, and write to some."""
        undisturbed(partial(self._order, log, ids, read, written))
        try:
            yield
        finally:
            undisturbed(partial(self._used, log, read, written))

    def made(self, log: Space) -> Storage:
        """The storage of a tensor that the last command made."""
        storage = Storage()
        storage.past.written = log, log.position
        storage.past.users.add(log)
        return storage

    def fence(self, log: Space) -> None:
        """Let a log wait for all that was issued to its nodes: what comes next may use any tensor."""
        nodes = {line.main for line in log.lines}
        for other in self._logs:
            if nodes & {line.main for line in other.lines}:
                undisturbed(partial(self.wait, log, other, other.position))

    def fenced(self, log: Space) -> None:
        """Let whatever comes later on its nodes wait for the last command of a log."""
        for line in log.lines:
            self._fences[line.main] = log, log.position

    @contextmanager
    def apart(self, *homes: Space) -> Iterator[None]:
        """Append commands that nodes execute together: to their default streams, behind all that was issued
        to them and before all that comes.

        So all of these nodes come to such commands in one order.
        """
        with self.by_default(homes):
            for home in homes:
                self.fence(home)
            try:
                yield
            finally:
                for home in homes:
                    with suppress(ShoalError):  # it is lost, and perhaps not all of its nodes
                        undisturbed(
                            partial(home.note, WAIT, NO_NODE, 0, 0, 0, 0)
                        )  # behind the others of them
                    self.fenced(home)

    @contextmanager
    def by_default(self, homes: Iterable[Space]) -> Iterator[None]:
        """Let this thread's commands for spaces go to their default streams."""
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
        """In the place of the random generators of its nodes."""
        return [self._generators.setdefault(line.main, Storage()) for line in log.lines]

    def ask(
        self, space: Space, command: int, id: int, storage: Storage
    ) -> list[tuple[NodeConnection, SegmentBatch]]:
        """Send a command on a tensor that is replied to; the batches in which it is."""
        log = self.current(space)
        with self.using(log, [id], [storage]):
            return log.send_asked(command, id)

    def share(self, id: int, storage: Storage, space: Space, part: Space) -> int:
        """Name a tensor of a place in the space of one of its nodes too, as :meth:`Space.share`."""
        log = self.current(part)
        with self.using(log, [], [storage]):
            self._await_view(log, space, id, storage)
            new = log.share(id, space)
        storage.past.views[part.number, new] = log, log.position
        return new

    def join(self, space: Space, given: Sequence[tuple[Space, int, Storage]]) -> tuple[int, Storage]:
        """Name tensors of nodes, with their storages, as one of a place: its id there, and its storage."""
        id, joined = space.new_id(), Storage()
        for part, each, storage in given:
            with self.using(part, [each], [storage], [storage]):
                part.give(each, space, id)
            joined.past.users |= storage.past.users
            joined.past.views.update(storage.past.views)
        space.note(WAIT, NO_NODE, 0, 0, 0, 0)  # behind what its nodes were told on their default streams
        joined.past.written = space, space.position
        joined.past.users.add(space)
        return id, joined

    def _order(
        self, log: Space, ids: Sequence[int], used: Sequence[Storage], written: Sequence[Storage]
    ) -> None:
        """Wait for the other streams that a command depends on."""
        if log.home.freed:
            self.free(log.home)
        if self._fences:
            for line in log.lines:
                if line.main in self._fences:
                    self.wait(log, *self._fences[line.main])
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
                for use in left:  # what is sent may free tensors of this memory, which is a use too
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
        """Let a log wait until the nodes that it shares with another one have done that up to a position."""
        if not self._is_ahead(log, other, position):
            return
        # By their lines: another node may have come in the place of one that was lost.
        common = {line.main for line in log.lines} & {line.main for line in other.lines}
        for line in other.lines:
            line.flush()
        nodes = [EVERY_NODE] if len(common) == len(log.lines) else sorted(line.index for line in common)
        for index in nodes:
            log.note(WAIT, index, other.number, other.stream, position & 0xFFFFFFFF, position >> 32)
        self._seen[log, other] = position

    def _is_ahead(self, log: Space, other: Space, position: int) -> bool:
        """Whether a log has not waited yet for a position of another stream's."""
        if other.stream == log.stream or other.home.over:
            return False
        return self._seen.get((log, other), -1) < position

    def expect(
        self,
        log: Space,
        batches: Iterable[tuple[NodeConnection, SegmentBatch]],
        passed: Callable[[], list[Future[Any]]],
    ) -> None:
        """Let a log wait until batches of other nodes are done, or these nodes are lost.

        Args:
            passed: asks the GPUs of these nodes then: a node has only enqueued their work.
        """
        self._expected += 1
        number = self._expected
        undisturbed(partial(log.note, EXPECT, number))
        log.look()

        def tell(_: object) -> None:
            for line in log.lines:
                with suppress(ShoalError):  # whoever waits there is lost itself
                    line.main.call(sessions.tell, number)

        def done(_: object) -> None:
            asked: list[Future[Any]] = []
            with suppress(ShoalError):  # they are lost, and hold nobody
                asked = passed()
            collect_all(asked).add_done_callback(tell)

        collect_all([batch.future for _, batch in batches]).add_done_callback(done)

    # -- freed ids ---------------------------------------------------------------------------------

    def free(self, home: Space) -> None:
        """Free what nothing holds any more; undisturbed."""
        while home.freed:
            freed = home.freed.popleft()
            id, storage = freed if isinstance(freed, tuple) else (freed, Storage())
            while storage.joined is not None:
                storage = storage.joined
            users = [user for user in storage.past.users if user.home is home] or [home]
            if len(users) == 1:
                users[0].drop(FREE, id)
            else:
                home.resting.append((id, [(line, line.sent) for user in users for line in user.lines]))
                for user in users:
                    user.drop(RELEASE, id, len(users))
            storage.past.views.pop((home.number, id), None)
            for user in users:
                if user in storage.past.users:
                    storage.past.uses[user] = user.position
        while home.resting and all(line.acknowledged > batch for line, batch in home.resting[0][1]):
            home.rested.append(home.resting.popleft()[0])
