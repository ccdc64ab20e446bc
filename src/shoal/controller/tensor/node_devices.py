"""Devices within nodes: -1 is a node's CPU and its GPUs count from 0, as in ``Tensor.get_device``.

A node is one torch device, so ``x.device`` names the node only. A tensor created on ``node:i`` is on the
worker's ``--device`` (``shoal worker``; its CPU by default) unless :class:`node` selects another device.
Results are on the device of the operands.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import torch

from ...common.never_compile import never_compile
from ...errors import UsageError
from . import current

if TYPE_CHECKING:
    from ..commands.space import Space


class NodeDevice:
    """A device within the node of a call, used as its ``device`` argument; -1 is the CPU."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


_known: dict[int, NodeDevice] = {}


def node_device(index: int) -> NodeDevice:
    """The `NodeDevice` of this index; unique, because it is part of the keys of calls."""
    return _known.setdefault(index, NodeDevice(index))


def device_label(index: int) -> str:
    """``its CPU`` or ``its GPU 1``."""
    return "its CPU" if index < 0 else f"its GPU {index}"


class _DeviceSelection(threading.local):
    """The selection of :class:`node` in this thread; None: the node's default."""

    node = 0
    device: int | None = None

    def on(self, space: Space) -> int:
        """The device within a node on which tensors are created; -1 is its CPU."""
        if self.device is None or self.node != space.index:
            return space.within
        return self.device


selected_device = _DeviceSelection()


def checked_device_index(space: Space, device: Any) -> int:
    """Validate the index of a device within a node; raises `UsageError`."""
    if not isinstance(device, int) or isinstance(device, bool) or device < -1:
        raise UsageError(f"device={device!r}: -1 is the CPU of a node, and its GPUs count from 0")
    count = min(connection.node.accelerators for connection in space.connections)
    if device >= count:
        if not count:
            raise UsageError(f"{space.device} has no GPU: its tensors stay on its CPU, device -1")
        have = "is GPU 0" if count == 1 else f"are GPUs 0 to {count - 1}"
        raise UsageError(f"{space.device} has no GPU {device}: there {have}")
    return device


def cuda_index(device: Any) -> int | None:
    """The index of ``"cuda:1"``, 0 for ``"cuda"``, None for other devices."""
    if isinstance(device, str) and not device.startswith("cuda"):
        return None
    if not isinstance(device, (str, torch.device)):
        return None
    parsed = torch.device(device)
    return (parsed.index or 0) if parsed.type == "cuda" else None


@never_compile
class MoveWithinNode(torch.autograd.Function):
    """Moves a tensor to another device of its node, and the gradient back."""

    @staticmethod
    def forward(ctx: Any, x: Any, device: int) -> Any:
        ctx.back = x.get_device()
        how: dict[str, Any] = {"device": node_device(device)}
        known = torch.empty_strided(x.shape, x.stride(), device="meta")
        # Torch predicts that these strides are preserved, which the kernel does not do.
        if torch.empty_like(known).stride() != x.stride():
            how["memory_format"] = torch.contiguous_format
        return type(x).issue(torch.ops.aten._to_copy.default, (x,), how)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return MoveWithinNode.apply(grad, ctx.back), None  # type: ignore[no-untyped-call]


class node:
    """``with node(1):`` torch's factories, typed constructors and ``dist_send`` create tensors on node 1.

    Args:
        index: index of the node.
        device: device within it: -1 for its CPU, None for the default of its worker.

    Raises:
        UsageError: there is no such node, or it has no such GPU.
    """

    def __init__(self, index: int, device: int | None = None) -> None:
        space = current.master().space(index)
        self.index = index
        self.device = space.within if device is None else checked_device_index(space, device)
        self._torch = space.device
        self._before: list[tuple[int, int | None]] = []

    def __repr__(self) -> str:
        return f"<shoal.distributed.node({self.index}, device={self.device}): {device_label(self.device)}>"

    def __enter__(self) -> node:
        self._torch.__enter__()
        self._before.append((selected_device.node, selected_device.device))
        selected_device.node, selected_device.device = self.index, self.device
        return self

    def __exit__(self, *error: Any) -> None:
        selected_device.node, selected_device.device = self._before.pop()
        self._torch.__exit__(*error)
