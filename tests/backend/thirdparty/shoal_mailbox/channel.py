"""The data channel of one group.

Every rank has a mailbox in the store: a counter, and letters numbered by it.  ``submit`` posts what the
operation sends at once; one thread reads this rank's letters in order, hands each to the first
operation that wants it, and completes an operation when it has all it needs.  The algorithm is always
the same: whoever needs a part gets it straight from whoever has it.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import torch

from shoal import errors
from shoal.backend.base import DataChannel, GroupSpec
from shoal.errors import GroupError
from shoal.future import Future
from shoal.spec import ANY_SOURCE, DTYPES_BY_CODE, Operation, OpKind
from shoal.store import PrefixStore, Store

from .arithmetic import reduce
from .letter import Letter, contents, fill

#: Seconds between two looks at the deadlines.
_TICK = 0.05
#: Numbered operations whose calls are remembered.
_MEMORY = 1000
_TO_ALL = (OpKind.ALL_REDUCE, OpKind.ALL_GATHER, OpKind.BARRIER)
_TO_ROOT = (OpKind.REDUCE, OpKind.GATHER)
_FROM_ROOT = (OpKind.BROADCAST, OpKind.SCATTER)
_MESSAGES = (OpKind.SEND, OpKind.RECV)
_NOTHING = torch.empty(0, dtype=torch.uint8)


class _Pending:
    """An operation that waits for letters."""

    def __init__(self, operation: Operation, rank: int, size: int) -> None:
        self.operation = operation
        self.future: Future[Any] = Future()
        self.deadline = time.monotonic() + operation.timeout
        self.arrived: dict[int, Letter] = {}
        kind = operation.kind
        if kind in _MESSAGES:
            self.slot = f"tag {operation.tag}"
        else:
            self.slot = f"key {operation.key}" if operation.key else f"number {operation.number}"
        #: whose letters are still needed; for a RECV from any source it is one of these
        self.sources: set[int] = set(range(size))
        if kind is OpKind.SEND or (kind in _TO_ROOT and rank != operation.root):
            self.sources = set()
        elif kind in _FROM_ROOT:
            self.sources = {operation.root}
        elif kind is OpKind.RECV:
            self.sources = {operation.peer} if operation.peer != ANY_SOURCE else self.sources - {rank}

    def take(self, letter: Letter) -> None:
        self.arrived[letter.source] = letter
        self.sources.discard(letter.source)
        if self.operation.kind is OpKind.RECV:
            self.sources.clear()

    def needs(self, closed: set[int]) -> bool:
        """Whether it cannot complete without one of the ranks in ``closed``."""
        if self.operation.kind is OpKind.RECV:
            return bool(self.sources) and self.sources <= closed
        return bool(self.sources & closed)


class MailboxChannel(DataChannel):
    """See the module."""

    def __init__(self, store: Store, group: GroupSpec) -> None:
        self._store = PrefixStore(f"mailbox/{group.ident:x}/", store)
        self._rank, self._size = group.rank, len(group.ranks)
        self._lock = threading.RLock()
        self._pending: list[_Pending] = []
        self._unclaimed: list[Letter] = []
        #: what this rank called in the last numbered operations, for letters that nobody here expects
        self._called: dict[str, str] = {}
        self._closed: set[int] = set()
        self._failure: GroupError | None = None
        self._ended = False
        self._reader = threading.Thread(target=self._read, name=f"mailbox-{group.name}", daemon=True)
        self._reader.start()

    # -- the interface -------------------------------------------------------------------------

    def submit(self, operation: Operation) -> Future[Any]:
        pending = _Pending(operation, self._rank, self._size)
        with self._lock:
            if self._failure is not None:
                pending.future.set_exception(self._failure)
                return pending.future
            for destination, part in self._outgoing(operation):
                letter = Letter.holding(part, pending.slot, self._rank, self._describe(operation))
                if destination == self._rank:
                    pending.take(letter)
                else:
                    self._post(destination, letter)
            self._pending.append(pending)
            for letter in list(self._unclaimed):
                if letter.slot == pending.slot and letter.source in pending.sources:
                    self._unclaimed.remove(letter)
                    self._deliver(pending, letter)
            if operation.number >= 0:
                self._called[pending.slot] = self._describe(operation)
                self._called.pop(f"number {operation.number - _MEMORY}", None)
                self._unclaimed, rest = [], self._unclaimed
                for letter in rest:
                    self._leave_unclaimed(letter)
            self._settle(pending)
        return pending.future

    def failure(self) -> GroupError | None:
        return self._failure

    def abort(self, reason: str) -> None:
        self._break(errors.GroupAborted(f"rank {self._rank} aborted the group: {reason}"))

    def close(self, timeout: float) -> None:
        with self._lock:
            self._ended = True
            for pending in self._pending:
                pending.future.set_exception(errors.GroupClosed(f"rank {self._rank} closed the group"))
            self._pending.clear()
            self._tell_all(Letter("", self._rank, event="bye"))
            self._post(self._rank, Letter("", self._rank, event="stop"))
        if threading.current_thread() is not self._reader:
            self._reader.join(timeout)

    # -- sending -------------------------------------------------------------------------------

    def _outgoing(self, operation: Operation) -> list[tuple[int, torch.Tensor]]:
        """Who gets which part of the inputs of ``operation`` from this rank."""
        kind, everybody = operation.kind, range(self._size)
        whole = operation.inputs[0] if operation.inputs else _NOTHING
        if kind in _TO_ALL or (kind is OpKind.BROADCAST and operation.inputs):
            return [(rank, whole) for rank in everybody]
        if kind in _TO_ROOT:
            return [(operation.root, whole)]
        if kind is OpKind.SEND:
            return [(operation.peer, whole)]
        parts = operation.inputs
        if kind is OpKind.REDUCE_SCATTER and len(parts) == 1:
            parts = torch.split(whole.detach().reshape(-1), list(operation.sizes))
        return list(zip(everybody, parts, strict=False))

    def _post(self, destination: int, letter: Letter) -> None:
        number = self._store.add(f"{destination}/count", 1)
        self._store.set(f"{destination}/{number}", letter.encode())

    def _tell_all(self, letter: Letter) -> None:
        for rank in range(self._size):
            if rank != self._rank and rank not in self._closed:
                self._post(rank, letter)

    def _describe(self, operation: Operation) -> str:
        """What must be equal on all ranks."""
        kind = operation.kind
        if kind in _MESSAGES:
            return ""
        x = next(iter([*operation.inputs, *operation.outputs]), _NOTHING)
        count = x.numel() if kind in (OpKind.ALL_REDUCE, OpKind.REDUCE, OpKind.BROADCAST) else ""
        root = f", root={operation.root}" if operation.root >= 0 else ""
        sizes = f", sizes={list(operation.sizes)}" if operation.sizes else ""
        dtype = str(x.dtype).removeprefix("torch.")
        return f"{kind.name.lower()}({dtype}[{count}], {operation.op}{root}{sizes})"

    # -- receiving -----------------------------------------------------------------------------

    def _read(self) -> None:
        number = 1
        while True:
            key = f"{self._rank}/{number}"
            try:
                letter = Letter.decode(self._store.get(key, timeout=_TICK))
            except errors.StoreTimeout:
                if self._ended:  # a peer that died left a number without a letter before our last
                    return
                self._check_deadlines()
                continue
            except errors.StoreError as error:
                self._break(errors.PeerLost(f"the mailbox of rank {self._rank} is gone: {error}"))
                return
            self._store.delete(key)
            number += 1
            if letter.event == "stop":
                return
            with self._lock:
                self._receive(letter)
            self._check_deadlines()

    def _receive(self, letter: Letter) -> None:
        if letter.event == "broken":
            kind = getattr(errors, letter.error)
            lost = (letter.ranks,) if letter.ranks else ()
            self._break(kind(letter.text, *lost), tell=False)
        elif letter.event == "bye":
            self._closed.add(letter.source)
            for pending in list(self._pending):
                self._settle(pending)
        else:
            for pending in self._pending:
                if letter.slot == pending.slot and letter.source in pending.sources:
                    self._deliver(pending, letter)
                    self._settle(pending)
                    return
            self._leave_unclaimed(letter)

    def _leave_unclaimed(self, letter: Letter) -> None:
        """Keep a letter for later, unless it belongs to an operation that expects no such letter."""
        if letter.slot in self._called:
            self._mismatch(letter.slot, letter.source, self._called[letter.slot], letter.call)
        else:
            self._unclaimed.append(letter)

    def _deliver(self, pending: _Pending, letter: Letter) -> None:
        mine = self._describe(pending.operation)
        if letter.call == mine:
            pending.take(letter)
        else:
            self._mismatch(pending.slot, letter.source, mine, letter.call)

    def _mismatch(self, slot: str, source: int, mine: str, theirs: str) -> None:
        table = f"  rank {self._rank}: {mine}\n  rank {source}: {theirs}"
        self._break(errors.CollectiveMismatch(f"the ranks disagree on operation {slot}:\n{table}"))

    def _settle(self, pending: _Pending) -> None:
        """Complete ``pending`` if it has all it needs, or fail it if that will never come."""
        if pending.future.done():
            return
        if pending.needs(self._closed):
            self._pending.remove(pending)
            who = sorted(pending.sources & self._closed)
            pending.future.set_exception(errors.GroupClosed(f"ranks {who} closed the group"))
        elif not pending.sources:
            operation = pending.operation
            letters = [pending.arrived[source] for source in sorted(pending.arrived)]
            room = sum(x.numel() * x.element_size() for x in operation.outputs)
            if not self._fits(operation, letters, room):
                theirs = [f"{DTYPES_BY_CODE[x.dtype]}{list(x.shape)}" for x in letters]
                mine = [f"{x.dtype}{list(x.shape)}" for x in operation.outputs]
                self._mismatch(pending.slot, letters[0].source, f"has room for {mine}", f"sent {theirs}")
                return
            self._pending.remove(pending)
            pending.future.set_result(self._value(operation, letters))

    @staticmethod
    def _fits(operation: Operation, letters: list[Letter], room: int) -> bool:
        if operation.kind is OpKind.ALL_TO_ALL:
            sizes = [x.numel() * x.element_size() for x in operation.outputs]
            return [len(letter.payload) for letter in letters] == sizes
        if operation.kind is OpKind.RECV and operation.outputs:
            same = DTYPES_BY_CODE[letters[0].dtype] is operation.outputs[0].dtype
            return same and len(letters[0].payload) == room
        return True

    @staticmethod
    def _value(operation: Operation, letters: list[Letter]) -> Any:
        """Write the outputs and return what the user gets."""
        kind, outputs = operation.kind, operation.outputs
        if kind is OpKind.RECV:
            letter = letters[0]
            if not outputs:
                return letter.tensor(), letter.source, operation.tag
            fill(outputs, letter.payload)
            return outputs[0], letter.source, operation.tag
        if kind in (OpKind.ALL_REDUCE, OpKind.REDUCE, OpKind.REDUCE_SCATTER) and outputs:
            result = reduce(operation.op, [letter.tensor().reshape(-1) for letter in letters])
            fill(outputs, contents(result))
        elif outputs:
            fill(outputs, b"".join(letter.payload for letter in letters))
        if not outputs:
            return None
        return outputs[0] if len(outputs) == 1 else list(outputs)

    # -- failing -------------------------------------------------------------------------------

    def _check_deadlines(self) -> None:
        with self._lock:
            now = time.monotonic()
            for pending in self._pending:
                if pending.deadline < now:
                    missing = sorted(pending.sources)
                    operation = pending.operation
                    self._break(
                        errors.OperationTimeout(
                            f"{operation.kind.name.lower()} ({pending.slot}) on rank {self._rank}: ranks "
                            f"{missing} did not arrive within {operation.timeout:g} s",
                            missing,
                        )
                    )
                    return

    def _break(self, failure: GroupError, *, tell: bool = True) -> None:
        with self._lock:
            if self._failure is not None:
                return
            self._failure = failure
            for pending in self._pending:
                pending.future.set_exception(failure)
            self._pending.clear()
            if tell:
                ranks = tuple(getattr(failure, "ranks", ()))
                name = type(failure).__name__
                self._tell_all(
                    Letter("", self._rank, event="broken", error=name, text=str(failure), ranks=ranks)
                )
