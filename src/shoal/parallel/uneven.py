"""DistributedDataParallel within a Join: what ranks with and without a batch do in each other's company.

Before each forward pass of a step every rank says in one small message what it is about to do, so that ranks
without a batch know which collectives will follow, and all know how many gradients there will be.  Ranks
with a batch need the answer at the end of backward only, and do not wait for it before (unless the model has
buffers, which come from a rank that has a batch).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import TYPE_CHECKING

import torch

from ..errors import UsageError
from ..future import Future
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


class Share:
    """For one forward pass: a rank that runs it too, and what averages are multiplied with.

    Args:
        find: gives both; called once, when one of them is first asked for.
    """

    __slots__ = ("_find", "_found")

    def __init__(self, find: Callable[[], tuple[int, float]] | None = None) -> None:
        self._find = find
        self._found = (0, 1.0)

    @property
    def lead(self) -> int:
        """The rank: the same on all ranks."""
        return self.get()[0]

    @property
    def scale(self) -> float:
        """Other than 1 if fewer ranks than all give gradients."""
        return self.get()[1]

    def get(self) -> tuple[int, float]:
        """Both.  Raises UsageError, on every rank that asks, if ranks treat a batch differently."""
        if self._find is not None:
            self._found = self._find()
            self._find = None
        return self._found


def call_roll(group: ProcessGroup, intent: Intent) -> Callable[[], Roll]:
    """Tell the other ranks what this one is about to do.  Collective; what it returns waits for them."""
    numbers = _from_all(group, intent)
    return lambda: Roll(numbers.wait().tolist())


def _from_all(group: ProcessGroup, number: int) -> Future[torch.Tensor]:
    """The numbers of all ranks, 0 to 255.  Collective."""
    numbers = torch.empty(group.size, dtype=torch.uint8)
    return group.all_gather_single(numbers, torch.tensor([number], dtype=torch.uint8))


class Shadow(JoinHook):
    """Shadows the steps of the other ranks."""

    def __init__(self, model: DistributedDataParallel) -> None:
        self._model = model

    def main_hook(self) -> None:
        """Take part in one step with gradients of zero."""
        self._model._shadow(call_roll(self._model.group, Intent.SHADOW)())

    def post_hook(self, is_last_joiner: bool) -> None:
        """Give all ranks the parameters and buffers of one that was active longest."""
        group = self._model.group
        root = _from_all(group, is_last_joiner).wait().tolist().index(1)
        module = self._model.module
        broadcast_all(group, [*module.parameters(), *module.buffers()], root)
