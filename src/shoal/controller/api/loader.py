"""``Master.load``: loaders that run on the nodes; their batches stay there."""

from __future__ import annotations

import contextlib
import secrets
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from ...common.containers import Tree, map_leaves
from ...errors import RemoteOpError, ShoalError, UsageError
from ..commands.issuing import issuing_line, shown
from ..commands.space import Space
from ..node import loader as at_node
from ..protocol.naming import node_name
from ..tensor.tensor import RemoteTensor
from .functions import PendingFunction, payload_of
from .place import Place


def load(place: Place, make: Callable[[int, int], Iterable[Any]]) -> Iterator[Any]:
    """Iterate over the batches of a loader on each node of a place."""
    spaces = place.space.parts
    name = secrets.token_hex(8)
    follow = payload_of(at_node.following, (name,), {}, spaces)
    asked: list[deque[PendingFunction]] = [deque() for _ in spaces]
    begun = []
    try:
        for index, space in enumerate(spaces):
            begun.append(space)
            payload = payload_of(at_node.begin, (name, make, index, len(spaces)), {}, (space,))
            PendingFunction(space, payload).drop()
        for _ in range(at_node.AHEAD):
            for each, space in zip(asked, spaces, strict=True):
                each.append(PendingFunction(space, follow))
        while True:
            found = [each.popleft().result() for each in asked]
            for space, each in zip(spaces, found, strict=True):
                if each[0] == "failed":
                    raise _failed(space.lines[0].index, *each[1:])
            if any(each[0] == "end" for each in found):
                return
            for each, space in zip(asked, spaces, strict=True):
                each.append(PendingFunction(space, follow))
            batches = [each[1] for each in found]
            yield _on_device(place.space, batches[0] if len(batches) == 1 else _joined(place, batches))
    finally:
        for pending in asked:
            for one in pending:
                one.drop()
        for space in begun:
            with contextlib.suppress(ShoalError):  # the next use of a lost node raises it
                PendingFunction(space, payload_of(at_node.stop, (name,), {}, (space,))).drop()


def _failed(index: int, error: str, traceback: str) -> RemoteOpError:
    line = shown(issuing_line())
    return RemoteOpError(
        f"node {index}: a loader failed: {error}\nread at {line}\nthe traceback there:\n{traceback}",
        node_name(index), traceback, line,
    )  # fmt: skip


def _on_device(space: Space, batch: Any) -> Any:
    """Move a batch to the device where the nodes create tensors."""
    if space.within < 0:
        return batch
    return map_leaves(lambda each: each.within(space.within) if type(each) is RemoteTensor else each, batch)


def _joined(place: Place, batches: list[Any]) -> Any:
    """Join the nodes' batches: tensors become tensors on the place, other values are the first node's."""

    def joined(*parts: Any) -> Any:
        return place.scatter(parts) if isinstance(parts[0], torch.Tensor) else parts[0]

    trees = [Tree(batch) for batch in batches]
    for index, tree in enumerate(trees):
        if tree.form != trees[0].form:
            raise UsageError(
                "load: the loaders returned batches of different structures: "
                f"{trees[0]} at position 0 of the place, and {tree} at position {index}"
            )
    return trees[0].build([joined(*parts) for parts in zip(*(tree.leaves for tree in trees), strict=True)])
