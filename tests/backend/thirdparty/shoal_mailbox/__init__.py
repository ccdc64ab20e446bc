"""A data channel for shoal that posts tensors as letters in the job's key-value store.

It needs nothing but the store, so it works wherever a rendezvous does, slowly.  It is also an example of
what a backend of one's own has to do: three short files, one class each.
"""

from __future__ import annotations

from typing import Any

from shoal.backend.base import Backend, DataChannel, GroupSpec, Membership

from .channel import MailboxChannel

__all__ = ["MailboxBackend"]


class MailboxBackend(Backend):
    """Gives each group a :class:`MailboxChannel`; there is nothing to connect."""

    name = "mailbox"

    def __init__(self, membership: Membership, *, timeout: float, **options: Any) -> None:
        if options:
            raise TypeError(f"the mailbox backend takes no options, got {', '.join(options)}")
        self._store = membership.store

    def channel(self, group: GroupSpec) -> DataChannel:
        return MailboxChannel(self._store, group)

    def close(self, timeout: float) -> None:
        """The channels are closed and the store is not ours: nothing is left to do."""
