"""``Tensor.dist_send``, which exists while a master is open."""

from __future__ import annotations

import torch

from ..tensor import current
from ..tensor.within import chosen
from ..tensor.within import node as on_node


def dist_send(tensor: torch.Tensor, node: int | None = None, device: int | None = None) -> torch.Tensor:
    """Return a copy of a tensor on a node, without waiting; a tensor already there is returned itself.

    Args:
        node: index of the node; None: that of ``with shoal.distributed.node(i)``, or node 0.
        device: the device within the node; None: that selected for this node, or the node's default.

    Raises:
        UsageError: there is no such node, or it has no such GPU.
    """
    index = chosen.node if node is None else node
    within = device if device is not None else chosen.device if index == chosen.node else None
    with on_node(index, within):
        there = tensor.to(current.master().space(index).device)
    return there if device is None else there.within(device)  # type: ignore[attr-defined]


def give() -> None:
    """Add the method to ``torch.Tensor``."""
    torch.Tensor.dist_send = dist_send  # type: ignore[attr-defined]


def take_away() -> None:
    """Remove the method."""
    if "dist_send" in vars(torch.Tensor):
        del torch.Tensor.dist_send  # type: ignore[attr-defined]
