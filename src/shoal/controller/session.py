"""The master's half of a session with one node: the log, its batches, and what came back.

Commands are appended under the master's lock, in the order of the program; a node executes them in this
order.  So an id is free for another tensor as soon as its FREE is in the log.
"""

from __future__ import annotations

import contextlib
import pickle
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from ..errors import GroupError, NodeLost, RemoteOpError, RpcError, ShoalError
from ..future import Future
from .commands import ASK, DEFINE, FETCH, FORGET, FREE, KEEP, PUT, SEED, STATE, Failure, Template
from .interrupts import undisturbed
from .issuing import Line, issuing_line, shown

#: commands that are sent without waiting for the node to become idle
BATCH = 256
#: batches that a busy node is sent ahead
AHEAD = 4
#: commands that may be ahead of a node before the program waits for it
LIMIT = 65_536
#: seconds that a command may stay in the log of an idle node
DELAY = 0.001
#: failures whose texts are kept
FAILURES = 1000
#: how often it is looked whether the node has become idle, in commands
_LOOK = 32

#: sends a batch: number, numbers, scalars, high, payloads
Send = Callable[[int, bytes, bytes, int, list[Any]], Future[Any]]


class Batch:
    """Commands that were sent, until the node has said what became of them.

    Attributes:
        future: the reply.
        lines: of the program, one for each interned call.
        line: of what waits for its values.
        size: how many commands.
        values: what was fetched or asked, once it was replied.
    """

    __slots__ = ("future", "line", "lines", "size", "values")

    def __init__(self, future: Future[Any], lines: list[Line | None], size: int) -> None:
        self.future = future
        self.line: Line | None = None
        self.lines = lines
        self.size = size
        self.values: list[Any] = []


class Session:
    """One node, as the master keeps it.

    Attributes:
        index: of the node.
        device: ``node:index``.
        lock: the master's.
        freed: ids that nothing holds any more.
        calls: interned calls by key.
        lost: why the node cannot be used any more; None: it can.
    """

    def __init__(self, index: int, device: torch.device, lock: threading.RLock, send: Send) -> None:
        self.index = index
        self.device = device
        self.lock = lock
        self.freed: deque[int] = deque()
        self.calls: dict[Any, Any] = {}
        self.lost: ShoalError | None = None
        self._send = send
        self._numbers = array("I")
        self._scalars = array("d")
        self._payloads: list[Any] = []
        self._lines: list[Line | None] = []
        self._size = self._ticks = 0
        self._ids: list[int] = []
        self._high = 0
        self._batches: deque[Batch] = deque()
        self._ahead = 0
        self._number = 0
        self._failures: dict[int, RemoteOpError] = {}
        self._unseen: deque[int] = deque(maxlen=FAILURES)
        self._alone: deque[int] = deque(maxlen=FAILURES)
        self._armed = False
        self._wake = threading.Event()
        self._closed = False
        self.issued = 0
        self._thread = threading.Thread(target=self._flush_late, name=f"shoal-node{index}-log", daemon=True)
        self._thread.start()

    # -- the log; the caller holds the lock -----------------------------------------------------

    def issue(self, number: int, ids: list[int], scalars: list[float], results: int) -> list[int]:
        """Append an interned call; the ids of its results."""
        if self.lost is not None:
            raise self.lost
        if self.freed:
            self._free()
        numbers, values, lines = self._numbers, self._scalars, self._lines
        before = len(numbers), len(values), len(lines)
        try:
            numbers.append(number)
            if ids:
                numbers.fromlist(ids)
            made = []
            for _ in range(results):
                id = self._ids.pop() if self._ids else self._new_id()
                numbers.append(id)
                made.append(id)
            if scalars:
                values.fromlist(scalars)
            lines.append(issuing_line())
        except BaseException:  # a Ctrl-C leaves no half of a command
            del numbers[before[0] :], values[before[1] :], lines[before[2] :]
            raise
        self.issued += 1
        self._appended()
        return made

    def put(self, tensor: torch.Tensor) -> int:
        """Send a tensor, of which the caller gives a copy; its id."""
        id = self.new_id()
        self._command(PUT, id, self._payload(tensor))
        return id

    def new_id(self) -> int:
        """An id that no tensor has."""
        if self.lost is not None:
            raise self.lost
        if self.freed:
            self._free()
        return self._ids.pop() if self._ids else self._new_id()

    def define(self, definition: tuple[Any, ...]) -> None:
        """Tell the node of a call; raises what pickling raises before anything is in the log."""
        self._command(DEFINE, self._payload(pickle.dumps(definition)))

    def forget(self) -> None:
        """Forget all interned calls, here and there."""
        self.calls.clear()
        self._command(FORGET)

    def seed(self, seed: int) -> None:
        """Seed the node's random generator."""
        self._command(SEED, seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF)

    def keep(self, position: int) -> int:
        """Keep a tensor of what was asked last; its id."""
        id = self.new_id()
        self._command(KEEP, id, position)
        return id

    def _command(self, *numbers: int) -> None:
        if self.lost is not None:
            raise self.lost
        self._numbers.fromlist(list(numbers))
        self._appended()

    def _payload(self, value: Any) -> int:
        self._payloads.append(value)
        return len(self._payloads) - 1

    def _new_id(self) -> int:
        self._high += 1
        return self._high - 1

    def _free(self) -> None:
        while self.freed:
            id = self.freed[0]
            self._numbers.fromlist([FREE, id])
            # A Ctrl-C in between frees it once more, which does nothing.
            self._size += 1
            self.freed.popleft()
            self._ids.append(id)

    def _appended(self) -> None:
        size = self._size = self._size + 1
        self._ticks += 1
        if not self._batches:
            if size >= _LOOK:
                self.flush()
                return
        elif not self._ticks % _LOOK:
            if self._batches[0].future.done():
                self.reap()
                self.flush()
                return
            if size >= BATCH and len(self._batches) < AHEAD:
                self.flush()
                return
            if size + self._ahead >= LIMIT:
                self._hold_back()
        if not self._armed:
            self._armed = True
            self._wake.set()

    def _hold_back(self) -> None:
        """Wait until the node has caught up by a batch."""
        self._settle(self._batches[0])
        self.reap()
        self.flush()

    def flush(self) -> Batch | None:
        """Send what is in the log; the last batch that was sent and not replied."""
        undisturbed(self._flush)
        return self._batches[-1] if self._batches else None

    def _flush(self) -> None:
        if self.freed:
            self._free()
        if self._size and self.lost is None:
            arguments = self._numbers.tobytes(), self._scalars.tobytes(), self._high, self._payloads
            future = self._send(self._number, *arguments)
            self._batches.append(Batch(future, self._lines, self._size))
            self._number += 1
            self._ahead += self._size
            self._numbers, self._scalars, self._payloads = array("I"), array("d"), []
            self._lines, self._size = [], 0

    def reap(self) -> None:
        """Take in the replies that have come."""
        while self._batches and self._batches[0].future.done():
            batch = self._batches.popleft()
            self._ahead -= batch.size
            error = batch.future.exception()
            if error is not None:
                self.lose(error)
                continue
            batch.values, failures = batch.future.value()
            for told in failures:
                failure = Failure(*told)
                line = batch.lines[failure.position] if failure.position >= 0 else batch.line
                self._failures[failure.poison] = self._error(failure, line)
                self._failures.pop(failure.poison - FAILURES, None)
                self._unseen.append(failure.poison)
                if failure.alone:
                    self._alone.append(failure.poison)

    # -- sync points -----------------------------------------------------------------------------

    def fetch(self, id: int) -> torch.Tensor:
        """The elements of a tensor.

        Raises:
            RemoteOpError: they could not be computed.
            NodeLost: the node died.
        """
        return self.ask_all([(FETCH, id)])[0]  # type: ignore[no-any-return]

    def ask_all(self, commands: list[tuple[int, ...]]) -> list[Any]:
        """Append commands that are replied to, and wait for what they give."""
        with self.lock:
            for command in commands:
                self._command(*command)
            batch = self.flush()
            if batch is None:
                raise self.lost or ShoalError(f"node {self.index}: nothing was sent")
            batch.line = issuing_line()  # as each of them flushes under the lock, its values are alone there
        self.settle(batch)
        if self._alone:
            raise self._raised(self._alone[0])
        return [self._value(*value) for value in batch.values]

    def ask(self, operator: str, args: list[Template], kwargs: dict[str, Template]) -> Any:
        """Run an operator now; what it gives, with metadata in the place of tensors."""
        question = pickle.dumps((operator, args, kwargs))
        with self.lock:
            return self.ask_all([(ASK, self._payload(question))])[0]

    def random_state(self, state: torch.Tensor | None = None) -> torch.Tensor | None:
        """The state of the node's random generator, or set it."""
        with self.lock:
            if state is None:
                return self.ask_all([(STATE, self._payload(None))])[0]  # type: ignore[no-any-return]
            self._command(STATE, self._payload(state))
            return None

    def settle(self, batch: Batch) -> None:
        """Wait until a batch and all before it are done."""
        self._settle(batch)
        with self.lock:
            self.reap()
            if self.lost is not None:
                raise self.lost

    def _settle(self, batch: Batch) -> None:
        for each in list(self._batches):
            try:
                each.future.wait()
            except (RpcError, GroupError) as error:
                with self.lock:
                    self.lose(error)
                raise (self.lost or error) from error
            if each is batch:
                return

    def synchronize(self) -> None:
        """Wait for all that was issued; raise what failed and was not raised yet."""
        with self.lock:
            batch = self.flush()
        if batch is not None:
            self.settle(batch)
        with self.lock:
            if self.lost is not None:
                raise self.lost
            if self._unseen:
                first, more = self._unseen[0], len(self._unseen) - 1
                self._unseen.clear()
                self._alone.clear()
                raise self._raised(first, more)

    def stats(self) -> dict[str, int]:
        """Counts; the caller holds the lock."""
        return {
            "issued": self.issued,
            "pending": self._ahead + self._size,
            "calls": len(self.calls),
            "tensors": self._high - len(self._ids) - len(self.freed),
        }

    def unseen(self) -> list[str]:
        """What failed and was never raised, in words."""
        return [str(self._raised(each)) for each in list(self._unseen)]

    def _value(self, kind: str, value: Any) -> Any:
        if kind == "poison":
            raise self._raised(value)
        return value

    def _raised(self, poison: int, more: int = 0) -> RemoteOpError:
        for noted in (self._unseen, self._alone):
            if poison in noted:
                noted.remove(poison)
        known = self._failures.get(poison)
        if known is None:
            name = f"node{self.index}"
            return RemoteOpError(
                f"node {self.index}: an operation failed so long ago that its text is gone", name
            )
        text = f"{known} ({more} more failed after it)" if more else str(known)
        return RemoteOpError(text, known.worker, known.traceback, known.line)

    def _error(self, failure: Failure, line: Line | None) -> RemoteOpError:
        where = shown(line)
        text = (
            f"node {self.index}: {failure.operator}({failure.operands}) failed: {failure.error}\n"
            f"issued at {where}\nthe traceback there:\n{failure.traceback}"
        )
        return RemoteOpError(text, f"node{self.index}", failure.traceback, where)

    def lose(self, why: BaseException | str) -> None:
        """The node cannot be used any more."""
        if self.lost is None and not self._closed:
            self.lost = NodeLost(f"node {self.index} was lost: {why}", f"node{self.index}", (self.index,))

    # -- the end ---------------------------------------------------------------------------------

    def finish(self, seconds: float) -> None:
        """Let the node do what was issued, if that takes no longer."""
        with self.lock:
            batch = self.flush()
        if batch is not None:
            with contextlib.suppress(ShoalError):  # it is told by what is asked afterwards
                batch.future.wait(seconds)
        with self.lock:
            self.reap()

    def close(self, why: ShoalError) -> None:
        """End the thread; what is used afterwards raises ``why``."""
        with self.lock:
            self.lost = self.lost or why
            self._closed = True
        self._wake.set()
        self._thread.join()

    def _flush_late(self) -> None:
        """Send what stays in the log: after a moment, or when a busy node has become idle."""
        while not self._closed:
            self._wake.wait()
            self._wake.clear()
            while not self._closed:
                with self.lock:
                    batch = self._batches[0] if self._batches else None
                    if self.lost is not None or not (self._size or batch):
                        self._armed = False
                        break
                if batch is None:
                    time.sleep(DELAY)
                else:
                    with contextlib.suppress(Exception):  # whoever uses the node hears of it
                        batch.future.wait()
                with self.lock:
                    self.reap()
                    if self.lost is None:
                        self.flush()
