"""The master's half of a space: ids of tensors, interned calls, and the command log.

Terms:

- A *space* is a set of tensor ids, the calls interned for them, and the log of commands on them. Each node
  has a space. A place of several nodes has one, too; each of its nodes holds its own part of the tensors. A
  command is encoded once for all nodes of the space.
- A *connection* (:mod:`.line`) to a node carries the commands of all spaces of that node.
- A connection has at most one *open* space. A space that gets a command opens on all its connections and
  closes the spaces open there, so each node gets its commands in the order of the program, across spaces.
  Spaces that share no node do not close each other.
- A *segment* is the part of a log that is cut when another space opens on one of the connections, or when a
  connection sends. Each connection of the space gets it. It is a tuple::

      space, stream, numbers, scalars, high, payloads

  ``space`` and ``stream`` are numbers, ids are below ``high``; ``protocol/commands.py`` defines the numbers.
- A *batch* is the segments that a connection sends in one call; the reply acknowledges it.

A command on several spaces is in the log of each. Values for the master (``FETCH``, ``ASK``, ``STATE``) are
part of the batch's reply, one per connection.

All of this happens under the master's lock. An id can be reused as soon as its FREE is in the log, because a
node executes the log in order.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from ...common.formatting import format_numbers
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
    """The tensors of one node or of a place of several; :class:`.log.CommandLog` documents the attributes."""

    __slots__ = ()
    parts: tuple[Space, ...]

    def put(self, tensor: torch.Tensor, blank: int | None = None) -> int:
        """Send a tensor, a copy made by the caller; return its id. `blank`: id of an empty tensor to fill."""
        for line in self.lines:
            line.carry(tensor.nbytes)
        id = self.new_id() if blank is None else blank
        self._command(PUT, id, self._payload(tensor), made=[id] if blank is None else [])
        return id

    def expect(self, bytes: int) -> None:
        """Count bytes of a copy from other nodes; wait for the nodes if there are too many."""
        for line in self.lines:
            line.expect(bytes)
        if self.listener is not None:
            self.listener.awaits(self, bytes)

    def is_blank(self, id: int) -> bool:
        """Return whether the last command made this tensor, without elements."""
        number, made = self._last
        return number in self.blanks and made == [id]

    def program(self, recipe: tuple[Any, ...]) -> None:
        """Send the program of a recorded step."""
        pickled = pickle.dumps(recipe)
        self._command(PROGRAM, self._payload(pickled))

    def erase(self, number: int) -> None:
        """Erase the program of a recorded step on the nodes."""
        self._command(ERASE, number)

    def define(self, definition: tuple[Any, ...]) -> None:
        """Send the definition of a call; pickling errors are raised before the log changes."""
        pickled = pickle.dumps(definition)
        self._command(DEFINE, self._payload(pickled))

    def forget(self) -> None:
        """Forget all interned calls, here and on the nodes."""
        self.calls.clear()
        self.blanks.clear()
        undisturbed(self.cut)  # the numbers will be reused for other calls
        self.kinds = {}
        self._origins = Issued(self.number, self.kinds)
        self._command(FORGET)

    def seed(self, seed: int) -> None:
        """Seed the random generator of each node."""
        with self._drawing():
            self._command(SEED, seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF)

    def keep(self, position: int) -> int:
        """Keep a result of the last ASK; return its id."""
        id = self.new_id()
        self._command(KEEP, id, position, made=[id])
        return id

    def share(self, id: int, other: Space) -> int:
        """Share a tensor of another space on the nodes of this one; return its id here."""
        if other.lost is not None and not set(self.lines) <= set(other.lines):
            raise anew(other.lost)
        new = self.new_id()
        self._command(SHARE, other.number, id, self.number, new, made=[new])
        return new

    def give(self, id: int, other: Space, new: int) -> None:
        """Share a tensor of this space with another one, as id `new`, on the nodes of this space."""
        self._command(SHARE, self.number, id, other.number, new)

    def part(self, node: int | str | torch.device) -> Space:
        """Return the space of one of its nodes; raises `UsageError` for any other node."""
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
        return format_numbers("node", (line.index for line in self.lines))

    def ambiguous(self) -> UsageError:
        """Return the error for an operation that needs one tensor, not one per node."""
        return UsageError(
            f"a tensor on {self.device} has elements on each of {self.nodes}: "
            f"use x.on({self.lines[0].index}) for one node's part, or place.mean(x) for the mean of all"
        )

    def asked(self, command: int, payload: Any, *numbers: int) -> Callable[[], Any]:
        """Send a command with a reply to its only node; return a function that waits for the reply."""
        with self.lock:
            if self.ordering is not None:
                self.ordering.fence(self)
            line, batch = self.send_asked(command, self._payload(payload), *numbers)[0]
            if self.ordering is not None:
                self.ordering.fenced(self)
        return lambda: line.answers(batch)[0]

    def send(self, *command: int) -> None:
        """Append a command without a reply."""
        with self.lock:
            self._command(*command)

    def take(self, command: int, *numbers: int) -> int:
        """Append a command that makes a tensor; return its id."""
        id = self.new_id()
        self._command(command, id, *numbers, made=[id])
        if self.ordering is not None:
            self.ordering.fenced(self)
        return id

    def send_asked(self, *command: int) -> list[tuple[NodeConnection, SegmentBatch]]:
        """Append and send a command with a reply; the caller holds the lock."""
        # Does not poll the connections: that may send the command, and ids freed afterwards would be a batch
        # of their own, which would be waited for.
        self._append(command)
        self.size += 1
        # Each such command is flushed under the lock, so the batches contain no other values.
        return [(line, line.flush_asked()) for line in self.lines]

    def ask(
        self,
        operator: str,
        args: list[Template],
        kwargs: dict[str, Template],
        ids: list[int],
        scalars: Sequence[float],
    ) -> Any:
        """Run an operator and wait for its results, with metadata instead of tensors.

        Raises `UsageError` if the nodes return different results.
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
                    f"{operator}: a result on {self.device} must be alike on all of its nodes, but is "
                    f"{one} on node {first} and {other} on node {line.index}; use x.on({first})"
                )
        return answers[0]

    def random_state(self, state: torch.Tensor | None = None) -> torch.Tensor | None:
        """Return the state of a node's random generator, or set it."""
        with self.lock, self._drawing():
            if state is not None:
                self._command(STATE, self._payload(state))
                return None
            line, batch = self.send_asked(STATE, self._payload(None))[0]
        return line.answers(batch)[0]  # type: ignore[no-any-return]

    def _drawing(self) -> AbstractContextManager[None]:
        """Return a context manager that orders uses of the random generators across streams."""
        if self.ordering is None:
            return nullcontext()
        return self.ordering.using(self, (), (), self.ordering.generators(self))


class Branch(Space):
    """The log of a further stream of a space; `holders` is the number of `Stream` objects that share it."""

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
        """Zero: the tensors are counted in the home space."""
        return 0


def apart(*homes: Space) -> AbstractContextManager[None]:
    """Return a context manager for commands that must not overlap other streams: collectives, or commands on
    memory that is not tracked. The caller holds the lock.
    """
    streams = homes[0].ordering
    return nullcontext() if streams is None else streams.apart(*homes)
