"""``Master.explain``: what made a tensor on a node, where, and what has become of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ...common.wording import counted
from ...errors import NodeLost, RemoteOpError, ShoalError
from ..commands.history import Maker, maker_of
from ..commands.issuing import shown
from ..commands.line import NodeConnection
from ..tensor.tensor import RemoteTensor
from ..tensor.within import shown as device_shown


@dataclass(frozen=True, slots=True)
class Explanation:
    """The master's knowledge of a tensor on a node; made by :meth:`Master.explain`.

    Attributes:
        place: ``node 2``, or ``nodes 0, 1``.
        device: the tensor's.
        within: the device within its node; -1: the processor.
        shape, dtype: of the tensor.
        operator: that made it, such as ``aten.add.Tensor``; "" if that was too long ago.
        line: of the program, that issued the operator; "" likewise.
        changed: the line that issued the last operation which wrote to it in place; "" if none is known.
        stream: ``stream_id`` of the one to which the operator was issued; None if nobody knows.
        age: operations that were issued to that stream of its nodes since; None if nobody knows.
        state: "pending" (not acknowledged by its nodes), "executed", "poisoned" or "lost".
        error: why it is poisoned or lost; None: it is not.
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
        dtype = str(self.dtype).removeprefix("torch.")
        where = f"{self.place} ({device_shown(self.within)})" if self.within >= 0 else self.place
        lines = [f"{dtype}[{', '.join(map(str, self.shape))}] on {where}: {self.state}"]
        if self.operator:
            stream = f" on stream {self.stream}" if self.stream else ""
            lines.append(f"made by {self.operator}{stream}, {counted(self.age or 0, 'operation')} ago")
            lines.append(f"issued at {self.line}")
        else:
            lines.append("made so long ago that its operation is not known any more")
        if self.changed:
            lines.append(f"written to at {self.changed}")
        if self.error is not None:
            lines.append(f"{type(self.error).__name__}: {self.error}")
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<shoal.controller.Explanation: {self}>"


#: asks a node, by its index, for the failure that poisons a tensor of a space: its number, and where else it
#: is known why
Ask = Callable[[int, int, int], tuple[int, tuple[int, int] | None] | None]


def explain(tensor: RemoteTensor, ask: Ask) -> Explanation:
    """Explain a tensor; ``ask`` is called with the index of a node, and the tensor's space and id."""
    handle, known = tensor.handle, tensor.handle.metadata
    space = handle.space
    with space.lock:
        users = {log.stream for log in handle.memory().past.users} or {0}
        lines = [
            each
            for line in space.lines
            for each in (line, *line.further)
            if not line.further or each.stream in users
        ]
        for line in lines:
            line.reap()
        makers = [
            (line.stream, maker_of(space.number, handle.id, line.unacknowledged(), line.history))
            for line in lines
        ]
        lost = space.lost
    stream, maker = _of_all(makers)
    error: ShoalError | None = lost
    state = "lost" if lost is not None else "pending" if maker is not None and maker.pending else "executed"
    if state == "executed":
        error = _poison(space.lines, space.number, handle.id, ask)
        state = "executed" if error is None else "lost" if isinstance(error, NodeLost) else "poisoned"
    origin = None if maker is None else maker.origin
    if isinstance(origin, list):
        origin = origin[0] if origin else None
    return Explanation(
        place=space.nodes,
        device=space.device,
        within=known.within,
        shape=tuple(known.shape),
        dtype=known.dtype,
        operator="" if maker is None else maker.operator,
        line="" if maker is None else shown(origin),
        changed="" if maker is None or maker.changed is None else shown(maker.changed),
        stream=stream,
        age=None if maker is None else maker.age,
        state=state,
        error=error,
    )


def _of_all(makers: Sequence[tuple[int, Maker | None]]) -> tuple[int | None, Maker | None]:
    """One for all nodes, with its stream: pending if it is pending on one of them."""
    found = [(stream, each) for stream, each in makers if each is not None]
    return next((each for each in found if each[1].pending), found[0] if found else (None, None))


def _poison(lines: Sequence[NodeConnection], space: int, id: int, ask: Ask) -> ShoalError | None:
    for line in lines:
        try:
            poison = ask(line.index, space, id)
        except ShoalError:
            with line.lock:
                if line.lost is None:
                    raise
            return line.lost
        if poison is not None:
            number, of = poison
            while of is not None:
                line, number = line.lines[of[0]], of[1]
                of = line.failures.elsewhere(number)
            with line.lock:
                line.reap()
                error = line.failures.error(number)
            return error or RemoteOpError(f"node {line.index}: an operation failed", f"node{line.index}")
    return None
