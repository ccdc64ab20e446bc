"""The calls of a master that tell of its nodes and their tensors, and change nothing."""

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

#: seconds for a node to say what has become of a tensor, and what time it is there
_ANSWER = 30.0


@refuses_copies(
    "a Master",
    "connections to its nodes",
    "Keep it outside of the object that you copy; each process makes its own: shoal.init_master_worker()",
)
class Seeing:
    """The calls of a master that change nothing.

    Attributes:
        name: of its session with the nodes.
    """

    name: str
    _lock: threading.RLock
    _lines: list[NodeConnection]
    _spaces: dict[int, Space]
    _roster: Roster

    def explain(self, tensor: torch.Tensor) -> Explanation:
        """The maker of a tensor on a node, as operator, line of the program and age, and the tensor's state.

        It waits for nothing that was issued.  Of a tensor that nodes have acknowledged they are asked, aside
        from their queues, whether it is poisoned.  Of operations that were acknowledged the last 4096 of each
        node are known.

        Raises:
            UsageError: the tensor is on no node.
        """
        if type(tensor) is not RemoteTensor:
            raise UsageError(f"explain takes a tensor on a node, and this one is on {tensor.device}")
        return explain(tensor, self._poison_of)

    def stats(self) -> list[dict[str, int]]:
        """Counts of each node, by the names that ``docs/controller.md`` explains."""
        with self._lock:
            return [line.stats() for line in self._lines]

    def trace(self, path: str | os.PathLike[str]) -> Trace:
        """A context manager that writes what master and nodes do in its block to a file.

        https://ui.perfetto.dev and Chrome show it; ``docs/controller.md`` says what is in it.  Nodes that
        come later are not.  Its beginning raises UsageError if the file cannot be written, or another trace
        is being made.
        """
        with self._lock:
            spaces = [self._spaces[index] for index in range(len(self._lines))]
        return Trace(path, spaces, self._lock, self.name, self._ask)

    def _ask(self, index: int, fn: Callable[..., Any], *args: Any) -> Any:
        return self._roster.peer(index).options(timeout=_ANSWER).call(fn, *args).wait()

    def _poison_of(self, index: int, space: int, id: int) -> Any:
        return self._ask(index, sessions.poison_of, self.name, space, id)
