"""The `ZeroRedundancyOptimizer` of a session, whose state is distributed over the ranks.

After a loss its ranks exchange which rank owns which part, and which parameters are newest, at a point of the
program where all have computed equally many updates.  A rank that detects the loss in the optimiser's
exchange, or before the next step, is at this point.  A rank that detects it in the commit reaches the point
with the optimiser's step, at the end of which it waits for the other ranks.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ..errors import UsageError
from ..group import ProcessGroup
from ..group.rebuild import GroupOwner
from ..parallel import ZeroRedundancyOptimizer
from .step import Step


class ShardedOptimizer:
    """The ``ZeroRedundancyOptimizer`` of a session, or none; raises UsageError if there are several."""

    def __init__(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        found = [each for each in optimizers if isinstance(each, ZeroRedundancyOptimizer)]
        if len(found) > 1:
            raise UsageError(
                "Session: the State has several ZeroRedundancyOptimizers, and a session takes one: after a "
                "loss ranks could wait for each other in different ones.  Give one of them all parameters, "
                "in parameter groups with different options"
            )
        self.optimizer = found[0] if found else None
        self._last_step: Step | None = None

    def begin(self, group: ProcessGroup, leader: GroupOwner, *, joins: bool) -> None:
        """Set the optimiser's group to that of the session ``leader``; raises UsageError if it has another.

        ``joins``: this rank receives the state from other ranks.
        """
        if self.optimizer is None:
            return
        before = self.optimizer.present_group
        if before is not None and before is not group and before.state != "closed":
            raise UsageError(
                "Session: the ZeroRedundancyOptimizer of the State has another group than the session; make "
                "it without group=, or pass the same group to both"
            )
        self.optimizer.regroup(group)
        self.optimizer.follow(leader)
        if joins:
            self.optimizer.discard_state()

    def end(self) -> None:
        """Detach the optimiser from the session, which has ended."""
        if self.optimizer is not None:
            self.optimizer.follow(None)

    @property
    def max_leavers(self) -> int | None:
        """Maximum number of ranks that can leave at once without loss of state; None: no limit."""
        return None if self.optimizer is None else self.optimizer.copies - 1

    def settle(self) -> None:
        """Redistribute the optimiser's state over the ranks; collective.  Raises GroupError and StateLost."""
        if self.optimizer is not None:
            self.optimizer.settle()

    def steps(self, optimizer: torch.optim.Optimizer, step: Step | None) -> None:
        """Raise UsageError if a second step of the sharded optimiser begins after one commit."""
        if optimizer is not self.optimizer or step is None:
            return
        if self._last_step is step:
            raise UsageError(
                f"the ZeroRedundancyOptimizer stepped twice after the commit of step {step.number}: after a "
                "loss ranks could not know which of the two they are in; call step() once after each commit"
            )
        self._last_step = step
