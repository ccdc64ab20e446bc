"""The launcher notes each rank that ends in the job's store, so that ranks that wait for it hear of it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from ..errors import StoreError, WireError
from ..rendezvous import note_exit
from ..store import Store


class ExitNotes:
    """Notes the ends of ranks in the store of ``job``, which ``connect`` opens for the first of them."""

    def __init__(self, connect: Callable[[], Store], job: str) -> None:
        self._connect = connect
        self._job = job
        self._store: Store | None = None

    def add(self, rank: int, how: str) -> None:
        """Note that ``rank`` has ended, and how."""
        with suppress(StoreError, WireError):
            if self._store is None:
                self._store = self._connect()
            note_exit(self._store, rank, how, job=self._job)

    def close(self) -> None:
        """Disconnect."""
        if self._store is not None:
            self._store.close()
