"""The broadcast of a module's buffers (running statistics, for example)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from ...group import ProcessGroup
from ..coalesced import CoalescedBroadcast, by_device
from .members import ModuleTensors, is_scripted


class BufferSync:
    """Broadcasts the buffers of ``module`` that are in ``members``, in one message for each device."""

    def __init__(self, group: ProcessGroup, module: nn.Module, members: ModuleTensors) -> None:
        self._group = group
        chosen = {id(buffer) for _, buffer in members.named_buffers()}
        # Getters instead of tensors, because a module may replace its buffers at any time.
        self._places: list[Callable[[], torch.Tensor | None]] = []
        seen: set[int] = set()
        for owner in module.modules():
            for name, buffer in owner._buffers.items():
                if buffer is not None and id(buffer) in chosen - seen:
                    seen.add(id(buffer))
                    scripted = partial(getattr, owner, name, None)
                    self._places.append(scripted if is_scripted(owner) else partial(owner._buffers.get, name))
        self._sent: list[torch.Tensor] = []
        self._broadcasts: list[tuple[CoalescedBroadcast, list[torch.Tensor]]] = []
        self._step = -1

    @property
    def any(self) -> bool:
        """Whether the module has buffers."""
        return bool(self._places)

    def refresh(self, step: int, root: int = 0) -> None:
        """Broadcast the buffers of rank ``root``, once in each ``step``.

        Not more often: autograd may have saved them in the step's first forward pass and refuses later
        writes.
        """
        if step == self._step or not self._places:
            return
        tensors = [buffer for place in self._places if (buffer := place()) is not None]
        if len(tensors) != len(self._sent) or any(
            a is not b for a, b in zip(tensors, self._sent, strict=True)
        ):
            self._broadcasts = [(CoalescedBroadcast(self._group, some), some) for some in by_device(tensors)]
            self._sent = tensors
        for broadcast, some in self._broadcasts:
            broadcast.run(some, root)
        self._step = step
