"""The methods of a master that inspect its nodes and their tensors."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import torch

from ...common.copy_refusal import refuses_copies
from ...errors import UsageError
from ..commands.line import NodeConnection
from ..commands.space import Space
from ..node import sessions
from ..start.roster import Roster
from ..tensor.tensor import RemoteTensor
from .explain import Explanation, explain
from .trace import Trace

#: timeout in seconds for a node's reply about a tensor's state or its clock
_ANSWER = 30.0


@refuses_copies(
    "a Master",
    "connections to its nodes",
    "Keep it outside of the object that you copy; each process creates one by shoal.init_master_worker()",
)
class Seeing:
    """The methods of a master that change nothing; `name` is the name of its session with the nodes."""

    name: str
    _lock: threading.RLock
    _lines: list[NodeConnection]
    _spaces: dict[int, Space]
    _roster: Roster

    def explain(self, tensor: torch.Tensor) -> Explanation:
        """Return the operator that made a tensor, its program line and age, and the tensor's state.

        Does not wait for issued operations. If the nodes have acknowledged the tensor, they are asked,
        outside their queues, whether it is poisoned. The history keeps the last 4096 acknowledged
        operations of each node. Raises `UsageError` if the tensor is not on a node.
        """
        if type(tensor) is not RemoteTensor:
            raise UsageError(f"explain takes a tensor on a node, and this one is on {tensor.device}")
        return explain(tensor, self._poison_of)

    def stats(self) -> list[dict[str, int]]:
        """Return counters of each node; ``docs/controller.md`` explains their names."""
        with self._lock:
            return [line.stats() for line in self._lines]

    def trace(self, path: str | os.PathLike[str]) -> Trace:
        """Return a context manager that writes the activity of master and nodes in its block to a file.

        https://ui.perfetto.dev and Chrome display it; ``docs/controller.md`` describes its content. Nodes
        that join later are not included. Entering the block raises UsageError if the file cannot be written
        or another trace is running.
        """
        with self._lock:
            spaces = [self._spaces[index] for index in range(len(self._lines))]
        return Trace(path, spaces, self._lock, self.name, self._ask)

    def _ask(self, index: int, fn: Callable[..., Any], *args: Any) -> Any:
        return self._roster.peer(index).options(timeout=_ANSWER).call(fn, *args).wait()

    def _poison_of(self, index: int, space: int, id: int) -> Any:
        return self._ask(index, sessions.poison_of, self.name, space, id)
