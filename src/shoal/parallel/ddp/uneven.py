"""DistributedDataParallel in a Join, where some ranks have no batch.

Before each forward pass of a step all ranks exchange their intents in a small message, so that ranks without
a batch know the collectives that follow, and all ranks know the number of gradients.  Ranks with a batch wait
for the intents only at the end of backward (or earlier if the model has buffers, to know their sender).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum

import torch

from ...errors import UsageError
from ...future import Future
from ...group import ProcessGroup
from ..coalesced import broadcast_coalesced
from ..join import JoinHook
from .module_tensors import ModuleTensors


class Intent(IntEnum):
    """The part of a rank in the next step."""

    SHADOW = 0  # it has no batch
    LOCAL = 1  # forward and backward without communication (no_sync)
    REDUCE = 2  # gradients are reduced
    REDUCE_AFTER_BUFFERS = 3  # buffers are broadcast before forward, and gradients are reduced


class Intents:
    """The intents of all ranks in a step: the common ``intent`` of the ``active`` ranks, which have a batch.

    Raises UsageError if ranks with a batch have different intents.
    """

    def __init__(self, intents: Sequence[int]) -> None:
        active = [rank for rank, intent in enumerate(intents) if intent != Intent.SHADOW]
        self.first = active[0]  # at least one rank has a batch
        self.active = len(active)
        self.intent = Intent(intents[self.first])
        differing = [rank for rank in active if intents[rank] != self.intent]
        if differing:
            lines = [f"rank {rank}: {Intent(intents[rank]).name.lower()}" for rank in active]
            raise UsageError(
                "within a Join all ranks with a batch must treat it alike, with or without no_sync() and all "
                "in train() or all in eval(), but they are about to do different things:\n  "
                + "\n  ".join(lines)
            )


def exchange_intents(group: ProcessGroup, intent: Intent) -> Callable[[], Intents]:
    """Send the intent of this rank; return a function that waits for those of all ranks.  Collective."""
    numbers = _from_all(group, intent)
    return lambda: Intents(numbers.wait().tolist())


def _from_all(group: ProcessGroup, number: int) -> Future[torch.Tensor]:
    """Return the numbers, 0 to 255, of all ranks.  Collective."""
    numbers = torch.empty(group.size, dtype=torch.uint8, device="cpu")
    return group.all_gather_single(numbers, torch.tensor([number], dtype=torch.uint8, device="cpu"))


class DDPJoinHook(JoinHook):
    """Shadows the steps of the other ranks; ``shadow_step`` takes part in one of them."""

    def __init__(
        self, group: ProcessGroup, members: ModuleTensors, shadow_step: Callable[[Intents], None]
    ) -> None:
        self._group = group
        self._members = members
        self._shadow_step = shadow_step

    def main_hook(self) -> None:
        """Take part in one step with zero gradients."""
        self._shadow_step(exchange_intents(self._group, Intent.SHADOW)())

    def post_hook(self, is_last_joiner: bool) -> None:
        """Broadcast the parameters and buffers of one of the last active ranks."""
        root = _from_all(self._group, is_last_joiner).wait().tolist().index(1)
        broadcast_coalesced(self._group, self._members.tensors(), root)
