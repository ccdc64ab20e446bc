"""The processes of a meeting that run on this machine, and which of them are dead.

Every process appends itself to its machine's list before it claims a rank, so whoever holds a rank is in
a list.  A list is read by the processes of its machine alone: only they can look at the process, and its
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
    """The list of one machine in one room.

    Args:
        room: the room's keys.
        me: this process, which runs on that machine.

    Attributes:
        key: of the list, among the room's.
    """

    def __init__(self, room: Store, me: MemberDescription) -> None:
        self._room = room
        self._me = me
        digest = hashlib.blake2b(me.machine.encode(), digest_size=8).hexdigest()
        self.key = f"machine/{digest}"
        self._known: list[Arrival] = []

    def append(self, rank: int | None) -> Append:
        """The call that adds this process, which is about to claim ``rank``."""
        mine = Arrival(self._me.process, self._me.token, rank)
        return Append(self.key, msgspec.json.encode(mine) + b"\n")

    def gone(self) -> list[Arrival]:
        """Those on the list that have ended.

        They need not be members: they may have given up, or ended before they claimed a rank.
        """
        return self.gone_of(*self._room.peek([self.key]))

    def gone_of(self, read: bytes | None) -> list[Arrival]:
        """The same, of the list as it was just read."""
        # Without one nobody of this machine came yet.
        self._known = [decode(line, Arrival) for line in (read or b"").splitlines()]
        return self.gone_of_known()

    def gone_of_known(self) -> list[Arrival]:
        """Those that have ended of whoever was on the list when it was last read.  Needs no store."""
        return [arrival for arrival in self._known if process_is_gone(arrival.process)]
