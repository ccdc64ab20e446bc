"""``shoal.init_master_worker``: this process as the master of nodes."""

from __future__ import annotations

import atexit
import itertools
import math
import os
import threading
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Any

import torch

from ..errors import NodeLost, UsageError
from ..keywords import checked_count, checked_seconds
from . import current, device, node
from .autograd import restore_thread
from .line import Line
from .naming import node_name
from .place import Named, Place, indices_of
from .space import Space
from .start import Workers
from .tensor import RemoteTensor, fetch

_numbers = itertools.count()
#: seconds that a node gets for what was issued before the master closed
_PATIENCE = 5.0
#: index of the first place of several nodes: torch's device indices are of 8 bits
_HIGHEST = 126


def init_master_worker(*, workers: int, timeout: float = 300.0) -> Master:
    """Start nodes on this machine, as processes that end with this one, and become their master.

    Node ``i`` is the torch device ``node:i`` from then on.  A process has one master at a time.

    Args:
        workers: how many nodes.
        timeout: seconds for them to start.

    Raises:
        UsageError: this process is a master already.
        UnsupportedOperation: torch cannot take such a device.
        LaunchError: a node did not start.
    """
    count = checked_count("workers", workers)
    seconds = checked_seconds("timeout", timeout)
    if current.opened() is not None:
        raise UsageError("this process is a master already: close() that one first")
    device.register()
    master = Master(Workers(count, seconds))
    current.set_master(master)
    return master


class Master:
    """The master of nodes; made by :func:`init_master_worker`, and a context manager that closes it.

    Attributes:
        nodes: the place of all of them, a sequence of their devices.
    """

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self._closed = False
        self._gone: set[int] = set()
        self._on_lost: list[Callable[[int], Any]] = []
        name = f"{os.getpid()}-{next(_numbers)}"
        self._lines: list[Line] = []
        begun = [peer.options(timeout=math.inf).call(node.begin, name) for peer in workers.peers]
        for index, peer in enumerate(workers.peers):
            begun[index].wait()
            send = partial(peer.options(timeout=math.inf).call, node.run, name)
            self._lines.append(Line(index, self._lock, send))
        self._spaces = {
            line.index: Space(torch.device("node", line.index), (line,), self._lock) for line in self._lines
        }
        self._places: dict[tuple[int, ...], Place] = {}
        self.nodes = self.place(range(len(self._lines)))
        self.seed(torch.initial_seed())  # so that what a place draws first is the same on its nodes
        workers.agent.on_lost(self._lost)
        self._swapping = torch.__future__.get_swap_module_params_on_conversion()
        torch.__future__.set_swap_module_params_on_conversion(True)
        atexit.register(self.close)

    def space(self, index: int) -> Space:
        """The space of the device ``node:index``, a node or a place of several.

        Raises:
            UsageError: there is no such node.
        """
        space = self._spaces.get(index)
        if space is None:
            raise UsageError(f"there is no node:{index}: the nodes are 0 to {len(self._lines) - 1}")
        return space

    def place(self, nodes: Named) -> Place:
        """Some of the nodes, as one place of tensors; the same one for the same nodes.

        Args:
            nodes: indices or devices, also of places; in any order.

        Raises:
            UsageError: there is no such node, none is named, or torch has no index left.
        """
        with self._lock:
            indices = indices_of(nodes, self.space)
            place = self._places.get(indices)
            if place is None:
                place = self._places[indices] = Place(self._space_of(indices), self.place)
            return place

    def _space_of(self, indices: tuple[int, ...]) -> Space:
        parts = tuple(self._spaces[index] for index in indices)
        if len(parts) == 1:
            return parts[0]
        index = min([_HIGHEST + 1, *(each for each in self._spaces if each >= len(self._lines))]) - 1
        if index < len(self._lines):
            raise UsageError(
                f"there are {len(self._places)} places, and torch has no index left for another one: a place "
                "lasts as long as its master"
            )
        lines = tuple(part.lines[0] for part in parts)
        space = self._spaces[index] = Space(torch.device("node", index), lines, self._lock, parts)
        return space

    def synchronize(self) -> None:
        """Wait until the nodes have done all that was issued.

        Raises:
            RemoteOpError: an operation failed, of which no error was raised yet.
            NodeLost: a node died.
        """
        for line in self._lines:
            with self._lock:
                line.flush()
        for line in self._lines:
            line.synchronize()

    def fetch(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copies of many tensors here, for which the nodes are asked at once.

        Raises:
            RemoteOpError: one of them could not be computed.
            NodeLost: a node died.
        """
        for tensor in tensors:
            if type(tensor) is RemoteTensor:
                with self._lock:
                    tensor.handle.space.flush()
        return [fetch(each) if type(each) is RemoteTensor else each for each in tensors]

    def seed(self, seed: int, *, distinct: bool = False) -> None:
        """Seed the random generators of all nodes alike; ``torch.manual_seed`` does it too.

        Args:
            seed: what the CPU draws from it, nodes draw too.
            distinct: whether node ``i`` gets ``seed + i``.
        """
        with self._lock:
            for index in range(len(self._lines)):
                self._spaces[index].seed(seed + index * distinct)

    def on_lost(self, fn: Callable[[int], Any]) -> None:
        """Call ``fn(index)`` once when a node has died or cannot be reached any more, in another thread."""
        if not callable(fn):
            raise UsageError(f"{fn!r} cannot be called when a node is lost")
        self._on_lost.append(fn)

    def stats(self) -> list[dict[str, int]]:
        """Counts of each node: operations issued, those not yet replied, calls known, tensors, spaces."""
        with self._lock:
            return [line.stats() for line in self._lines]

    def close(self) -> None:
        """End the nodes, which get some seconds for what was issued; using their tensors raises NodeLost.

        Warns of operations that failed and whose errors were never raised.
        """
        if self._closed or self._pid != os.getpid():
            return
        self._closed = True
        atexit.unregister(self.close)
        torch.__future__.set_swap_module_params_on_conversion(self._swapping)
        if current.opened() is self:
            current.set_master(None)
            restore_thread()  # others do so when they begin a backward pass
        for line in self._lines:
            line.finish(_PATIENCE)
        unseen = [text for line in self._lines for text in line.unseen()]
        for line in self._lines:
            why = f"node {line.index} is closed: its master was"
            line.close(NodeLost(why, node_name(line.index), (line.index,)))
        self._workers.close()
        if unseen:
            warnings.warn(f"{len(unseen)} operations failed unseen, the first: {unseen[0]}", stacklevel=2)

    def _lost(self, name: str) -> None:
        for line in self._lines:
            if node_name(line.index) == name and line.index not in self._gone:
                self._gone.add(line.index)  # each of its connections ends
                line.lose("its process ended, or its connection broke")
                for fn in list(self._on_lost):
                    fn(line.index)

    @property
    def pids(self) -> list[int]:
        """The processes of the nodes."""
        return self._workers.pids

    def __enter__(self) -> Master:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<shoal.controller.Master of {len(self.nodes)} nodes{', closed' if self._closed else ''}>"
