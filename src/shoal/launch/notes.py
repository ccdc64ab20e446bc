"""What the launcher notes in the job's store for its ranks: who has ended, and how many are wanted."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from ..errors import StoreError, WireError
from ..rendezvous import note_exit, note_wanted
from ..store import Store


class Notes:
    """Notes in the store of an epoch of ``job``, which ``connect`` opens for the first of them."""

    def __init__(self, connect: Callable[[], Store], job: str, epoch: int = 0) -> None:
        self._connect = connect
        self._job, self._epoch = job, epoch
        self._store: Store | None = None

    def ended(self, rank: int, how: str) -> None:
        """Note that ``rank`` has ended, and how: ranks that wait for it hear of it."""
        with suppress(StoreError, WireError):
            note_exit(self._connected(), rank, how, job=self._job, epoch=self._epoch)

    def wanted(self, size: int) -> None:
        """Note how many ranks are wanted: others are spares."""
        with suppress(StoreError, WireError):
            note_wanted(self._connected(), size, job=self._job, epoch=self._epoch)

    def close(self) -> None:
        """Disconnect."""
        if self._store is not None:
            self._store.close()

    def _connected(self) -> Store:
        if self._store is None:
            self._store = self._connect()
        return self._store
