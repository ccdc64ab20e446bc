"""The division of parameters among ranks: equally many bytes for each, the same answer on every rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class Partition:
    """The owner of each parameter.

    The largest parameter goes to the rank that has least so far, then the next largest: no rank has more than
    4/3 of what the best division would give the fullest one (Graham, "Bounds on multiprocessing timing
    anomalies", 1969).  Parameters are not divided, because optimisers may look at one as a whole.  Frozen
    parameters have no state, and are counted by themselves.

    Args:
        size: number of ranks.
    """

    def __init__(self, size: int) -> None:
        self._owners: dict[torch.Tensor, int] = {}
        self._loads = {trained: [0] * size for trained in (True, False)}

    def add(self, parameters: Sequence[torch.Tensor]) -> None:
        """Distribute further parameters; those there are stay where they are."""
        sizes = [parameter.numel() * parameter.element_size() for parameter in parameters]
        for index in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
            parameter = parameters[index]
            loads = self._loads[parameter.requires_grad]
            owner = loads.index(min(loads))
            loads[owner] += sizes[index]
            self._owners[parameter] = owner

    def owner(self, parameter: torch.Tensor) -> int | None:
        """The rank that updates ``parameter``, or None if it was never added."""
        return self._owners.get(parameter)
