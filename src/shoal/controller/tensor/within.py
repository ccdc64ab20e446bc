"""Devices within nodes: -1 is a node's processor, and its GPUs count from 0, as ``Tensor.get_device`` does.

A node is one device of torch, so ``x.device`` says the node only.  A tensor that is made on ``node:i`` is on
the device that its worker was started with (``shoal worker --device``), its processor if none was said,
unless :class:`node` chooses another one.  Results are where the operands are.
"""

from __future__ import annotations

import threading
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from ...common.uncompiled import uncompiled
from ...errors import UsageError
from . import current

if TYPE_CHECKING:
    from ..commands.space import Space


class Within:
    """In the place of a device in a call: one within the node of the call.

    Attributes:
        index: -1 is the processor.
    """

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


_known: dict[int, Within] = {}


def within(index: int) -> Within:
    """The one object for this index, which is part of the keys of calls."""
    return _known.setdefault(index, Within(index))


def shown(index: int) -> str:
    """``its GPU 1``."""
    return "its processor" if index < 0 else f"its GPU {index}"


class _Chosen(threading.local):
    """The choice of :class:`node` in a thread; None: the node's own."""

    node = 0
    device: int | None = None

    def on(self, space: Space) -> int:
        """The device of a node that tensors are made on; -1: its processor."""
        if self.device is None or self.node != space.index:
            return space.within
        return self.device


chosen = _Chosen()


def checked(space: Space, device: Any) -> int:
    """A device of a node, by its number.

    Raises:
        UsageError: the node has no such GPU.
    """
    if not isinstance(device, int) or isinstance(device, bool) or device < -1:
        raise UsageError(f"device={device!r}: -1 is the processor of a node, and its GPUs count from 0")
    count = min(line.accelerators for line in space.lines)
    if device >= count:
        if not count:
            raise UsageError(f"{space.device} has no GPU: its tensors stay on its processor, device -1")
        have = "is GPU 0" if count == 1 else f"are GPUs 0 to {count - 1}"
        raise UsageError(f"{space.device} has no GPU {device}: there {have}")
    return device


def of_accelerator(device: Any) -> int | None:
    """The index of ``"cuda:1"``, 0 of ``"cuda"``; None: it is another device, or none."""
    if isinstance(device, str) and not device.startswith("cuda"):
        return None
    if not isinstance(device, (str, torch.device)):
        return None
    parsed = torch.device(device)
    return (parsed.index or 0) if parsed.type == "cuda" else None


@uncompiled
class Moved(torch.autograd.Function):
    """A tensor on another device of its node; its gradient goes back to where it was."""

    @staticmethod
    def forward(ctx: Any, x: Any, device: int) -> Any:
        ctx.back = x.get_device()
        how: dict[str, Any] = {"device": within(device)}
        known = torch.empty_strided(x.shape, x.stride(), device="meta")
        # Torch predicts that such strides stay, and they do not.
        if torch.empty_like(known).stride() != x.stride():
            how["memory_format"] = torch.contiguous_format
        return type(x).issue(torch.ops.aten._to_copy.default, (x,), how)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return Moved.apply(grad, ctx.back), None  # type: ignore[no-untyped-call]


class node:
    """``with node(1):`` torch's factories, typed constructors and ``dist_send`` make tensors on node 1.

    Args:
        index: of the node.
        device: within it; -1: its processor; None: the one that its worker was started with.

    Raises:
        UsageError: there is no such node, or the node has no such GPU.
    """

    def __init__(self, index: int, device: int | None = None) -> None:
        space = current.master().space(index)
        self.index = index
        self.device = space.within if device is None else checked(space, device)
        self._torch = space.device
        self._before: list[tuple[int, int | None]] = []

    def __repr__(self) -> str:
        return f"<shoal.distributed.node({self.index}, device={self.device}): {shown(self.device)}>"

    def __enter__(self) -> node:
        self._torch.__enter__()
        self._before.append((chosen.node, chosen.device))
        chosen.node, chosen.device = self.index, self.device
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        chosen.node, chosen.device = self._before.pop()
        self._torch.__exit__(kind, error, trace)
