"""What the launcher writes into the job's store: the ranks that have ended, for those that wait for them."""

from __future__ import annotations

from contextlib import suppress

from ..errors import StoreError, WireError
from ..rendezvous import note_exit
from ..store import TCPStore, TCPStoreServer
from .environment import Job

#: seconds that the loop waits for its own store at most
_PATIENCE = 1.0


class ExitNotes:
    """Notes ends in the store that ``server``, once it is started, serves to ``job``."""

    def __init__(self, server: TCPStoreServer, job: Job) -> None:
        self._server = server
        self._job = job
        self._store: TCPStore | None = None

    def add(self, rank: int, how: str) -> None:
        """Note that ``rank`` has ended, and how."""
        with suppress(StoreError, WireError):
            if self._store is None:
                secret = self._job.secret.encode()
                self._store = TCPStore(self._server.host, self._server.port, secret, timeout=_PATIENCE)
            note_exit(self._store, rank, how, job=self._job.ident)

    def close(self) -> None:
        """Disconnect."""
        if self._store is not None:
            self._store.close()
