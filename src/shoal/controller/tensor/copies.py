"""The master's side of copies between nodes: a ``send`` command for one, a ``receive`` for the other.

The elements are sent directly between the nodes; the master does not wait.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch

from ...errors import NodeLost
from ..commands.interrupts import undisturbed
from ..commands.losses import anew
from ..commands.space import Space, apart
from ..node import between
from . import current
from .dispatch import dispatch
from .tensor import RemoteTensor

_send = torch.ops.shoal_node.send.default
_receive = torch.ops.shoal_node.receive.default


def _sent(x: torch.Tensor, routes: Sequence[int], session: str) -> None:
    pass


def _received(
    routes: Sequence[int],
    session: str,
    shape: Sequence[int],
    stride: Sequence[int],
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    return torch.empty_strided(shape, stride, dtype=dtype, device=device)


torch.library.register_fake(f"{between.NAMESPACE}::send", _sent)
torch.library.register_fake(f"{between.NAMESPACE}::receive", _received)


def copied(tensor: RemoteTensor, space: Space) -> RemoteTensor:
    """Copy a tensor to another space, directly between the nodes.

    From one node to a place, every node of the place receives the tensor. Between two places of equal size,
    each node sends its part to the node at the same position.

    Raises:
        UsageError: the places have different sizes, so it is ambiguous which node's part to copy.
        NodeLost: one of the nodes is lost.
    """
    source = tensor.handle.space
    routes = _routes(source, space)
    known = tensor.handle.metadata
    dense = torch.empty_like(torch.empty_strided(known.shape, known.stride, dtype=known.dtype, device="meta"))
    how = {"dtype": known.dtype, "device": space.device}
    session = current.master().name
    made: list[RemoteTensor] = []

    def both() -> None:  # never one without the other, or the counts of sends and receives would differ
        with space.lock:
            for each in (space, source):
                if each.lost is not None:
                    raise anew(each.lost)
            space.expect(dense.nbytes)
            awaited = routes, session, list(dense.shape), list(dense.stride())
            with apart(source, space):
                dispatch(_send, (tensor, routes, session), {})
                try:
                    made.append(dispatch(_receive, awaited, how))
                except NodeLost:  # lost just now: the other nodes of the place must receive what was sent
                    for part in space.parts:
                        with contextlib.suppress(NodeLost), apart(part):
                            dispatch(_receive, awaited, {**how, "device": part.device})
                    raise

    undisturbed(both)
    return made[0]


def _routes(source: Space, space: Space) -> list[int]:
    """Flat (sender, receiver, channel) triples; the channel changes when either node is replaced."""
    senders, receivers = list(source.lines), list(space.lines)
    if len(senders) == 1:
        senders *= len(receivers)
    if len(senders) != len(receivers):
        raise source.ambiguous()
    return [
        number
        for sender, to in zip(senders, receivers, strict=True)
        for number in (sender.index, to.index, sender.epoch + to.epoch)
    ]
