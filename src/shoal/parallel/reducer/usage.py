"""The parameters that a forward pass used: those that autograd's graph leads to."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch

from ...common.containers import tensors


def outputs_with_graph(output: Any) -> Iterator[torch.Tensor]:
    """The tensors in ``output``, a structure of any kind that we know, that have a graph behind them."""
    if isinstance(output, torch.Tensor):  # nearly always: looking into structures takes longer
        if output.grad_fn is not None:
            yield output
        return
    yield from (tensor for tensor in tensors(output) if tensor.grad_fn is not None)


class Graph:
    """The graph behind the outputs of one forward pass, as far as it is known.

    Attributes:
        reached: the parameters that it may lead to.
    """

    __slots__ = ("__weakref__", "reached")

    def __init__(self, reached: Collection[int]) -> None:
        self.reached = reached


def reachable(outputs: Iterable[torch.Tensor], index_of: Mapping[int, int]) -> set[int]:
    """The indices of the parameters that the graph behind ``outputs`` leads to.

    What reentrant checkpoints use is not seen: their graph is made during backward.

    Args:
        index_of: from ``id(parameter)`` to the parameter's index.
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
