"""DistributedDataParallel within a Join: what ranks with and without a batch do in each other's company.

Before each forward pass of a step every rank says in one small message what it is about to do, so that ranks
without a batch know which collectives will follow, and all know how many gradients there will be.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import TYPE_CHECKING

import torch

from ..errors import UsageError
from ..group import ProcessGroup
from .join import JoinHook
from .parcel import broadcast_all

if TYPE_CHECKING:
    from .ddp import DistributedDataParallel


class Intent(IntEnum):
    """What a rank is about to do in this step."""

    SHADOW = 0  # it has no batch
    LOCAL = 1  # forward and backward without communication (no_sync)
    REDUCE = 2  # backward will be reduced
    REDUCE_AFTER_BUFFERS = 3  # and before forward, buffers are made equal


class Roll:
    """What all ranks are about to do in this step.

    Args:
        intents: one for each rank; not all of them shadow.

    Attributes:
        intent: of all ranks that do not shadow.
        lead: the first such rank.
        active: how many they are.
    """

    def __init__(self, intents: Sequence[int]) -> None:
        active = [rank for rank, intent in enumerate(intents) if intent != Intent.SHADOW]
        self.lead = active[0]
        self.active = len(active)
        self.intent = Intent(intents[self.lead])
        differing = [rank for rank in active if intents[rank] != self.intent]
        if differing:
            lines = [f"rank {rank}: {Intent(intents[rank]).name.lower()}" for rank in active]
            raise UsageError(
                "within a Join all ranks with a batch must treat it alike, with or without no_sync() and all "
                "in train() or all in eval(), but they are about to do different things:\n  "
                + "\n  ".join(lines)
            )


def call_roll(group: ProcessGroup, intent: Intent) -> Roll:
    """Tell the other ranks what this one is about to do, and hear it from them.  Collective."""
    return Roll(_from_all(group, intent))


def _from_all(group: ProcessGroup, number: int) -> list[int]:
    """The numbers of all ranks, 0 to 255.  Collective."""
    numbers = torch.empty(group.size, dtype=torch.uint8)
    group.all_gather_single(numbers, torch.tensor([number], dtype=torch.uint8)).wait()
    return [int(each) for each in numbers]


class Shadow(JoinHook):
    """Shadows the steps of the other ranks."""

    def __init__(self, model: DistributedDataParallel) -> None:
        self._model = model

    def main_hook(self) -> None:
        """Take part in one step with gradients of zero."""
        self._model._shadow(call_roll(self._model.group, Intent.SHADOW))

    def post_hook(self, is_last_joiner: bool) -> None:
        """Give all ranks the parameters and buffers of one that was active longest."""
        group = self._model.group
        root = _from_all(group, is_last_joiner).index(1)
        module = self._model.module
        broadcast_all(group, [*module.parameters(), *module.buffers()], root)
