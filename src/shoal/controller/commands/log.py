"""The log of one stream of a space: commands, ids, segments; :mod:`.space` defines these terms."""

from __future__ import annotations

import threading
from array import array
from collections import Counter, deque
from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

import torch

from ... import config
from ...errors import ShoalError
from ..protocol.commands import FREE
from ..protocol.metadata import forget
from .history import MAKING, Issued, Kind
from .interrupts import undisturbed
from .issuing import Origin, issuing_line
from .line import NodeConnection
from .losses import anew
from .storage import Ordering, Storage

#: number of commands between two polls for acknowledgements
_LOOK = 32
#: no last call
_NONE: tuple[int, list[int]] = (-1, [])


class CommandListener(Protocol):
    """A listener for commands; see :class:`shoal.controller.recording.recording.Recording`."""

    def issued(
        self, space: Any, number: int, ids: list[int], made: list[int], scalars: list[float], origin: Any
    ) -> None: ...

    def commanded(self, space: Any, numbers: Sequence[int]) -> None: ...

    def uploaded(self, space: Any, id: int, value: torch.Tensor) -> None: ...

    def awaits(self, space: Any, bytes: int) -> None: ...


class CommandLog:
    """The command log and the tensor ids of a :class:`.space.Space`.

    Attributes:
        number: number of the space on its nodes: the device index, or a new one if it replaces a lost space.
        device: ``node:index``.
        index: index of the device.
        lines: connections to its nodes.
        parts: the spaces of its single nodes.
        lock: the master's lock.
        freed: ids without handles that are not freed yet; with their storage if it may be shared.
        calls: interned calls by key.
        blanks: numbers of the calls that make tensors without elements.
        kinds: interned calls by number.
        lost: the error if a node is lost, otherwise None.
        over: True if it is lost and the surviving nodes hold nothing of it.
        within: the device within its nodes where tensors are created; -1: the CPU, or the nodes differ.
        issued, awaited: operations so far, and those for which the master waited for the nodes' metadata.
        missed: number of new calls so far, by operator.
        listener: notified of commands while a step is recorded.
        size: commands in the log.
        stream: number of the stream.
        home: the space that has the tensors, if this is the log of a further stream; else itself.
        ordering: the order of the streams; None: there is only the default stream.
        resting: ids that several streams release, with the connections and batches to wait for.
        rested: ids that any stream may use.
    """

    __slots__ = (
        "_asking", "_high", "_ids", "_last", "_numbers", "_open", "_origins", "_past", "_payloads",
        "_scalars", "_sync", "_ticks", "awaited", "blanks", "calls", "device", "freed", "further", "home",
        "index", "issued", "kinds", "lines", "listener", "lock", "lost", "missed", "number", "ordering",
        "over", "parts", "rested", "resting", "size", "stream", "within",
    )  # fmt: skip

    def __init__(
        self,
        device: torch.device,
        lines: tuple[NodeConnection, ...],
        lock: threading.RLock,
        parts: tuple[Any, ...] = (),
        number: int | None = None,
        home: Any = None,
    ) -> None:
        if home is None:
            forget(device)
        self.device = device
        self.index: int = device.index
        self.number = self.index if number is None else number
        self.lines = lines
        self.parts: tuple[Any, ...] = parts or (self,)
        self.lock = lock
        self.freed: deque[int | tuple[int, Storage]] = deque()
        self.calls: dict[Any, Any] = {}
        self.blanks: set[int] = set()
        self._last = _NONE
        self.issued = self.awaited = self.size = 0
        self.missed: Counter[str] = Counter()
        self.listener: CommandListener | None = None
        self._open = False
        self._numbers = array("I")
        self._scalars = array("d")
        self._payloads: list[Any] = []
        self.kinds: dict[int, Kind] = {}
        self._origins = Issued(self.number, self.kinds)
        self._asking = ""
        self._ticks = 0
        self._sync = config.CONTROLLER.get() == "sync"
        self._ids: list[int] = []
        self._high = self._past = 0
        self.stream = 0
        self.home: Any = self if home is None else home
        self.ordering: Ordering | None = lines[0].main.ordering
        self.resting: deque[tuple[int, list[tuple[NodeConnection, int]]]] = deque()
        self.rested: list[int] = []
        self.further: list[Any] = []
        self.lost: ShoalError | None = None
        self.over = False
        within = {line.within for line in lines}
        self.within = within.pop() if len(within) == 1 else -1
        for line in lines:
            line.spaces.append(self)
            self.lost = self.lost or line.lost

    # -- the log; the caller holds the lock -----------------------------------------------------

    def issue(
        self,
        number: int,
        ids: list[int],
        scalars: list[float],
        results: int,
        origin: Origin | list[Origin | None] | None = None,
        steps: int = 1,
    ) -> list[int]:
        """Append an interned call; return the ids of its results.

        Args:
            number: number of the call.
            ids: ids of its operands.
            scalars: its scalars.
            results: number of results.
            origin: where the program issued it; for a recorded step, the origin of each operation.
            steps: number of operations it stands for.
        """
        if not self._open:
            self._enter()
        if self.freed:
            self._free()
        numbers, values, origins = self._numbers, self._scalars, self._origins
        before = len(numbers), len(values), len(origins)
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
            origins.append(origin or issuing_line())
            if self.listener is not None:
                self.listener.issued(self, number, ids, made, scalars, origins[-1])
        except BaseException:  # a Ctrl-C must not leave half a command
            del numbers[before[0] :], values[before[1] :], origins[before[2] :]
            raise
        self.issued += steps
        self._last = number, made
        try:
            self._appended(steps)
        except BaseException:  # a Ctrl-C while the program waits for the node
            self.freed.extend(made)  # they will get no handles
            raise
        if self._sync:
            self._acknowledged(made)
        return made

    def _acknowledged(self, made: list[int]) -> None:
        """Wait until the nodes have done everything that was issued; raise failures."""
        try:
            self.synchronize()
        except BaseException:
            self.freed.extend(made)  # they will get no handles
            raise

    def new_id(self) -> int:
        """Return an unused id."""
        if not self._open:
            self._enter()
        if self.freed:
            self._free()
        return self._ids.pop() if self._ids else self._new_id()

    def _command(self, *numbers: int, made: Sequence[int] = ()) -> None:
        """Append a command that makes tensors with the ids `made`."""
        self._append(numbers)
        try:
            self._appended()
        except BaseException:  # a Ctrl-C while the program waits for the node
            self.freed.extend(made)  # they get no handles
            raise

    def _append(self, numbers: tuple[int, ...]) -> None:
        self._last = _NONE
        if self.listener is not None:
            self.listener.commanded(self, numbers)
        if not self._open:
            self._enter()
        if numbers[0] in MAKING:
            self._origins.note(len(self._numbers), numbers[0], self._asking)
        self._numbers.fromlist(list(numbers))

    def _payload(self, value: Any) -> int:
        """Add a payload for the next command; return its index. The two must be in one segment."""
        if not self._open:
            self._enter()
        self._payloads.append(value)
        return len(self._payloads) - 1

    def _new_id(self) -> int:
        home = self.home
        id: int = home.rested.pop() if home.rested else home._high
        home._high = max(home._high, id + 1)
        return id

    def _free(self) -> None:
        if self.ordering is not None:
            undisturbed(partial(self.ordering.free, self.home))
            return
        while self.freed:
            id: int = self.freed[0]  # type: ignore[assignment]  # without storage: there is one stream
            self._numbers.fromlist([FREE, id])
            # A Ctrl-C before popleft() frees the id twice, which is harmless.
            self.size += 1
            self.freed.popleft()
            self._ids.append(id)

    def _appended(self, steps: int = 1) -> None:
        self.size += steps
        self._ticks += steps
        if self._ticks >= _LOOK:
            self._look()

    def _look(self) -> None:
        self._ticks = 0
        for line in self.lines:
            line.look()

    # -- several streams; called with Ctrl-C deferred, by ``tensor/ordering.py`` --------------------

    @property
    def position(self) -> int:
        """Number of numbers appended so far."""
        return self._past + len(self._numbers)

    def note(self, *numbers: int) -> None:
        """Append a command without sending."""
        self._last = _NONE
        if not self._open:
            self._enter()
        self._numbers.fromlist(list(numbers))
        self.size += 1

    def append(self, number: int, ids: list[int], scalars: list[float], results: int) -> list[int]:
        """Append an interned call, as :meth:`issue` does, without sending."""
        made = [self._ids.pop() if self._ids else self._new_id() for _ in range(results)]
        self.note(number, *ids, *made)
        self._scalars.fromlist(scalars)
        self._origins.append(issuing_line())
        self._last = number, made
        self.issued += 1
        listener = self.home.listener
        if listener is not None:
            listener.issued(self, number, ids, made, scalars, self._origins[-1])
        return made

    def appended(self, made: list[int]) -> None:
        """Send if due, after :meth:`append` added a call with results `made`."""
        try:
            self.look()
        except BaseException:  # a Ctrl-C while the program waits for the node
            self.freed.extend(made)  # they get no handles
            raise
        if self._sync:
            self._acknowledged(made)

    def look(self) -> None:
        """Count a command; poll and send if due."""
        self._ticks += 1
        if self._ticks >= _LOOK:
            self._look()

    def drop(self, command: int, id: int, *count: int) -> None:
        """Append a command that frees an id, without opening the space."""
        self._numbers.fromlist([command, id, *count])
        self.size += 1
        if command == FREE:
            self._ids.append(id)
        if not self._open:
            self.cut()

    # -- segments --------------------------------------------------------------------------------

    def _enter(self) -> None:
        """Open the space, so that commands may be appended."""
        if self.lost is None:
            undisturbed(self._become_open)
        if self.lost is not None:  # checked again: lose() may run without the lock
            self._open = False
            raise anew(self.lost)

    def _become_open(self) -> None:
        for line in self.lines:
            if line.open is not None and line.open is not self:
                line.open.leave()
        for line in self.lines:
            line.open = self
            line.arm()
        self._open = True

    def leave(self) -> None:
        """Close the space: the next commands on a connection may be another space's and use its tensors."""
        self._last = _NONE
        self.cut()
        self._open = False
        for line in self.lines:
            if line.open is self:
                line.open = None

    def lose(self, why: ShoalError) -> None:
        """Mark the space as lost with one of its nodes; the caller need not hold the lock."""
        self.lost = self.lost or why
        self._open = False

    def cut(self) -> None:
        """Make a segment of the log and the frees, for each connection; called with Ctrl-C deferred."""
        for line in self.lines:
            if line.open is not None and line.open is not self:
                line.open.cut()  # it may use tensors that are freed here
        if self.freed:
            self._free()
        if not self.size:
            return
        numbers, scalars = self._numbers.tobytes(), self._scalars.tobytes()
        segment = self.number, self.stream, numbers, scalars, self.home._high, self._payloads
        self._origins.numbers = self._numbers
        for line in self.lines:
            line.take(segment, self._origins, self.size)
        self._past += len(self._numbers)
        self._numbers, self._scalars, self._payloads = array("I"), array("d"), []
        self._origins, self.size = Issued(self.number, self.kinds), 0

    def uncut(self) -> Issued:
        """Return the origins of the next segment so far."""
        self._origins.numbers = self._numbers
        return self._origins

    # -- sending ---------------------------------------------------------------------------------

    def flush(self) -> None:
        """Send the log."""
        for line in self.lines:
            line.flush()

    def synchronize(self) -> None:
        """Wait for everything issued to its nodes; raise a failure that was not raised before."""
        with self.lock:
            self.flush()
        for line in self.lines:
            line.synchronize()

    @property
    def tensors(self) -> int:
        """Number of its tensors."""
        unused = len(self.rested) + len(self.resting) + sum(len(each._ids) for each in (self, *self.further))
        return self._high - unused - len(self.freed)

    def used(self) -> bool:
        """Return whether a surviving node may have tensors or commands of the space."""
        if self.over:
            return False
        lines = [line for log in (self, *self.further) for line in log.lines if line.lost is None]
        left = self.tensors or self.freed or not all(line.idle for line in lines)
        return bool(lines and left)

    def end(self) -> None:
        """End a lost space: ids that the program frees from now on are ignored."""
        self.over = True
        for log in (self, *self.further):
            log.freed = deque(maxlen=0)
        self.resting.clear()
