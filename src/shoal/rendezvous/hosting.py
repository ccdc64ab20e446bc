"""The store servers of this process, one for all worlds with the same address.

Rank 0 of a ``tcp://`` rendezvous starts a server if none listens. Further worlds of the process at the same
address use that server too, so it runs until the last of them is closed.
"""

from __future__ import annotations

import os
import threading

from ..errors import WireError
from ..store import TCPStore, TCPStoreServer

_Address = tuple[int, str, int]

_lock = threading.Lock()
_shares: dict[_Address, list[ServerShare]] = {}


class ServerShare:
    """One world's reference to a server of this process."""

    def __init__(self, address: _Address, server: TCPStoreServer) -> None:
        self._address = address
        self._leaving = False
        self.server = server

    def alone(self, store: TCPStore) -> bool:
        """Return whether no other world or client needs the server; ``store``: this world's client."""
        with _lock:
            if any(share is not self and not share._leaving for share in _shares[self._address]):
                self._leaving = True  # another world keeps the server running
                return True
        return self.server.clients <= store.connections

    def close(self) -> None:
        """Release the server; the last release closes it."""
        with _lock:
            shares = _shares[self._address]
            shares.remove(self)
            if shares:
                return
            del _shares[self._address]
        self.server.close()


def share(address: str, port: int, secret: bytes, *, start: bool) -> ServerShare | None:
    """Return a reference to this process's server at the address, or None if it has none there.

    With ``start``, first start a server if neither this nor another process has one there.
    """
    # A forked child has its parent's table but not its threads.
    key = (os.getpid(), address, port)
    with _lock:
        if key in _shares:
            found = ServerShare(key, _shares[key][0].server)
        elif start:
            try:
                found = ServerShare(key, TCPStoreServer(address, port, secret).start())
            except WireError:
                return None  # another process listens there: a server that was started for the job
        else:
            return None
        _shares.setdefault(key, []).append(found)
        return found


def _after_fork_in_child() -> None:
    global _lock
    _lock = threading.Lock()  # a thread of the parent may hold the old lock


os.register_at_fork(after_in_child=_after_fork_in_child)
