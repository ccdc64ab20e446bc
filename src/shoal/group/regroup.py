"""What follows a session from group to group."""

from __future__ import annotations

from typing import Protocol

from ..errors import GroupError
from .process_group import ProcessGroup


class Regroupable(Protocol):
    """It works over a group, and goes on over the group that :meth:`~shoal.ProcessGroup.rebuild` gives."""

    def check_regroup(self) -> None:
        """Find out whether :meth:`regroup` can work, long before it must.

        Raises:
            UsageError: it cannot; the message says why.
        """

    def regroup(self, group: ProcessGroup) -> None:
        """Work over ``group`` from now on.  Every rank of it calls this; nothing is sent.

        Whatever was under way in the group before is dropped.
        """


class Leader(Protocol):
    """Who makes new groups, for something that communicates at times of its own."""

    def goes_on(self, error: GroupError) -> bool:
        """After ``error``, make a new group and call :meth:`Regroupable.regroup`; False: no rank is lost."""

    def settle(self) -> None:
        """Begin in the new group with all that has to: calls :meth:`Settling.settle`, and goes on by itself
        when more ranks are lost."""


class Settling(Regroupable, Protocol):
    """What ranks hold differs, so they have something to say to each other in a new group."""

    def settle(self) -> None:
        """Bring in order what ranks hold, if the group is new.

        Collective: every rank calls it at the same point of the program, at which the others have done the
        same as this one.

        Raises:
            GroupError: a rank is lost; call it again after the next :meth:`regroup`.
            StateLost: no rank has what is needed.
            StateDiverged: ranks that hold the same part hold different values.
        """
