"""The parameters used by a forward pass, found in autograd's graph."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch

from ...common.containers import tensors


def outputs_with_graph(output: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in ``output``, a nested structure, that have a ``grad_fn``."""
    if isinstance(output, torch.Tensor):  # the common case, faster than the search of structures
        if output.grad_fn is not None:
            yield output
        return
    yield from (tensor for tensor in tensors(output) if tensor.grad_fn is not None)


class Graph:
    """The autograd graph of one forward pass; ``reached`` are the indices of parameters reachable in it."""

    __slots__ = ("__weakref__", "reached")

    def __init__(self, reached: Collection[int]) -> None:
        self.reached = reached


def reachable(outputs: Iterable[torch.Tensor], index_of: Mapping[int, int]) -> set[int]:
    """Return the indices of the parameters reachable in the graph of ``outputs``.

    ``index_of`` maps ``id(parameter)`` to the parameter's index.  Parameters used in reentrant checkpoints
    are not found, since their graph is made during backward.
    """
    found: set[int] = set()
    seen: set[Any] = set()
    pending: list[Any] = [tensor.grad_fn for tensor in outputs]
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        for following, _ in node.next_functions:
            if following is None or following in seen:
                continue
            variable = getattr(following, "variable", None)
            if variable is None:
                pending.append(following)
            elif (index := index_of.get(id(variable))) is not None:
                found.add(index)
    return found
