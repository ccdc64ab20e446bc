"""The master's half of a space: ids of tensors, interned calls, and the command log.

Terms:

- A *space* is a set of tensor ids, the calls interned for them, and the log of commands on them. Each node
  has a space. A place of several nodes has one, too; each of its nodes holds its own part of the tensors. A
  command is encoded once for all nodes of the space.
- A *connection* (:mod:`.connection`) to a node carries the commands of all spaces of that node.
- A connection has at most one *open* space. A space that gets a command opens on all its connections and
  closes the spaces open there, so each node gets its commands in the order of the program, across spaces.
  Spaces that share no node do not close each other.
- A *segment* is the part of a log that is cut when another space opens on one of the connections, or when a
  connection sends. Each connection of the space gets it, as a :class:`..protocol.commands.Segment`.
- A *batch* is the segments that a connection sends in one call; the reply acknowledges it.

A command on several spaces is in the log of each. Values for the master (``FETCH``, ``ASK``, ``STATE``) are
part of the batch's reply, one per connection.

All of this happens under the master's lock. An id can be reused as soon as its FREE is in the log, because a
node executes the log in order.
"""

from __future__ import annotations

import pickle
import threading
from array import array
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ... import config
from ...common.formatting import format_numbers
from ...errors import ShoalError, UsageError
from ..node import sessions
from ..protocol.commands import (
    ASK,
    FORGET,
    FREE,
    PUT,
    SEED,
    SHARE,
    STATE,
    Segment,
    Template,
)
from ..protocol.metadata import forget_device, format_reply
from .batch import SegmentBatch, fresh_copy
from .connection import NodeConnection, StreamConnection
from .history import MAKING, CallSignature, SegmentOrigins
from .interrupts import call_without_interrupt
from .origin import CallOrigin, current_origin
from .storage import Storage

if TYPE_CHECKING:
    from ..recording.recording import Recording
    from ..tensor.stream_order import StreamOrder

#: number of commands between two polls for acknowledgements
POLL_INTERVAL_COMMANDS = 32
#: no last call
_NO_CALL: tuple[int, list[int]] = (-1, [])


class Space:
    """The master's half of a space: the tensors of one node or of a place of several.

    Attributes:
        number: number of the space on its nodes: the device index, or a new one if it replaces a lost space.
        device: ``node:index``.
        index: index of the device.
        connections: connections to its nodes.
        parts: the spaces of its single nodes.
        lock: the master's lock.
        freed: ids without handles that are not freed yet; with their storage if it may be shared.
        calls: interned calls by key.
        kinds: interned calls by number.
        lost: the error if a node is lost, otherwise None.
        is_forgotten: True if it is lost and the surviving nodes hold nothing of it.
        within: the device within its nodes where tensors are created; -1: the CPU, or the nodes differ.
        issued: operations so far.
        node_determined: operations for which the master waited for the metadata of the nodes.
        new_calls: number of new calls so far, by operator.
        listener: notified of commands while a step is recorded.
        size: commands in the log.
        stream: number of the stream.
        home: the space that has the tensors, if this is the log of a further stream; else itself.
        ordering: the order of the streams; None: there is only the default stream.
        releasing_ids: ids that several streams release, with the connections and batches to wait for.
        reusable_ids: ids that any stream may use.
    """

    __slots__ = (  # faster than a dictionary
        "_asking", "_commands_since_poll", "_cut_position", "_ids", "_last", "_next_id", "_numbers", "_open",
        "_origins", "_payloads", "_scalars", "_sync", "calls", "connections", "device", "freed", "home",
        "index", "is_forgotten", "issued", "kinds", "listener", "lock", "lost", "new_calls",
        "node_determined", "number", "ordering", "parts", "releasing_ids", "reusable_ids", "size", "stream",
        "stream_logs", "within",
    )  # fmt: skip

    def __init__(
        self,
        device: torch.device,
        connections: tuple[StreamConnection, ...],
        lock: threading.RLock,
        parts: tuple[Space, ...] = (),
        number: int | None = None,
        home: Space | None = None,
    ) -> None:
        if home is None:
            forget_device(device)
        self.device = device
        self.index: int = device.index
        self.number = self.index if number is None else number
        self.connections = connections
        self.parts: tuple[Space, ...] = parts or (self,)
        self.lock = lock
        self.freed: deque[int | tuple[int, Storage]] = deque()
        self.calls: dict[Any, Any] = {}
        self._last = _NO_CALL
        self.issued = self.node_determined = self.size = 0
        self.new_calls: Counter[str] = Counter()
        self.listener: Recording | None = None
        self._open = False
        self._numbers = array("I")
        self._scalars = array("d")
        self._payloads: list[Any] = []
        self.kinds: dict[int, CallSignature] = {}
        self._origins = SegmentOrigins(self.number, self.kinds)
        self._asking = ""
        self._commands_since_poll = 0
        self._sync = config.CONTROLLER.get() == "sync"
        self._ids: list[int] = []
        self._next_id = self._cut_position = 0
        self.stream = 0
        self.home: Space = self if home is None else home
        self.ordering: StreamOrder | None = connections[0].node.ordering
        self.releasing_ids: deque[tuple[int, list[tuple[StreamConnection, int]]]] = deque()
        self.reusable_ids: list[int] = []
        self.stream_logs: list[StreamLog] = []
        self.lost: ShoalError | None = None
        self.is_forgotten = False
        within = {connection.node.within for connection in connections}
        self.within = within.pop() if len(within) == 1 else -1
        for connection in connections:
            connection.spaces.append(self)
            self.lost = self.lost or connection.lost

    # -- the log; the caller holds the lock -----------------------------------------------------

    def issue(
        self,
        number: int,
        ids: list[int],
        scalars: list[float],
        results: int,
        origin: CallOrigin = None,
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
            self._ensure_open()
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
            origins.append(origin or current_origin())
            if self.listener is not None:
                self.listener.issued(self, number, ids, made, scalars, origins[-1])
        except BaseException:  # a Ctrl-C must not leave half a command
            del numbers[before[0] :], values[before[1] :], origins[before[2] :]
            raise
        self.issued += steps
        self.size += steps
        self._last = number, made
        self.poll(steps, made, self._sync)
        return made

    def new_id(self) -> int:
        """Return an unused id."""
        if not self._open:
            self._ensure_open()
        if self.freed:
            self._free()
        return self._ids.pop() if self._ids else self._new_id()

    def _command(self, *numbers: int, made: Sequence[int] = ()) -> None:
        """Append a command that makes tensors with the ids `made`."""
        self._append(numbers)
        self.size += 1
        self.poll(made=made)

    def _append(self, numbers: tuple[int, ...]) -> None:
        self._last = _NO_CALL
        if self.listener is not None:
            self.listener.command_issued(self, numbers)
        if not self._open:
            self._ensure_open()
        if numbers[0] in MAKING:
            self._origins.add_maker(len(self._numbers), numbers[0], self._asking)
        self._numbers.fromlist(list(numbers))

    def _payload(self, value: Any) -> int:
        """Add a payload for the next command; return its index. The two must be in one segment."""
        if not self._open:
            self._ensure_open()
        self._payloads.append(value)
        return len(self._payloads) - 1

    def _new_id(self) -> int:
        home = self.home
        id: int = home.reusable_ids.pop() if home.reusable_ids else home._next_id
        home._next_id = max(home._next_id, id + 1)
        return id

    def _free(self) -> None:
        if self.ordering is not None:
            call_without_interrupt(partial(self.ordering.free, self.home))
            return
        while self.freed:
            id: int = self.freed[0]  # type: ignore[assignment]  # without storage: there is one stream
            self._numbers.fromlist([FREE, id])
            # A Ctrl-C before popleft() frees the id twice, which is harmless.
            self.size += 1
            self.freed.popleft()
            self._ids.append(id)

    def poll(self, steps: int = 1, made: Sequence[int] = (), synchronizes: bool = False) -> None:
        """Count appended commands; poll the connections if due, which may send and wait.

        Frees the ids `made` if a wait fails or a Ctrl-C ends it: they get no handles.
        """
        self._commands_since_poll += steps
        try:
            if self._commands_since_poll >= POLL_INTERVAL_COMMANDS:
                self._commands_since_poll = 0
                for connection in self.connections:
                    connection.poll()
            if synchronizes:
                self.synchronize()
        except BaseException:
            self.freed.extend(made)
            raise

    # -- several streams; called with Ctrl-C deferred, by ``tensor/stream_order.py`` --------------------

    @property
    def position(self) -> int:
        """Number of numbers appended so far."""
        return self._cut_position + len(self._numbers)

    def append_command(self, *numbers: int) -> None:
        """Append a command without sending."""
        self._last = _NO_CALL
        if not self._open:
            self._ensure_open()
        self._numbers.fromlist(list(numbers))
        self.size += 1

    def append(self, number: int, ids: list[int], scalars: list[float], results: int) -> list[int]:
        """Append an interned call, as :meth:`issue` does, without sending."""
        made = [self._ids.pop() if self._ids else self._new_id() for _ in range(results)]
        self.append_command(number, *ids, *made)
        self._scalars.fromlist(scalars)
        self._origins.append(current_origin())
        self._last = number, made
        self.issued += 1
        listener = self.home.listener
        if listener is not None:
            listener.issued(self, number, ids, made, scalars, self._origins[-1])
        return made

    def appended(self, made: list[int]) -> None:
        """Send if due, after :meth:`append` added a call with results `made`."""
        self.poll(made=made, synchronizes=self._sync)

    def append_free(self, command: int, id: int, *count: int) -> None:
        """Append a command that frees an id, without opening the space."""
        self._numbers.fromlist([command, id, *count])
        self.size += 1
        if command == FREE:
            self._ids.append(id)
        if not self._open:
            self.cut()

    # -- segments --------------------------------------------------------------------------------

    def _ensure_open(self) -> None:
        """Open the space, so that commands may be appended."""
        if self.lost is None:
            call_without_interrupt(self._open_on_connections)
        if self.lost is not None:  # checked again: lose() may run without the lock
            self._open = False
            self.raise_if_lost()

    def _open_on_connections(self) -> None:
        for connection in self.connections:
            if connection.open is not None and connection.open is not self:
                connection.open.close_log()
        for connection in self.connections:
            connection.open = self
            connection.flusher.wake()
        self._open = True

    def close_log(self) -> None:
        """Close the space: the next commands on a connection may be another space's and use its tensors."""
        self._last = _NO_CALL
        self.cut()
        self._open = False
        for connection in self.connections:
            if connection.open is self:
                connection.open = None

    def raise_if_lost(self) -> None:
        """Raise the error if a node of the space is lost."""
        if self.lost is not None:
            raise fresh_copy(self.lost)

    def lose(self, why: ShoalError) -> None:
        """Mark the space as lost with one of its nodes; the caller need not hold the lock."""
        self.lost = self.lost or why
        self._open = False

    def cut(self) -> None:
        """Make a segment of the log and the frees, for each connection; called with Ctrl-C deferred."""
        for connection in self.connections:
            if connection.open is not None and connection.open is not self:
                connection.open.cut()  # it may use tensors that are freed here
        if self.freed:
            self._free()
        if not self.size:
            return
        numbers, scalars = self._numbers.tobytes(), self._scalars.tobytes()
        segment = Segment(self.number, self.stream, numbers, scalars, self.home._next_id, self._payloads)
        self._origins.numbers = self._numbers
        for connection in self.connections:
            connection.add_segment(segment, self._origins, self.size)
        self._cut_position += len(self._numbers)
        self._numbers, self._scalars, self._payloads = array("I"), array("d"), []
        self._origins, self.size = SegmentOrigins(self.number, self.kinds), 0

    def next_segment_origins(self) -> SegmentOrigins:
        """Return the origins of the next segment so far."""
        self._origins.numbers = self._numbers
        return self._origins

    # -- sending ---------------------------------------------------------------------------------

    def flush(self) -> None:
        """Send the log."""
        for connection in self.connections:
            connection.flush()

    def synchronize(self) -> None:
        """Wait for everything issued to its nodes; raise a failure that was not raised before."""
        with self.lock:
            self.flush()
        for connection in self.connections:
            connection.node.synchronize()

    @property
    def tensors(self) -> int:
        """Number of its tensors."""
        unused = (
            len(self.reusable_ids)
            + len(self.releasing_ids)
            + sum(len(each._ids) for each in (self, *self.stream_logs))
        )
        return self._next_id - unused - len(self.freed)

    def used(self) -> bool:
        """Return whether a surviving node may have tensors or commands of the space."""
        if self.is_forgotten:
            return False
        connections = [
            connection
            for log in (self, *self.stream_logs)
            for connection in log.connections
            if connection.lost is None
        ]
        left = self.tensors or self.freed or not all(connection.idle for connection in connections)
        return bool(connections and left)

    def end(self) -> None:
        """End a lost space: ids that the program frees from now on are ignored."""
        self.is_forgotten = True
        for log in (self, *self.stream_logs):
            log.freed = deque(maxlen=0)
        self.releasing_ids.clear()

    # -- commands ----------------------------------------------------------------------------------

    def put(self, tensor: torch.Tensor, blank: int | None = None) -> int:
        """Send a tensor, a copy made by the caller; return its id. `blank`: id of an empty tensor to fill."""
        for connection in self.connections:
            connection.transfers.reserve_upload(tensor.nbytes)
        id = self.new_id() if blank is None else blank
        self._command(PUT, id, self._payload(tensor), made=[id] if blank is None else [])
        return id

    def expect(self, bytes: int) -> None:
        """Count bytes of a copy from other nodes; wait for the nodes if there are too many."""
        for connection in self.connections:
            connection.transfers.reserve_copy(bytes)
        if self.listener is not None:
            self.listener.copy_expected(self, bytes)

    def is_blank(self, id: int) -> bool:
        """Return whether the last command made this tensor, without elements."""
        number, made = self._last
        return made == [id] and self.kinds[number].operator == "aten.empty_strided"

    def define(self, command: int, definition: tuple[Any, ...]) -> None:
        """Send the definition of a call or a program; pickling errors are raised before the log changes."""
        pickled = pickle.dumps(definition)
        self._command(command, self._payload(pickled))

    def forget(self) -> None:
        """Forget all interned calls, here and on the nodes."""
        self.calls.clear()
        call_without_interrupt(self.cut)  # the numbers will be reused for other calls
        self.kinds = {}
        self._origins = SegmentOrigins(self.number, self.kinds)
        self._command(FORGET)

    def seed(self, seed: int) -> None:
        """Seed the random generator of each node."""
        with self._drawing():
            self._command(SEED, seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF)

    def share(self, id: int, other: Space) -> int:
        """Share a tensor of another space on the nodes of this one; return its id here."""
        if not set(self.connections) <= set(other.connections):
            other.raise_if_lost()
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
    def connected_nodes(self) -> set[NodeConnection]:
        """The connections to its nodes."""
        return {connection.node for connection in self.connections}

    @property
    def nodes(self) -> str:
        """``node 2``, or ``nodes 0, 2-5``."""
        return format_numbers("node", (connection.index for connection in self.connections))

    def ambiguous(self) -> UsageError:
        """Return the error for an operation that needs one tensor, not one per node."""
        return UsageError(
            f"a tensor on {self.device} has elements on each of {self.nodes}: "
            f"use x.on({self.connections[0].index}) for one node's part, or place.mean(x) for the mean of all"
        )

    def asked(self, command: int, payload: Any, *numbers: int) -> Callable[[], Any]:
        """Send a command with a reply to its only node; return a function that waits for the reply."""
        with self.lock:
            if self.ordering is not None:
                self.ordering.fence(self)
            connection, batch = self.send_request(command, self._payload(payload), *numbers)[0]
            if self.ordering is not None:
                self.ordering.fenced(self)
        return lambda: connection.values_of(batch)[0]

    def send(self, *command: int) -> None:
        """Append a command without a reply."""
        with self.lock:
            self._command(*command)

    def make(self, command: int, *numbers: int) -> int:
        """Append a command that makes a tensor; return its id."""
        id = self.new_id()
        self._command(command, id, *numbers, made=[id])
        return id

    def send_request(self, *command: int) -> list[tuple[StreamConnection, SegmentBatch]]:
        """Append and send a command with a reply; the caller holds the lock."""
        # Does not poll the connections: that may send the command, and ids freed afterwards would be a batch
        # of their own, which would be waited for.
        self._append(command)
        self.size += 1
        # Each such command is flushed under the lock, so the batches contain no other values.
        return [(connection, connection.flush_request()) for connection in self.connections]

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
        self.issued, self.node_determined = self.issued + 1, self.node_determined + 1
        with self.lock:
            asked = self.send_request(ASK, self._payload(question))
        values_of = [connection.values_of(batch)[0] for connection, batch in asked]
        for connection, answer in zip(self.connections, values_of, strict=True):
            if answer != values_of[0]:
                first, one, other = (
                    self.connections[0].index,
                    format_reply(values_of[0]),
                    format_reply(answer),
                )
                raise UsageError(
                    f"{operator}: a result on {self.device} must be alike on all of its nodes, but is "
                    f"{one} on node {first} and {other} on node {connection.index}; use x.on({first})"
                )
        return values_of[0]

    def random_state(self, state: torch.Tensor | None = None) -> torch.Tensor | None:
        """Return the state of a node's random generator, or set it."""
        with self.lock, self._drawing():
            if state is not None:
                self._command(STATE, self._payload(state))
                return None
            connection, batch = self.send_request(STATE, self._payload(None))[0]
        return connection.values_of(batch)[0]  # type: ignore[no-any-return]

    def _drawing(self) -> AbstractContextManager[None]:
        """Return a context manager that orders uses of the random generators across streams."""
        if self.ordering is None:
            return nullcontext()
        return self.ordering.using(self, (), (), self.ordering.generators(self))


class StreamLog(Space):
    """The log of a further stream of a space; `users` is the number of `Stream` objects that share it."""

    __slots__ = ("users",)

    def __init__(self, home: Space, stream: int, connections: tuple[StreamConnection, ...]) -> None:
        super().__init__(home.device, connections, home.lock, number=home.number, home=home)
        self.stream = stream
        self.users = 0
        self.freed = home.freed
        home.stream_logs.append(self)


def apart(*homes: Space) -> AbstractContextManager[None]:
    """Return a context manager for commands that must not overlap other streams: collectives, or commands on
    memory that is not tracked. The caller holds the lock.
    """
    streams = homes[0].ordering
    return nullcontext() if streams is None else streams.apart(*homes)


def release_spaces(node: NodeConnection) -> None:
    """Drop the spaces of a lost node: lost spaces and older connections would keep each other alive.

    The caller holds the master's lock.
    """
    for space in node.streams[0].spaces:
        if not space.used():
            space.end()
    for stream in node.streams:
        stream.spaces = []


def forget_unused_lost_spaces(nodes: Sequence[NodeConnection]) -> None:
    """Forget lost spaces that are no longer used, here and on the surviving nodes, when a node is replaced.

    Spaces still in use are forgotten when the next node is replaced. The caller holds the master's lock.
    """
    for node in nodes:
        if node.lost is None:
            for stream in node.streams:
                stream.flush()  # sends the frees
            node.reap()
    spaces = [space for node in nodes for space in node.streams[0].spaces]
    for space in {each for each in spaces if each.lost is not None and not each.used()}:
        space.end()
        connections = {connection for log in space.stream_logs for connection in log.connections}
        for node in (connection.node for connection in space.connections):
            if node.lost is None:
                ended = [stream for stream in node.streams if stream in connections]
                node.streams = [stream for stream in node.streams if stream not in connections]
                node.call(sessions.forget, space.number, [stream.stream for stream in ended])
                for stream in ended:
                    stream.flusher.close(wait=False)
    for node in nodes:
        node.streams[0].spaces = [each for each in node.streams[0].spaces if not each.is_forgotten]
