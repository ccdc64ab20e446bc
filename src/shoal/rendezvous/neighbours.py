"""The processes of a meeting that run on this machine, and the detection of those that have ended.

Every process appends itself to its machine's list before it claims a rank, so each process with a rank is in
a list. Only the processes of a machine read its list, because only they can inspect the listed processes; its
length does not grow with the number of machines.
"""

from __future__ import annotations

import hashlib

import msgspec

from ..store import Store
from ..store.requests import Append
from .host import process_is_gone
from .record import Arrival, MemberDescription, decode


class Neighbours:
    """The list of the machine of process ``me`` in a room; ``key`` is the list's key in the room."""

    def __init__(self, room: Store, me: MemberDescription) -> None:
        self._room = room
        self._me = me
        digest = hashlib.blake2b(me.machine.encode(), digest_size=8).hexdigest()
        self.key = f"machine/{digest}"
        self._known: list[Arrival] = []

    def append(self, rank: int | None) -> Append:
        """Return the call that adds this process, which is about to claim ``rank``."""
        mine = Arrival(self._me.process, self._me.token, rank)
        return Append(self.key, msgspec.json.encode(mine) + b"\n")

    def gone(self) -> list[Arrival]:
        """Read the list and return the processes that have ended.

        They need not be members: they may have withdrawn, or ended before they claimed a rank.
        """
        return self.gone_of(*self._room.peek([self.key]))

    def gone_of(self, read: bytes | None) -> list[Arrival]:
        """Like :meth:`gone`, for the list that was just read (None: no process of this machine arrived)."""
        self._known = [decode(line, Arrival) for line in (read or b"").splitlines()]
        return self.gone_of_known()

    def gone_of_known(self) -> list[Arrival]:
        """Return the processes that have ended of the list as last read. Uses no store."""
        return [arrival for arrival in self._known if process_is_gone(arrival.process)]
