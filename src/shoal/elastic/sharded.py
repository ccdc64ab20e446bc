"""The optimiser of a session whose state is distributed over the ranks, if the state has one.

After a loss its ranks have something to say to each other: who owns what, and which parameters are newest.
They do so at one point of the program, at which all have computed equally many updates.  A rank that has lost
another one in its exchange is at this point; so is one that is to begin the next step.  One that was in the
commit comes to it by the optimiser's step, at the end of which it waits for the others.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ..errors import UsageError
from ..group import ProcessGroup
from ..group.regroup import Leader
from ..parallel import ZeroRedundancyOptimizer
from .step import Step


class Sharded:
    """What a session does for the optimiser.

    Args:
        optimizers: of the state.

    Attributes:
        optimizer: the one; None: there is none.

    Raises:
        UsageError: there are several.
    """

    def __init__(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        found = [each for each in optimizers if isinstance(each, ZeroRedundancyOptimizer)]
        if len(found) > 1:
            raise UsageError(
                "Session: the State has several ZeroRedundancyOptimizers, and a session takes one: after a "
                "loss ranks could wait for each other in different ones.  Give one of them all parameters, "
                "in groups with options of their own"
            )
        self.optimizer = found[0] if found else None
        self._stepped: Step | None = None

    def begin(self, group: ProcessGroup, leader: Leader, *, joins: bool) -> None:
        """Give it the group of the session.

        Args:
            leader: the session.
            joins: whether this rank is to receive what the others have.

        Raises:
            UsageError: it has another group.
        """
        if self.optimizer is None:
            return
        before = self.optimizer.present_group
        if before is not None and before is not group and before.state != "closed":
            raise UsageError(
                "Session: the ZeroRedundancyOptimizer of the State has another group than the session; make "
                "it without group=, or give both the same"
            )
        self.optimizer.regroup(group)
        self.optimizer.follow(leader)
        if joins:
            self.optimizer.hold_nothing()

    def end(self) -> None:
        """The session is over."""
        if self.optimizer is not None:
            self.optimizer.follow(None)

    @property
    def most_that_leave(self) -> int | None:
        """So many ranks can leave at once, and no part of the state with them; None: all."""
        return None if self.optimizer is None else self.optimizer.copies - 1

    def settle(self) -> None:
        """Bring in order what the ranks hold.  Collective, at a point to which all come.

        Raises:
            GroupError: a rank is lost.
            StateLost: all owners of a parameter are.
        """
        if self.optimizer is not None:
            self.optimizer.settle()

    def steps(self, optimizer: torch.optim.Optimizer, step: Step | None) -> None:
        """An optimiser begins its step.

        Raises:
            UsageError: it is this one, for the second time after one commit.
        """
        if optimizer is not self.optimizer or step is None:
            return
        if self._stepped is step:
            raise UsageError(
                f"the ZeroRedundancyOptimizer stepped twice after the commit of step {step.number}: after a "
                "loss ranks could not tell in which of the two they are; one step() belongs to one commit"
            )
        self._stepped = step
