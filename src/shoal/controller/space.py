"""A space of tensors, as the master keeps it: its ids, its interned calls, and its log.

The words of the mode's order, and how they hang together:

- A *space* is a set of ids with the tensors that they name, the calls that are interned for them, and the log
  of the commands on them.  Each node has one; a place of several nodes has one, which each of these nodes
  holds with tensors of its own.  A command is encoded once, however many nodes execute it.
- A *line* (:mod:`.line`) is the master's connection to one node, over which the commands of all spaces of
  that node go.
- A line has at most one *open* space.  A space that gets a command opens on all its lines, and closes those
  that were open there; so each node gets its commands in the order of the program, whatever spaces they are
  of.  Spaces that share no node do not close each other.
- A *segment* is what a space's log holds when it is cut: because another space opens on one of its lines, or
  because a line sends what it has.  It is a tuple, as the node takes it::

      space, stream, numbers, scalars, high, payloads

  ``space`` is the space's number, ``stream`` is 0, ids are below ``high``, and :mod:`.commands` says what the
  numbers mean.  Each line of the space gets the segment into its outbox.
- A *batch* is the segments of an outbox, sent as one call; the reply acknowledges it.

A command that concerns several spaces is a command in the log of each.  What a node answers (``FETCH``,
``ASK``, ``STATE``) comes with the reply of the batch, so it belongs to a line.

All of this happens under the master's lock.  An id is free for another tensor as soon as its FREE is in the
log, since a node executes the log in order.
"""

from __future__ import annotations

import pickle
import threading
from array import array
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from .. import config
from ..errors import ShoalError, UsageError
from ..wording import named
from .commands import (
    ASK,
    DEFINE,
    ERASE,
    FETCH,
    FORGET,
    FREE,
    ITEM,
    KEEP,
    PROGRAM,
    PUT,
    SEED,
    SHARE,
    STATE,
    Template,
)
from .history import MAKING, Issued, Kind
from .interrupts import undisturbed
from .issuing import Origin, issuing_line
from .line import Batch, Line
from .metadata import answer_in_words, forget

#: how often it is looked what the nodes have done, in commands
_LOOK = 32
#: in the place of the last call and its results
_NONE: tuple[int, list[int]] = (-1, [])


class Listener(Protocol):
    """Hears of commands; see :class:`.recording.Recording`."""

    def issued(
        self, space: Space, number: int, ids: list[int], made: list[int], scalars: list[float], origin: Any
    ) -> None: ...

    def commanded(self, space: Space, numbers: Sequence[int]) -> None: ...

    def uploaded(self, space: Space, id: int, value: torch.Tensor) -> None: ...

    def awaits(self, space: Space, bytes: int) -> None: ...


class Space:
    """The tensors of one node, or of a place of several.

    Attributes:
        number: by which its nodes know it: the index of its device, unless they have had another one there.
        device: ``node:index``.
        index: of the device.
        lines: of its nodes.
        parts: the spaces of its nodes one by one.
        lock: the master's.
        freed: ids that nothing holds any more.
        calls: interned calls by key.
        blanks: the numbers of those that make tensors without elements.
        kinds: what the numbers of interned calls stand for.
        lost: why it cannot be used any more; None: it can.
        within: on which device of its nodes tensors are made; -1: the processor, also where they differ.
        issued, awaited: operations so far, and those that only the nodes know the results of.
        missed: calls that were new, so far, by their operators.
        listener: hears of what is appended, while a step is recorded.
        size: commands in the log.
    """

    def __init__(
        self,
        device: torch.device,
        lines: tuple[Line, ...],
        lock: threading.RLock,
        parts: tuple[Space, ...] = (),
        number: int | None = None,
    ) -> None:
        forget(device)
        self.device = device
        self.index: int = device.index
        self.number = self.index if number is None else number
        self.lines = lines
        self.parts = parts or (self,)
        self.lock = lock
        self.freed: deque[int] = deque()
        self.calls: dict[Any, Any] = {}
        self.blanks: set[int] = set()
        self._last = _NONE
        self.issued = self.awaited = self.size = 0
        self.missed: Counter[str] = Counter()
        self.listener: Listener | None = None
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
        self._high = 0
        self.lost: ShoalError | None = None
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
        self._appended(steps)
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

    def put(self, tensor: torch.Tensor, blank: int | None = None) -> int:
        """Send a tensor, of which the caller gives a copy, perhaps in the place of a blank one; its id."""
        id = self.new_id() if blank is None else blank
        self._command(PUT, id, self._payload(tensor))
        return id

    def expect(self, bytes: int) -> None:
        """So much will come from other nodes; wait for these if it is too much."""
        for line in self.lines:
            line.expect(bytes)
        if self.listener is not None:
            self.listener.awaits(self, bytes)

    def is_blank(self, id: int) -> bool:
        """Whether the last command made this tensor, without elements."""
        number, made = self._last
        return number in self.blanks and made == [id]

    def new_id(self) -> int:
        """An id that no tensor has."""
        if not self._open:
            self._enter()
        if self.freed:
            self._free()
        return self._ids.pop() if self._ids else self._new_id()

    def program(self, recipe: tuple[Any, ...]) -> None:
        """Tell the nodes of a recorded step."""
        pickled = pickle.dumps(recipe)
        self._command(PROGRAM, self._payload(pickled))

    def erase(self, number: int) -> None:
        """Let the nodes forget a recorded step."""
        self._command(ERASE, number)

    def define(self, definition: tuple[Any, ...]) -> None:
        """Tell the nodes of a call; raises what pickling raises before anything is in the log."""
        pickled = pickle.dumps(definition)
        self._command(DEFINE, self._payload(pickled))

    def forget(self) -> None:
        """Forget all interned calls, here and there."""
        self.calls.clear()
        self.blanks.clear()
        undisturbed(self.cut)  # the numbers stand for other calls from now on
        self.kinds = {}
        self._origins = Issued(self.number, self.kinds)
        self._command(FORGET)

    def seed(self, seed: int) -> None:
        """Seed the random generator of each node."""
        self._command(SEED, seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF)

    def keep(self, position: int) -> int:
        """Keep a tensor of what was asked last; its id."""
        id = self.new_id()
        self._command(KEEP, id, position)
        return id

    def share(self, id: int, other: Space) -> int:
        """Name a tensor of another space here too, on the nodes of this one; its id here."""
        if other.lost is not None and not set(self.lines) <= set(other.lines):
            raise other.lost
        new = self.new_id()
        self._command(SHARE, other.number, id, self.number, new)
        return new

    def give(self, id: int, other: Space, new: int) -> None:
        """Name a tensor of this space in another one too, on the nodes of this one."""
        self._command(SHARE, self.number, id, other.number, new)

    def part(self, node: int | str | torch.device) -> Space:
        """The space of one of its nodes.

        Raises:
            UsageError: it is none of them.
        """
        index: int | None = None
        if isinstance(node, int):
            index = node
        elif torch.device(node).type == self.device.type:
            index = torch.device(node).index
        for part in self.parts:
            if part.index == index:
                return part
        raise UsageError(f"{self.device} has no part on {node}: it is {self.nodes}")

    @property
    def nodes(self) -> str:
        """``node 2``, or ``nodes 0, 2-5``."""
        return named("node", (line.index for line in self.lines))

    def _command(self, *numbers: int) -> None:
        self._append(numbers)
        self._appended()

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
        self._high += 1
        return self._high - 1

    def _free(self) -> None:
        while self.freed:
            id = self.freed[0]
            self._numbers.fromlist([FREE, id])
            # A Ctrl-C in between frees it once more, which does nothing.
            self.size += 1
            self.freed.popleft()
            self._ids.append(id)

    def _appended(self, steps: int = 1) -> None:
        self.size += steps
        self._ticks += steps
        if self._ticks >= _LOOK:
            self._ticks = 0
            for line in self.lines:
                line.look()

    # -- segments --------------------------------------------------------------------------------

    def _enter(self) -> None:
        """Open, so that commands may be appended."""
        if self.lost is None:
            undisturbed(self._become_open)
        if self.lost is not None:  # perhaps since a moment: whoever loses a line holds no lock
            self._open = False
            raise self.lost

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
        segment = self.number, 0, numbers, scalars, self._high, self._payloads
        self._origins.numbers = self._numbers
        for line in self.lines:
            line.take(segment, self._origins, self.size)
        self._numbers, self._scalars, self._payloads = array("I"), array("d"), []
        self._origins, self.size = Issued(self.number, self.kinds), 0

    def uncut(self) -> Issued:
        """Its next segment, as far as it is."""
        self._origins.numbers = self._numbers
        return self._origins

    # -- sync points -----------------------------------------------------------------------------

    def flush(self) -> None:
        """Send what is in the log."""
        for line in self.lines:
            line.flush()

    def fetch(self, id: int) -> torch.Tensor:
        """The elements of a tensor.

        Raises:
            UsageError: there are several nodes, each with elements of its own.
            RemoteOpError: they could not be computed.
            NodeLost: the node died.
        """
        if len(self.lines) > 1:
            raise self.ambiguous()
        return self.fetch_all(id)[0]

    def item(self, id: int) -> bool | int | float | complex:
        """The number in a tensor of one element; raises as :meth:`fetch` does."""
        if len(self.lines) > 1:
            raise self.ambiguous()
        return self._answers(ITEM, id)[0]  # type: ignore[no-any-return]

    def ambiguous(self) -> UsageError:
        """For who wants one tensor of a place of several nodes."""
        return UsageError(
            f"a tensor on {self.device} has elements on each of {self.nodes}: "
            f"x.on({self.lines[0].index}) is one node's part, and mean(x) of its place the mean of all"
        )

    def fetch_all(self, id: int) -> list[torch.Tensor]:
        """The elements of a tensor on each node."""
        return self._answers(FETCH, id)

    def asked(self, command: int, payload: Any, *numbers: int) -> Callable[[], Any]:
        """Send a command that its one node replies to; what waits for that and gives it."""
        with self.lock:
            line, batch = self._asked((command, self._payload(payload), *numbers))[0]
        return lambda: line.answers(batch)[0]

    def send(self, *command: int) -> None:
        """Append a command that has no reply."""
        with self.lock:
            self._command(*command)

    def take(self, command: int, *numbers: int) -> int:
        """Give a tensor that a command names an id; that."""
        id = self.new_id()
        self._command(command, id, *numbers)
        return id

    def _answers(self, *command: int) -> list[Any]:
        """The replies of the nodes to a command."""
        return [line.answers(batch)[0] for line, batch in self._asked(command)]

    def _asked(self, command: tuple[int, ...]) -> list[tuple[Line, Batch]]:
        """Send a command that is replied to; the batches in which it is."""
        with self.lock:
            # No look at the lines, which may send it: ids that are freed then are a batch of their own,
            # and that one would be waited for.
            self._append(command)
            self.size += 1
            # As whoever asks flushes under the lock, no other values are in the batches.
            return [(line, line.flush_asked()) for line in self.lines]

    def ask(self, operator: str, args: list[Template], kwargs: dict[str, Template]) -> Any:
        """Run an operator now; what it gives, with metadata in the place of tensors.

        Raises:
            UsageError: its nodes give different ones.
        """
        question = pickle.dumps((operator, args, kwargs))
        self._asking = operator.replace("::", ".")
        self.issued, self.awaited = self.issued + 1, self.awaited + 1
        with self.lock:
            answers = self._answers(ASK, self._payload(question))
        for line, answer in zip(self.lines, answers, strict=True):
            if answer != answers[0]:
                first, one, other = self.lines[0].index, answer_in_words(answers[0]), answer_in_words(answer)
                raise UsageError(
                    f"{operator}: a tensor on {self.device} must be alike on all of its nodes, and this is "
                    f"{one} on node {first}, and {other} on node {line.index}; use x.on({first})"
                )
        return answers[0]

    def random_state(self, state: torch.Tensor | None = None) -> torch.Tensor | None:
        """The state of the random generator of a node, or set it."""
        with self.lock:
            if state is None:
                return self._answers(STATE, self._payload(None))[0]  # type: ignore[no-any-return]
            self._command(STATE, self._payload(state))
            return None

    def synchronize(self) -> None:
        """Wait for all that was issued to its nodes; raise what failed and was not raised yet."""
        with self.lock:
            self.flush()
        for line in self.lines:
            line.synchronize()

    @property
    def tensors(self) -> int:
        """How many tensors it has."""
        return self._high - len(self._ids) - len(self.freed)
