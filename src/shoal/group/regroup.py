"""Interfaces of objects that move to a new group after a rebuild."""

from __future__ import annotations

from typing import Protocol

from ..errors import GroupError
from .process_group import ProcessGroup


class Regroupable(Protocol):
    """An object that uses a group and can move to the result of :meth:`~shoal.ProcessGroup.rebuild`."""

    def check_regroup(self) -> None:
        """Raise UsageError if :meth:`regroup` cannot work, before it is needed."""

    def regroup(self, group: ProcessGroup) -> None:
        """Use ``group`` from now on, on every rank of it; does not communicate.

        Pending operations in the old group are dropped.
        """


class Leader(Protocol):
    """The owner of the group, which makes a new group after a failure (a session)."""

    def goes_on(self, error: GroupError) -> bool:
        """After ``error``, make a new group and call :meth:`Regroupable.regroup`; False: no rank is lost."""

    def settle(self) -> None:
        """Call :meth:`Settling.settle` in the new group, and handle further losses."""


class Settling(Regroupable, Protocol):
    """An object whose state differs between ranks, and must be redistributed in a new group."""

    def settle(self) -> None:
        """Redistribute the state, if the group is new.

        Collective: every rank calls it at the same point of the program, after the same updates.

        Raises:
            GroupError: a rank is lost; call it again after the next :meth:`regroup`.
            StateLost: no rank has a part of the state.
            StateDiverged: ranks that hold the same part hold different values.
        """
