"""The spaces of a master's nodes and places, by device index."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator

import torch

from ...errors import NodeLost, UsageError
from ..commands.connection import NodeConnection
from ..commands.space import Space, forget_unused_lost_spaces, release_spaces
from ..tensor.stream_order import StreamOrder
from .place import NodesLike, Place

#: numbers of spaces that replace lost ones; above every device index
_replacement_numbers = itertools.count(1000)
#: device index of the first place of several nodes; torch's device indices have 8 bits
MAX_PLACE_INDEX = 126


class SpaceTable:
    """The nodes of a master, and the spaces and places on them.

    Attributes:
        lock: the master's lock.
        nodes: the nodes, by index.
        by_index: the spaces of nodes and of places of several nodes, by device index.
        ordering: the order of the streams; None: there are only default streams.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.nodes: list[NodeConnection] = []
        self.by_index: dict[int, Space] = {}
        self._places: dict[tuple[int, ...], Place] = {}
        self.ordering: StreamOrder | None = None
        #: also the seed of nodes that join later, so that all nodes of a place start with the same numbers
        self._seed = torch.initial_seed(), False

    def add(self, node: NodeConnection) -> list[NodeConnection]:
        """Add a node; return the lost node that it replaces, if any. The caller holds the lock."""
        index = node.index
        lost = self.nodes[index : index + 1]
        for each in lost:
            release_spaces(each)
            node.predecessor_error = each.lost
        self.by_index[index] = Space(torch.device("node", index), tuple(node.streams), self.lock)
        self.nodes[index : index + 1] = [node]
        return lost

    def begin(self, node: NodeConnection, replaces: bool) -> None:
        """Seed a node that was added; give places that contain a replaced node new spaces."""
        self._seed_node(node.index)
        if replaces:
            forget_unused_lost_spaces(self.nodes)
            if self.ordering is not None:
                self.ordering.forget()
            for indices, place in self._places.items():
                if node.index in indices:
                    place.space = self.by_index[place.space.index] = self._new_space(
                        place.device, indices, next(_replacement_numbers)
                    )

    def space(self, index: int) -> Space:
        """Return the space of ``node:index``, a node or a place; raises `UsageError` if there is none."""
        space = self.by_index.get(index)
        if space is None:
            raise UsageError(f"there is no node:{index}: the nodes are 0 to {len(self.nodes) - 1}")
        return space

    def place(self, nodes: NodesLike) -> Place:
        """Return the place of these nodes; see :meth:`.master.Master.place`."""
        with self.lock:
            if not self.nodes:
                raise UsageError("no worker has joined yet: call wait_for(n) to wait for n nodes")
            indices = tuple(sorted(set(self._indices(nodes))))
            if not indices:
                raise UsageError("a place needs at least one node")
            place = self._places.get(indices)
            if place is None:
                place = self._places[indices] = Place(self._space_of(indices), self.place)
            return place

    def _indices(self, nodes: NodesLike) -> Iterator[int]:
        if isinstance(nodes, int):
            yield from (connection.index for connection in self.space(nodes).connections)
        elif isinstance(nodes, (str, torch.device)):
            device = torch.device(nodes)
            if device.type != "node":
                raise UsageError(f"a place consists of nodes, and {nodes!r} is not a node")
            yield from self._indices(device.index or 0)
        else:
            for each in nodes:
                yield from self._indices(each)

    def _space_of(self, indices: tuple[int, ...]) -> Space:
        if len(indices) == 1:
            return self.by_index[indices[0]]
        index = min([MAX_PLACE_INDEX + 1, *(each for each in self.by_index if each >= len(self.nodes))]) - 1
        if index < len(self.nodes):
            raise UsageError(
                f"there are {len(self._places)} places, and torch has no index left for another one: places "
                "are kept until the master is closed"
            )
        space = self.by_index[index] = self._new_space(torch.device("node", index), indices)
        return space

    def _new_space(self, device: torch.device, indices: tuple[int, ...], number: int | None = None) -> Space:
        parts = tuple(self.by_index[index] for index in indices)
        if len(parts) == 1:
            return parts[0]
        return Space(device, tuple(part.connections[0] for part in parts), self.lock, parts, number)

    def streams(self) -> StreamOrder:
        """Return the streams of the nodes, created on the first call."""
        with self.lock:
            if self.ordering is None:
                self.ordering = StreamOrder(self.by_index.values())
            return self.ordering

    def seed(self, seed: int, distinct: bool) -> None:
        """Seed the random generators of all nodes; see :meth:`.master.Master.seed`."""
        with self.lock:
            self._seed = seed, distinct
            for index in range(len(self.nodes)):
                self._seed_node(index)

    def _seed_node(self, index: int) -> None:
        seed, distinct = self._seed
        with contextlib.suppress(NodeLost):
            self.by_index[index].seed(seed + index * distinct)
