"""The store servers of this process: one for all worlds that meet at its address.

The rank 0 of a ``tcp://`` meeting starts a server where none listens.  A second world of the process at
the same address meets in that server too, so it lives until the last of them is closed.
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
    """One world's hold on a server of this process."""

    def __init__(self, address: _Address, server: TCPStoreServer) -> None:
        self._address = address
        self._leaving = False
        self.server = server

    def alone(self, store: TCPStore) -> bool:
        """Whether this world, whose connections are ``store``, need not keep the server up for others."""
        with _lock:
            if any(share is not self and not share._leaving for share in _shares[self._address]):
                self._leaving = True  # another world keeps it up
                return True
        return self.server.clients <= store.connections

    def close(self) -> None:
        """Let go of the server; the last one closes it."""
        with _lock:
            shares = _shares[self._address]
            shares.remove(self)
            if shares:
                return
            del _shares[self._address]
        self.server.close()


def share(address: str, port: int, secret: bytes, *, start: bool) -> ServerShare | None:
    """A hold on this process's server at the address.

    Args:
        address, port, secret: of the server.
        start: whether to start one if this process has none.

    Returns:
        None when this process serves nothing there; another one may.
    """
    # A forked child has its parent's table, but not its threads.
    key = (os.getpid(), address, port)
    with _lock:
        if key in _shares:
            found = ServerShare(key, _shares[key][0].server)
        elif start:
            try:
                found = ServerShare(key, TCPStoreServer(address, port, secret).start())
            except WireError:
                return None  # somebody listens there: a server that was started for the job
        else:
            return None
        _shares.setdefault(key, []).append(found)
        return found


def _after_fork_in_child() -> None:
    global _lock
    _lock = threading.Lock()  # a thread that the child does not have may have held it


os.register_at_fork(after_in_child=_after_fork_in_child)
