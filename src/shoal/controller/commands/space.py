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

  ``space`` is the space's number, ``stream`` is 0, ids are below ``high``, and ``protocol/commands.py`` says
  what the numbers mean.  Each line of the space gets the segment into its outbox.
- A *batch* is the segments of an outbox, sent as one call; the reply acknowledges it.

A command that concerns several spaces is a command in the log of each.  An answer of a node (``FETCH``,
``ASK``, ``STATE``) comes with the reply of the batch, so it belongs to a line.

All of this happens under the master's lock.  An id is free for another tensor as soon as its FREE is in the
log, since a node executes the log in order.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from ...common.wording import named
from ...errors import UsageError
from ..protocol.commands import ASK, DEFINE, ERASE, FORGET, KEEP, PROGRAM, PUT, SEED, SHARE, STATE, Template
from ..protocol.metadata import answer_in_words
from .batch import SegmentBatch
from .history import Issued
from .interrupts import undisturbed
from .line import NodeConnection
from .log import CommandLog
from .losses import anew


class Space(CommandLog):
    """The tensors of one node, or of a place of several; :class:`.log.CommandLog` has its attributes."""

    __slots__ = ()
    parts: tuple[Space, ...]

    def put(self, tensor: torch.Tensor, blank: int | None = None) -> int:
        """Send a tensor, of which the caller gives a copy, perhaps in the place of a blank one; its id."""
        for line in self.lines:
            line.carry(tensor.nbytes)
        id = self.new_id() if blank is None else blank
        self._command(PUT, id, self._payload(tensor), made=[id] if blank is None else [])
        return id

    def expect(self, bytes: int) -> None:
        """Count bytes that will come from other nodes; wait for its nodes if these are too many."""
        for line in self.lines:
            line.expect(bytes)
        if self.listener is not None:
            self.listener.awaits(self, bytes)

    def is_blank(self, id: int) -> bool:
        """Whether the last command made this tensor, without elements."""
        number, made = self._last
        return number in self.blanks and made == [id]

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
        with self._drawing():
            self._command(SEED, seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF)

    def keep(self, position: int) -> int:
        """Keep a tensor of what was asked last; its id."""
        id = self.new_id()
        self._command(KEEP, id, position, made=[id])
        return id

    def share(self, id: int, other: Space) -> int:
        """Name a tensor of another space here too, on the nodes of this one; its id here."""
        if other.lost is not None and not set(self.lines) <= set(other.lines):
            raise anew(other.lost)
        new = self.new_id()
        self._command(SHARE, other.number, id, self.number, new, made=[new])
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

    def ambiguous(self) -> UsageError:
        """The error for a program that wants one tensor of a place of several nodes."""
        return UsageError(
            f"a tensor on {self.device} has elements on each of {self.nodes}: "
            f"x.on({self.lines[0].index}) is one node's part, and mean(x) of its place the mean of all"
        )

    def asked(self, command: int, payload: Any, *numbers: int) -> Callable[[], Any]:
        """Send a command that its one node replies to; a function that waits for the reply and returns it."""
        with self.lock:
            if self.ordering is not None:
                self.ordering.fence(self)
            line, batch = self.send_asked(command, self._payload(payload), *numbers)[0]
            if self.ordering is not None:
                self.ordering.fenced(self)
        return lambda: line.answers(batch)[0]

    def send(self, *command: int) -> None:
        """Append a command that has no reply."""
        with self.lock:
            self._command(*command)

    def take(self, command: int, *numbers: int) -> int:
        """Append a command that makes a tensor; the tensor's id."""
        id = self.new_id()
        self._command(command, id, *numbers, made=[id])
        if self.ordering is not None:
            self.ordering.fenced(self)
        return id

    def send_asked(self, *command: int) -> list[tuple[NodeConnection, SegmentBatch]]:
        """Append and send a command that is replied to; the caller holds the lock."""
        # No look at the lines, which may send it: ids that are freed then are a batch of their own,
        # and that one would be waited for.
        self._append(command)
        self.size += 1
        # As whoever asks flushes under the lock, no other values are in the batches.
        return [(line, line.flush_asked()) for line in self.lines]

    def ask(
        self,
        operator: str,
        args: list[Template],
        kwargs: dict[str, Template],
        ids: list[int],
        scalars: Sequence[float],
    ) -> Any:
        """Run an operator now; its results, with metadata in the place of tensors.

        Raises:
            UsageError: its nodes give different ones.
        """
        question = pickle.dumps((operator, args, kwargs, ids, scalars))
        self._asking = operator.replace("::", ".")
        self.issued, self.awaited = self.issued + 1, self.awaited + 1
        with self.lock:
            asked = self.send_asked(ASK, self._payload(question))
        answers = [line.answers(batch)[0] for line, batch in asked]
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
        with self.lock, self._drawing():
            if state is not None:
                self._command(STATE, self._payload(state))
                return None
            line, batch = self.send_asked(STATE, self._payload(None))[0]
        return line.answers(batch)[0]  # type: ignore[no-any-return]

    def _drawing(self) -> AbstractContextManager[None]:
        """Use the random generators, after what other streams did with them."""
        if self.ordering is None:
            return nullcontext()
        return self.ordering.using(self, (), (), self.ordering.generators(self))


class Branch(Space):
    """The log of a further stream for a space, which has the tensors.

    Attributes:
        holders: how many of the program's streams it is.
    """

    __slots__ = ("holders",)

    def __init__(self, home: Space, stream: int, lines: tuple[NodeConnection, ...]) -> None:
        super().__init__(home.device, lines, home.lock, number=home.number, home=home)
        self.stream = stream
        self.holders = 0
        self.freed = home.freed
        self.ordering = home.ordering
        home.further.append(self)

    @property
    def tensors(self) -> int:
        """They are counted with its home."""
        return 0


def apart(*homes: Space) -> AbstractContextManager[None]:
    """Append commands that nodes execute together, or on memory that nobody knows, apart from other streams.

    The caller holds the lock.
    """
    streams = homes[0].ordering
    return nullcontext() if streams is None else streams.apart(*homes)
