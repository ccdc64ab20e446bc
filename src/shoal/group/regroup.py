"""What follows a session from group to group."""

from __future__ import annotations

from typing import Protocol

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
