"""``Master.explain``: the operator and program line that made a tensor on a node, and the tensor's state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ...common.formatting import counted
from ...errors import NodeLost, RemoteOpError, ShoalError
from ..commands.connection import NodeConnection
from ..commands.history import Maker, maker_of
from ..commands.origin import format_origin
from ..node import sessions
from ..protocol.metadata import format_metadata
from ..tensor.node_devices import device_label
from ..tensor.tensor import RemoteTensor


@dataclass(frozen=True, slots=True)
class Explanation:
    """The origin and state of a tensor on a node, as the master knows them; made by :meth:`Master.explain`.

    Attributes:
        place: ``node 2``, or ``nodes 0, 1``.
        device: device of the tensor.
        within: the device within its node; -1: the CPU.
        shape, dtype: of the tensor.
        operator: the operator that made it, such as ``aten.add.Tensor``; "" if no longer in the history.
        line: the program line that issued the operator; "" if no longer in the history.
        changed: the line that issued the last in-place operation on it; "" if none is known.
        stream: ``stream_id`` of the stream that the operator was issued to; None if unknown.
        age: number of operations issued to that stream of its nodes since; None if unknown.
        state: "pending" (not acknowledged by its nodes), "executed", "poisoned" or "lost".
        error: why it is poisoned or lost, otherwise None.
    """

    place: str
    device: torch.device
    within: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    operator: str
    line: str
    changed: str
    stream: int | None
    age: int | None
    state: str
    error: ShoalError | None

    def __str__(self) -> str:
        where = f"{self.place} ({device_label(self.within)})" if self.within >= 0 else self.place
        lines = [f"{format_metadata(self)} on {where}: {self.state}"]
        if self.operator:
            stream = f" on stream {self.stream}" if self.stream else ""
            lines.append(f"made by {self.operator}{stream}, {counted(self.age or 0, 'operation')} ago")
            lines.append(f"issued at {self.line}")
        else:
            lines.append("made by an operation that is no longer in the history")
        if self.changed:
            lines.append(f"written to at {self.changed}")
        if self.error is not None:
            lines.append(f"{type(self.error).__name__}: {self.error}")
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<shoal.controller.Explanation: {self}>"


def explain(tensor: RemoteTensor) -> Explanation:
    """Return the explanation of a tensor."""
    handle, known = tensor.handle, tensor.handle.metadata
    space = handle.space
    nodes = [connection.node for connection in space.connections]
    with space.lock:
        users = {log.stream for log in handle.memory().past.users} or {0}
        makers = []
        for node in nodes:
            node.reap()
            for each in node.streams:
                if len(node.streams) == 1 or each.stream in users:
                    pending = each.unacknowledged()
                    makers.append((each.stream, maker_of(space.number, handle.id, pending, each.history)))
        lost = space.lost
    stream, maker = _choose_maker(makers)
    error: ShoalError | None = lost
    state = "lost" if lost is not None else "pending" if maker is not None and maker.pending else "executed"
    if state == "executed":
        error = _find_error(nodes, space.number, handle.id)
        state = "executed" if error is None else "lost" if isinstance(error, NodeLost) else "poisoned"
    return Explanation(
        place=space.nodes,
        device=space.device,
        within=known.within,
        shape=tuple(known.shape),
        dtype=known.dtype,
        operator="" if maker is None else maker.operator,
        line="" if maker is None else format_origin(maker.origin),
        changed="" if maker is None or maker.changed is None else format_origin(maker.changed),
        stream=stream,
        age=None if maker is None else maker.age,
        state=state,
        error=error,
    )


def _choose_maker(makers: Sequence[tuple[int, Maker | None]]) -> tuple[int | None, Maker | None]:
    """Return a pending maker if a node has one, else the first known one, with its stream."""
    found = [(stream, each) for stream, each in makers if each is not None]
    return next((each for each in found if each[1].pending), found[0] if found else (None, None))


def _find_error(nodes: Sequence[NodeConnection], space: int, id: int) -> ShoalError | None:
    for node in nodes:
        try:
            poison = node.ask(sessions.poison_of, space, id)
        except ShoalError:
            with node.lock:
                if node.lost is None:
                    raise
            return node.lost
        if poison is not None:
            number, of = poison
            while of is not None:
                node, number = node.nodes[of[0]], of[1]
                of = node.failures.causes.get(number)
            with node.lock:
                node.reap()
                error = node.failures.errors.get(number)
            return error or RemoteOpError(f"node {node.index}: an operation failed", f"node{node.index}")
    return None
