"""``dist_send``, a method that all tensors have while a master is open."""

from __future__ import annotations

import torch

from ..tensor import current
from ..tensor.within import chosen
from ..tensor.within import node as on_node


def dist_send(tensor: torch.Tensor, node: int | None = None, device: int | None = None) -> torch.Tensor:
    """A copy of a tensor on a node, at once; a tensor that is there already is returned itself.

    Args:
        node: which; None: the one that ``with shoal.distributed.node(i)`` chose, or node 0.
        device: within the node; None: what was chosen for this node, or its own.

    Raises:
        UsageError: there is no such node, or it has no such GPU.
    """
    index = chosen.node if node is None else node
    within = device if device is not None else chosen.device if index == chosen.node else None
    with on_node(index, within):
        there = tensor.to(current.master().space(index).device)
    return there if device is None else there.within(device)  # type: ignore[attr-defined]


def give() -> None:
    """Let tensors have it."""
    torch.Tensor.dist_send = dist_send  # type: ignore[attr-defined]


def take_away() -> None:
    """Let tensors have it no more."""
    if "dist_send" in vars(torch.Tensor):
        del torch.Tensor.dist_send  # type: ignore[attr-defined]
