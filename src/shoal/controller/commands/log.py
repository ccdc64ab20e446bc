"""The log of one stream of a space: commands, ids, segments; :mod:`.space` says how they hang together."""

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

#: how often it is looked what the nodes have done, in commands
_LOOK = 32
#: in the place of the last call and its results
_NONE: tuple[int, list[int]] = (-1, [])


class CommandListener(Protocol):
    """Hears of commands; see :class:`shoal.controller.recording.recording.Recording`."""

    def issued(
        self, space: Any, number: int, ids: list[int], made: list[int], scalars: list[float], origin: Any
    ) -> None: ...

    def commanded(self, space: Any, numbers: Sequence[int]) -> None: ...

    def uploaded(self, space: Any, id: int, value: torch.Tensor) -> None: ...

    def awaits(self, space: Any, bytes: int) -> None: ...


class CommandLog:
    """Commands that are appended, and the ids of tensors; a :class:`.space.Space`.

    Attributes:
        number: by which its nodes know it: the index of its device, unless they have had another one there.
        device: ``node:index``.
        index: of the device.
        lines: of its nodes.
        parts: the spaces of its nodes one by one.
        lock: the master's.
        freed: ids that nothing holds any more, with their storage if other tensors may show it.
        calls: interned calls by key.
        blanks: the numbers of those that make tensors without elements.
        kinds: what the numbers of interned calls stand for.
        lost: why it cannot be used any more; None: it can.
        over: whether it is lost, and nothing of it is left on nodes that live.
        within: on which device of its nodes tensors are made; -1: the processor, also where they differ.
        issued, awaited: operations so far, and those that only the nodes know the results of.
        missed: calls that were new, so far, by their operators.
        listener: hears of what is appended, while a step is recorded.
        size: commands in the log.
        stream: whose log it is.
        home: the space that has the tensors, of which this is the log of a further stream; else itself.
        ordering: of the streams; None: there is only the default one.
        resting: ids that several streams were told to release, until they have: with lines and batches.
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
        """Append an interned call; the ids of its results.

        Args:
            number: of the call.
            ids: of its operands.
            scalars: its numbers.
            results: how many.
            origin: where the program issued it; of a recorded step, where each of its operations.
            steps: how many operations it is.
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
        except BaseException:  # a Ctrl-C leaves no half of a command
            del numbers[before[0] :], values[before[1] :], origins[before[2] :]
            raise
        self.issued += steps
        self._last = number, made
        try:
            self._appended(steps)
        except BaseException:  # a Ctrl-C while the program waits for the node
            self.freed.extend(made)  # they get no handles
            raise
        if self._sync:
            self._acknowledged(made)
        return made

    def _acknowledged(self, made: list[int]) -> None:
        """Wait until the nodes have done what was issued; raise what failed."""
        try:
            self.synchronize()
        except BaseException:
            self.freed.extend(made)  # they get no handles
            raise

    def new_id(self) -> int:
        """An id that no tensor has."""
        if not self._open:
            self._enter()
        if self.freed:
            self._free()
        return self._ids.pop() if self._ids else self._new_id()

    def _command(self, *numbers: int, made: Sequence[int] = ()) -> None:
        """Append a command, which makes tensors with these ids."""
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
        """The index of a payload of the next command, which must not be cut off from it."""
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
            id: int = self.freed[0]  # type: ignore[assignment]  # it comes without a storage
            self._numbers.fromlist([FREE, id])
            # A Ctrl-C in between frees it once more, which does nothing.
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

    # -- several streams; undisturbed, for ``tensor/ordering.py`` ----------------------------------

    @property
    def position(self) -> int:
        """How many numbers were appended."""
        return self._past + len(self._numbers)

    def note(self, *numbers: int) -> None:
        """Append a command, and send nothing."""
        self._last = _NONE
        if not self._open:
            self._enter()
        self._numbers.fromlist(list(numbers))
        self.size += 1

    def append(self, number: int, ids: list[int], scalars: list[float], results: int) -> list[int]:
        """Append an interned call, as :meth:`issue` does, and send nothing."""
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
        """An interned call is in the log."""
        try:
            self.look()
        except BaseException:  # a Ctrl-C while the program waits for the node
            self.freed.extend(made)  # they get no handles
            raise
        if self._sync:
            self._acknowledged(made)

    def look(self) -> None:
        """Send what was appended, if it is time."""
        self._ticks += 1
        if self._ticks >= _LOOK:
            self._look()

    def drop(self, command: int, id: int, *count: int) -> None:
        """Append a command that frees an id, without opening."""
        self._numbers.fromlist([command, id, *count])
        self.size += 1
        if command == FREE:
            self._ids.append(id)
        if not self._open:
            self.cut()

    # -- segments --------------------------------------------------------------------------------

    def _enter(self) -> None:
        """Open, so that commands may be appended."""
        if self.lost is None:
            undisturbed(self._become_open)
        if self.lost is not None:  # perhaps since a moment: whoever loses a line holds no lock
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
        """Close: what comes next on a line may be another space's, and name tensors of this one."""
        self._last = _NONE
        self.cut()
        self._open = False
        for line in self.lines:
            if line.open is self:
                line.open = None

    def lose(self, why: ShoalError) -> None:
        """One of its nodes is lost; the caller may have no lock."""
        self.lost = self.lost or why
        self._open = False

    def cut(self) -> None:
        """Make a segment of the log and of what was freed, for each line; undisturbed."""
        for line in self.lines:
            if line.open is not None and line.open is not self:
                line.open.cut()  # it may use what is freed here
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
        """Its next segment, as far as it is."""
        self._origins.numbers = self._numbers
        return self._origins

    # -- what is sent ----------------------------------------------------------------------------

    def flush(self) -> None:
        """Send what is in the log."""
        for line in self.lines:
            line.flush()

    def synchronize(self) -> None:
        """Wait for all that was issued to its nodes; raise what failed and was not raised yet."""
        with self.lock:
            self.flush()
        for line in self.lines:
            line.synchronize()

    @property
    def tensors(self) -> int:
        """How many tensors it has."""
        unused = len(self.rested) + len(self.resting) + sum(len(each._ids) for each in (self, *self.further))
        return self._high - unused - len(self.freed)

    def used(self) -> bool:
        """Whether one of its nodes lives and may have something of it, or do something for it."""
        if self.over:
            return False
        lines = [line for log in (self, *self.further) for line in log.lines if line.lost is None]
        left = self.tensors or self.freed or not all(line.idle for line in lines)
        return bool(lines and left)

    def end(self) -> None:
        """Mark a lost space as over: ids that the program frees from now on are dropped."""
        self.over = True
        for log in (self, *self.further):
            log.freed = deque(maxlen=0)
        self.resting.clear()
